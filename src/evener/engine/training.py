"""The training loop over an epoch, where evener owns it: ``Ddp.builder`` and ``pretrain``."""

from collections.abc import Callable, Generator
from typing import Any

from evener.devices import free_cached_memory
from evener.engine.memory import MicroBatchTooLarge, explain, is_out_of_memory


def train_epoch(
    batches: Generator[Any, None, None],
    compute: Callable[[Any], object],
    step: Callable[[], object],
    *,
    on_redo: Callable[[], object] | None = None,
) -> None:
    """Train on every micro-batch of an epoch; when memory runs out, compute the share again.

    Args:
        batches: ``loader.epoch(n)``.
        compute: Forward and backward of one micro-batch.
        step: ``ddp.step``, or what contains it.
        on_redo: Called when this rank's part of a window is thrown away, to be done again in
            smaller micro-batches.

    Raises:
        RuntimeError: Or another error of ``compute``; out of memory also when the loader cannot
            yield smaller micro-batches, with a note.
    """
    end = object()
    batch = next(batches, end)
    while batch is not end:
        failure = None
        try:
            compute(batch)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            # Its traceback holds the frames, and they the activations.
            failure = error.with_traceback(None)
        if failure is None:
            step()
            batch = next(batches, end)
            continue
        del batch
        free_cached_memory()
        try:
            batch = batches.throw(MicroBatchTooLarge())
        except MicroBatchTooLarge as last:
            explain(failure, last.samples)
            raise failure from None
        if on_redo is not None:
            on_redo()
