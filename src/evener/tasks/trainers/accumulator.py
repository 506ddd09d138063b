"""Windows that a caller fills with its own batches and closes at any time."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

from evener.engine.results import WindowResult
from evener.engine.share import Share
from evener.engine.sync import SyncEngine
from evener.errors import UsageError
from evener.loop.loop import Loop


@final
class Accumulator:
    """Accumulates micro-batches on one rank until all ranks close the window together.

    Args:
        ddp: The team, with policy ``"sync"``.

    Attributes:
        num_batches: Micro-batches of this window so far.
    """

    def __init__(self, ddp: Loop) -> None:
        self._ddp = ddp
        self._engine = ddp.assembly.engine
        self._share: Share | None = None
        self.num_batches = 0

    @contextmanager
    def micro_batch(self, samples: int) -> Iterator[None]:
        """Compute a micro-batch inside the block, ``ddp.backward`` included.

        Only time inside the block counts as compute, so the device must be synchronised at its end.
        After an error, this rank drops its part of the window.

        Args:
            samples: Samples of the micro-batch.

        Raises:
            UsageError: A loader of the team hands out batches.
        """
        engine, share = self._engine, self._share
        if engine.in_epoch:
            raise UsageError(
                "forward_backward_batch was called inside a loop over a loader of the team, which "
                "accounts for its own micro-batches; use TransformerTrainer.backward and ddp.step "
                "there"
            )
        if share is None:
            share = self._share = engine.open_share(2)  # the number is not known yet
        else:
            share.resume()
            share.end_micro_batch()
        share.start_micro_batch(samples)
        try:
            yield
        except BaseException:
            self.drop()
            raise
        share.pause()
        self.num_batches += 1

    def drop(self) -> None:
        """Drop what this rank has accumulated."""
        self._share, self.num_batches = None, 0
        self._engine.drop_share()

    def close_window(self) -> WindowResult | None:
        """Make the update; all ranks call it together, also those without a batch.

        Returns:
            The window, the same on every rank; ``None`` if no rank had a batch.

        Raises:
            NonFiniteGradientError: On every rank; nothing was applied.
        """
        share, self._share, self.num_batches = self._share, None, 0
        if share is None:
            assert isinstance(self._engine, SyncEngine)
            return self._engine.join_unplanned()
        share.resume()
        return self._ddp.step()
