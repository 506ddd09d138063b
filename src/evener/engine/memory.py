"""Micro-batches that fit: halved when memory runs out, remembered, known to the team."""

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Final

import torch

from evener.devices import free_cached_memory

_WORDS: Final = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device, or this computer, has no memory left."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS)


def explain(error: BaseException, samples: int) -> None:
    """Adds the remedy to an out-of-memory error of a micro-batch; leaves other errors alone."""
    if not is_out_of_memory(error) or samples < 1 or getattr(error, "__notes__", None):
        return
    if samples == 1:
        error.add_note("evener: not even a micro-batch of one sample fits; use a smaller model")
        return
    error.add_note(
        f"evener: a micro-batch of {samples} samples does not fit into the memory of this rank, "
        "and a batch that has been handed out cannot be repeated. Give "
        f"ddp.loader(micro_batch_size=...) a smaller number on this rank, such as {samples // 2}; "
        "other ranks may keep theirs"
    )


class MicroBatchTooLarge(Exception):
    """Thrown into a loader's generator: what it has yielded last did not fit into memory.

    Args:
        samples: Samples of that micro-batch, where the loader raises it again, having no smaller
            one to offer.
    """

    def __init__(self, samples: int = 0) -> None:
        super().__init__(samples)
        self.samples = samples


class MicroBatchLimits:
    """The largest micro-batch that fits, for each rank where memory has run out.

    Each rank finds its own; the team learns them when a window is closed, as the cost of a share
    depends on them.

    Attributes:
        base: Largest micro-batch where memory sets no limit.
        own: This rank's limit; 0 while none is known.
        known: What the team knows, by rank; 0 for no limit.
    """

    def __init__(self, world_size: int) -> None:
        self.base: int | None = None
        self.own = 0
        self.known = [0] * world_size

    @property
    def sizes(self) -> list[int | None]:
        """Largest micro-batch by rank."""
        return [_smaller(self.base, limit) for limit in self.known]

    def shrink(self, samples: int) -> None:
        """Half of ``samples``, which did not fit, is the new limit."""
        self.own = max(1, samples // 2)

    def learn(self, limits: Sequence[int]) -> bool:
        """Takes what the ranks say in a meeting; returns whether something is new."""
        before = list(self.known)
        self.known = [new or old for new, old in zip(limits, self.known, strict=True)]
        return self.known != before

    def state_dict(self, members: Sequence[str]) -> dict[str, int]:
        """Limits by member, where there are any."""
        return {m: limit for m, limit in zip(members, self.known, strict=True) if limit}

    def load_state_dict(self, state: Mapping[str, int], members: Sequence[str], rank: int) -> None:
        """Takes over limits of members that are here."""
        self.known = [int(state.get(member, 0)) for member in members]
        self.own = self.known[rank]


def train_epoch(
    batches: Generator[Any, None, None],
    compute: Callable[[Any], object],
    step: Callable[[], object],
    *,
    on_redo: Callable[[], object] | None = None,
) -> None:
    """Goes through an epoch where evener owns the loop: out of memory, a share is done again.

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
        failure = _try(compute, batch)
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


def _try(compute: Callable[[Any], object], batch: Any) -> Exception | None:
    try:
        compute(batch)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        # Its traceback holds the frames, and they the activations.
        return error.with_traceback(None)
    return None


def _smaller(base: int | None, limit: int) -> int | None:
    if not limit:
        return base
    return limit if base is None else min(base, limit)
