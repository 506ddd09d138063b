"""What evener's loaders have in common: the attributes of a ``DataLoader``, and epochs."""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager
from typing import Any, NoReturn

from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader

from evener.data.cursor import Cursor
from evener.data.fetching import Pending
from evener.engine.changing import ElasticEngine
from evener.engine.loaders.intake import Collate, Intake
from evener.engine.share import Share
from evener.errors import UsageError
from evener.places import here


class LikeDataLoader:
    """The attributes of a ``DataLoader`` that scripts read, such as ``len(loader.dataset)``."""

    def __init__(self, given: DataLoader[Any] | Intake) -> None:
        self.dataset: Any = given.dataset
        self.collate_fn: Collate = given.collate_fn
        self.num_workers = given.num_workers
        self.batch_size = given.batch_size
        self.drop_last = given.drop_last
        self.pin_memory = given.pin_memory

    def _received(self, pending: Pending) -> Any:
        """Return a batch, in page-locked memory where the user's ``DataLoader`` asked for it."""
        batch = pending.result()
        return tree_map_only(Tensor, Tensor.pin_memory, batch) if self.pin_memory else batch

    @property
    def sampler(self) -> NoReturn:
        """Raise the error that says why this loader has no sampler."""
        raise AttributeError(
            "evener's loaders have no sampler: each epoch has an order of its own, which follows "
            "from its number and the seed. Leave sampler.set_epoch(epoch) out, and iterate over "
            "loader.epoch(epoch)"
        )


class TrainingLoader(LikeDataLoader, ABC):
    """Iterates over epochs, in which all ranks train together.

    Args:
        engine: Says what this rank is to compute.
        given: The data set, and how it is loaded.
        max_steps: Optimizer steps of the run; ``None`` for no limit.
        cursor: The data position.

    Attributes:
        cursor: As given.
        left_at: File and line at which the user's loop was left last.
    """

    def __init__(
        self,
        engine: ElasticEngine,
        given: DataLoader[Any] | Intake,
        max_steps: int | None,
        cursor: Cursor,
    ) -> None:
        super().__init__(given)
        self._engine = engine
        self._max_steps = max_steps
        self.cursor = cursor
        self._next = 0
        self.left_at = ""

    def __iter__(self) -> Iterator[Any]:
        """Yield the epoch after the one that was iterated over last, from 0; see ``epoch``."""
        return self.epoch(self._next)

    def epoch(self, epoch: int) -> Generator[Any, None, None]:
        """Yield this rank's micro-batches of an epoch; all ranks call it with the same number.

        A committed epoch yields nothing, a partly committed one continues where the team is; of a
        stream, it starts over.

        Args:
            epoch: Number of the epoch, from 0.

        Returns:
            Collated micro-batches, as they are asked for.

        Raises:
            UsageError: ``ddp.step()`` was not called for the micro-batch before, a parameter of the
                model was replaced, or this worker joins an elastic team outside of ``ddp.epochs``.
        """
        batches = self._train(epoch)
        # A script may still hold it when it ends, as after ``it = iter(loader)``. Python would
        # close it after modules are cleared, so that its own code would fail.
        weakref.finalize(batches, _close, weakref.ref(batches))
        return batches

    def _train(self, epoch: int) -> Generator[Any, None, None]:
        engine, self._next = self._engine, epoch + 1
        if engine.has_left:  # by `break`, perhaps in the last window of this very epoch
            engine.settle()
        if engine.is_joining:
            raise UsageError(
                "this worker joins a team that has begun before, and cannot tell in which epoch "
                "its own loop has to begin. Write `for epoch in ddp.epochs(num_epochs):` in place "
                "of `for epoch in range(num_epochs):`; it begins with the epoch of the team. No "
                "worker can join over a stream"
            )
        if self._is_over or self.cursor.is_committed(epoch):
            return
        engine.check_start(epoch)
        with self._begin(epoch):
            try:
                yield from self._batches(epoch)
            except BaseException:  # GeneratorExit, after `break`; or an error of this rank alone
                self.left_at = here()
                engine.leave()
                raise

    def state_dict(self) -> dict[str, Any]:
        """Return the data position; no rank count."""
        return self.cursor.state_dict()

    @property
    def _is_over(self) -> bool:
        """Return whether the run has ended: stopped, or made all its optimizer steps."""
        most = self._max_steps
        return self._engine.stopping or (most is not None and self._engine.turns >= most)

    def _compute(
        self, batch: Any, share: Share, samples: int, *place: int | str
    ) -> Generator[Any, None, None]:
        """Hand out a micro-batch, and see that the loop has ended it.

        Args:
            batch: What is handed out.
            share: The micro-batches between two updates, of which it is one.
            samples: Its samples.
            *place: What tells it from all others: dropout is drawn from that, not from a state.

        Yields:
            The micro-batch.

        Raises:
            UsageError: The loop asked for the next one without ``ddp.step()``.
        """
        engine = self._engine
        engine.seed_draws(*place)
        share.start_micro_batch(samples)
        yield batch
        if engine.share is share and share.in_micro_batch:  # no change of the team broke it off
            if not share.turns:
                raise share.not_ended()
            engine.end_micro_batch()

    @abstractmethod
    def _begin(self, epoch: int) -> AbstractContextManager[None]:
        """Begin an epoch, which is open in a ``with`` block; all ranks call it together."""

    @abstractmethod
    def _batches(self, epoch: int) -> Iterator[Any]:
        """Yield this rank's micro-batches of the epoch that was begun, and end it."""


def _close(held: weakref.ref[Generator[Any, None, None]]) -> None:
    if (batches := held()) is not None:
        batches.close()
