"""Loaders for training: epochs in general, and those over a map-style data set."""

import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any, Final, final

from evener.data.cursor import Cursor
from evener.data.fetching import Fetcher, Pending
from evener.data.signature import sign
from evener.engine.engine import Engine
from evener.engine.loaders.dataset_arguments import (
    DatasetArguments,
    Described,
    Indices,
    LikeDataLoader,
    compare_orders,
    fingerprint,
)
from evener.engine.memory import MicroBatchTooLarge
from evener.engine.results import Work
from evener.engine.share import Share
from evener.errors import UsageError
from evener.places import here
from evener.protocol.formation import TRAINING

#: What a rank is doing, for the case that others wait for it.
_LOADING: Final = "loading data"
_BEGINNING: Final = "in its first micro-batch of this size, which may compile or autotune"


class TrainingLoader(LikeDataLoader, ABC):
    """Iterates over epochs, in which all ranks train together.

    Args:
        engine: Says what this rank is to compute.
        given: The data set, and how it is loaded.
        max_steps: Optimizer steps of the run; ``None`` for no limit.

    Attributes:
        cursor: The data position; set by the subclass.
        left_at: File and line at which the user's loop was left last.
    """

    cursor: Cursor

    def __init__(self, engine: Engine, given: Described, max_steps: int | None) -> None:
        super().__init__(given)
        self._engine = engine
        self._max_steps = max_steps
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
        if engine.rounds.has_left:  # by `break`, perhaps in the last window of this very epoch
            engine.settle()
        if engine.generations.is_joining:
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
        is_complete = most is not None and self._engine.optimizer_steps >= most
        return self._engine.rounds.stopping or is_complete

    def _compute(
        self, batch: Any, share: Share, samples: int, *place: int | str
    ) -> Generator[Any, None, None]:
        """Hand out a micro-batch, and see that the loop has ended it.

        Args:
            batch: What is handed out.
            share: The micro-batches between two updates, of which it is one.
            samples: Its samples.
            *place: What identifies it: dropout is drawn from that, not from a state.

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
            if not share.single_steps:
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


@final
class TeamLoader(TrainingLoader):
    """Iterates over a map-style data set, every sample exactly once an epoch over all ranks.

    Made by ``Ddp.loader``. All ranks iterate over the same epochs; each gets the micro-batches of
    its own share: in SYNC that of a window of ``batch_size`` samples, in CADENCE and ASYNC batches
    of this size, each of which is a local step. A rank without work takes part in the exchange of
    windows inside ``__next__``, so ranks may run different numbers of loop iterations. In the first
    window every rank has work, unless that is predicted to lengthen the epoch by more than 1 %.

    Args:
        engine: Says what this rank is to compute.
        arguments: The data set, and how to go through it.
        fetcher: Loads its samples.
        micro_batch_size: Most samples of one forward and backward.
        max_steps: Optimizer steps of the run; ``None`` for no limit.
    """

    batch_size: int

    def __init__(
        self,
        engine: Engine,
        arguments: DatasetArguments,
        *,
        fetcher: Fetcher,
        micro_batch_size: int,
        max_steps: int | None,
    ) -> None:
        super().__init__(engine, arguments, max_steps)
        self.cursor = Cursor(arguments.count_trained(), arguments.seed)
        self._arguments = arguments
        self._fetcher = fetcher
        self._most_samples = micro_batch_size
        self._left = False
        #: What is on its way, by positions in the epoch.
        self._fetched: dict[range, deque[tuple[int, int, Pending]]] = {}

    def __len__(self) -> int:
        """Return the windows of an epoch: ``batch_size`` samples each, the last one shorter."""
        return self.cursor.num_windows(self.batch_size)

    @property
    def micro_batch_size(self) -> int:
        """Return the most samples in one forward and backward on this rank."""
        return min(self._most_samples, self._engine.run.limits.own or self._most_samples)

    def join(self) -> None:
        """Join the team and take its data position over, if that began before this rank came."""
        self._engine.generations.join(self.cursor, self.batch_size, self._max_steps)

    def _begin(self, epoch: int) -> AbstractContextManager[None]:
        engine = self._engine
        engine.begin(self.cursor, self.batch_size, self._max_steps)
        # What is left of an epoch that was left by `break` is passed over.
        self.cursor.begin(epoch, abandon=self._left)
        self._left = True
        return engine.epoch_open()

    def _batches(self, epoch: int) -> Iterator[Any]:
        engine, indices = self._engine, self._arguments.order(epoch)
        order = fingerprint(indices)
        if order and not engine.generations.has_just_joined:
            gathered = engine.collectives.ask("comparing samplers", [len(indices), order])
            compare_orders(gathered, engine.rounds.rank)
        try:
            for work in engine.work():
                yield from self._hand_out(work, indices)
        finally:
            self._fetched.clear()
        if not engine.rounds.state.led_out:
            engine.end_epoch()
        # Where others have left by `break`, this rank has it from them, or from a change of the
        # team that came meanwhile. If the team continues without this rank, it may still be in this
        # epoch, which this rank must not pass over.
        self._left = not (engine.generations.is_joining or self.cursor.is_committed(epoch))

    def introduce_data(self) -> None:
        """Let the coordinator of an elastic team compare the data with that of the other workers.

        Raises:
            TeamRefusedError: It differs; says in what.
        """
        team = self._engine.team
        if team.is_elastic:
            team.membership.describe(sign(self._fetcher, len(self._arguments.samples)))

    def close(self) -> None:
        """End the fetching of data; idempotent."""
        self._fetched.clear()
        self._fetcher.close()

    def _hand_out(self, work: Work, permutation: Indices) -> Generator[Any, None, None]:
        """Hand out a share, or a batch; again from its start if a micro-batch does not fit."""
        engine, window = self._engine, work.window
        if remark := self._fetcher.remark:
            engine.options.guards.warn_once(remark)
        self._fetched = {
            positions: self._fetched.get(positions) or self._submit(positions, permutation)
            for positions in work.positions
        }
        positions = work.positions[0]
        micro_batches = self._fetched.pop(positions)
        share = engine.open_share(len(micro_batches))
        while micro_batches and engine.share is share:
            first, samples, pending = micro_batches.popleft()
            asked_s = time.perf_counter()
            engine.team.membership.declare(_LOADING)
            batch = self._received(pending)
            engine.team.membership.declare(
                TRAINING if samples in engine.known_sizes else _BEGINNING
            )
            engine.spans.receive(asked_s)
            place = self.cursor.seed, "micro-batch", window, first
            try:
                yield from self._compute(batch, share, samples, *place)
            except MicroBatchTooLarge:
                if samples == 1 or share.single_steps:
                    raise MicroBatchTooLarge(samples) from None
                engine.run.limits.shrink(samples)
                self._fetched.clear()
                if engine.redo():
                    return
                micro_batches = self._submit(positions, permutation)
                share = engine.open_share(len(micro_batches))
                continue
            if engine.window != window or not engine.rounds.state.is_working:
                return

    def _submit(
        self, positions: Sequence[int], permutation: Indices
    ) -> deque[tuple[int, int, Pending]]:
        """Ask for samples, in micro-batches: first position, number of samples, batch."""
        queue: deque[tuple[int, int, Pending]] = deque()
        options = self._engine.options
        for part in split(positions, self.micro_batch_size, avoid_ones=options.avoid_ones):
            indices = [permutation[p] for p in part]
            pending = self._fetcher.submit(self.cursor.epoch, indices)
            queue.append((part[0], len(part), pending))
        return queue


def split(
    positions: Sequence[int], micro_batch_size: int, *, avoid_ones: bool = False
) -> list[Sequence[int]]:
    """Cut a share into full micro-batches and one of what remains.

    So a rank uses at most two sizes, and the full one whatever its share: what compiles or tunes
    itself for a size does so twice.

    Args:
        positions: The share.
        micro_batch_size: Most samples of a micro-batch.
        avoid_ones: Where a single sample would remain, cut into nearly equal parts instead: layers
            with batch statistics cannot normalise one.
    """
    size, total = micro_batch_size, len(positions)
    if avoid_ones and total > size > 1 and total % size == 1:
        parts = -(-total // size)
        cuts = [total * k // parts for k in range(parts + 1)]
    else:
        cuts = [*range(0, total, size), total]
    return [positions[start:stop] for start, stop in pairwise(cuts)]
