"""The loader of a team: hands each rank its micro-batches and takes part where it has none."""

import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, final

from evener.data.cursor import Cursor
from evener.data.loader import Fetcher, Pending
from evener.engine.engine import Engine
from evener.engine.loaders.facts import Described, LikeDataLoader
from evener.engine.loaders.intake import Indices, Order
from evener.engine.loaders.loops import Loop
from evener.engine.membership import Call
from evener.engine.memory import MicroBatchTooLarge
from evener.engine.share import Share
from evener.engine.sync import WindowEngine
from evener.errors import UsageError
from evener.planning.plan import WindowPlan

_LONGER_EPOCH = 0.01
"""Part of an epoch that it may be lengthened by, so that every rank has work in its beginning."""


@final
@dataclass(frozen=True, slots=True)
class Feed:
    """What a loader hands out.

    Attributes:
        fetcher: Loads the samples.
        cursor: Which have been committed.
        order: In which order they come.
        batch_size: Samples of an optimizer step: of the team in SYNC, of one rank otherwise.
        micro_batch_size: Most samples of one forward and backward.
        max_steps: Optimizer steps of the run; ``None`` for no limit.
        given: How the user wants data to be loaded.
    """

    fetcher: Fetcher
    cursor: Cursor
    order: Order
    batch_size: int
    micro_batch_size: int
    max_steps: int | None
    given: Described


class TeamLoader(LikeDataLoader, ABC):
    """Iterates over a map-style data set, every sample exactly once an epoch over all ranks.

    Made by ``Ddp.loader``. All ranks iterate over the same epochs; each gets the micro-batches of
    its own share. A rank without a share in some window takes part in that window's exchange
    inside ``__next__``, so ranks may go round the loop a different number of times.
    """

    def __init__(self, engine: Engine, feed: Feed) -> None:
        super().__init__(feed.given)
        self._team_engine = engine
        self._feed = feed
        self.cursor = feed.cursor
        self.batch_size = feed.batch_size
        self.loop = Loop()
        self._next = 0
        self._left = False

    def __len__(self) -> int:
        """Optimizer steps of an epoch: windows of ``batch_size`` samples, the last one shorter."""
        return self.cursor.num_windows(self.batch_size)

    @property
    def micro_batch_size(self) -> int:
        """Most samples in one forward and backward on this rank."""
        limit = self._team_engine.limits.own
        return min(self._feed.micro_batch_size, limit or self._feed.micro_batch_size)

    def __iter__(self) -> Iterator[Any]:
        """The epoch after the one that was iterated over last, from 0; see ``epoch``."""
        return self.epoch(self._next)

    def epoch(self, epoch: int) -> Generator[Any, None, None]:
        """This rank's micro-batches of an epoch; all ranks call it with the same number.

        A committed epoch yields nothing, a partly committed one goes on where the team is. In the
        first window every rank has work, unless that is predicted to lengthen the epoch by more
        than 1 %.

        Args:
            epoch: Number of the epoch, from 0.

        Yields:
            Collated micro-batches.

        Raises:
            UsageError: ``ddp.step()`` was not called for the micro-batch before, or a parameter
                of the model was replaced.
        """
        self._next = epoch + 1
        loop = self.loop = Loop.here()
        engine = self._team_engine
        if engine.left:  # by `break`, perhaps in the last window of this very epoch
            engine.settle()
        if self.cursor.is_committed(epoch):
            loop.skipped = f"epoch {epoch} had been committed before, so nothing was left to do"
            return
        if self._finished:
            loop.skipped = "the team had stopped, or reached max_steps, before this epoch"
            return
        loop.skipped = "this rank had no share of the windows of this epoch"
        if engine.in_epoch:
            raise UsageError(
                f"epoch {epoch} was begun inside the loop over another one; finish that loop, or "
                "leave it by break, first"
            )
        engine.options.check_model()
        engine.begin(self.cursor, self.batch_size)
        # What is left of an epoch that was left by `break` is passed over.
        self.cursor.begin(epoch, abandon=self._left)
        self._left = False
        indices = self._feed.order.of(epoch)
        self._compare(indices)
        engine.in_epoch = True
        try:
            yield from self._train(indices)
            if engine.others_left:
                self._left = True
            else:
                engine.flush()
        except BaseException:  # GeneratorExit, after `break`; or an error, which others may not see
            self._left = True
            if not sys.is_finalizing():  # a script has ended inside its loop: nothing is left to do
                engine.leave()
            raise
        finally:
            engine.in_epoch = engine.others_left = False
            self._forget()

    @abstractmethod
    def _train(self, permutation: Indices) -> Generator[Any, None, None]:
        """Plans and computes what is left of the epoch."""

    @abstractmethod
    def _forget(self) -> None:
        """Drops what has been fetched ahead."""

    @property
    def _finished(self) -> bool:
        engine = self._team_engine
        done = self._feed.max_steps is not None and engine.turns >= self._feed.max_steps
        return engine.stopping or done

    def state_dict(self) -> dict[str, Any]:
        """The data position; no rank count."""
        return self.cursor.state_dict()

    def restore(self, state: Mapping[str, Any], *, allow_new_data: bool = False) -> None:
        """Goes on from ``state``; with ``allow_new_data``, from the first epoch of other data.

        Raises:
            CheckpointError: It is of another data set or seed.
        """
        if allow_new_data and not self.cursor.is_of(state):
            self.cursor.restart()
        else:
            self.cursor.load_state_dict(state)

    def _compare(self, indices: Indices) -> None:
        """Refuses a sampler that draws other samples on another rank."""
        if not (own := self._feed.order.fingerprint(indices)):
            return
        team = self._team_engine.team
        for rank, other in enumerate(team.introduce({"order": own})):
            if other["order"] != own:
                raise UsageError(
                    f"the sampler draws other samples on rank {rank} than on rank {team.rank}; it "
                    "must draw from torch's, NumPy's or Python's global generators, or be seeded "
                    "alike, and not split the data by rank"
                )

    def close(self) -> None:
        """Ends the fetching of data; idempotent."""
        self._forget()
        self._feed.fetcher.close()

    def _submit(
        self, epoch: int, positions: Sequence[int], permutation: Indices
    ) -> deque[tuple[int, int, Pending]]:
        """Asks for samples, in micro-batches: first position, number of samples, batch."""
        queue: deque[tuple[int, int, Pending]] = deque()
        avoid_ones = self._team_engine.options.avoid_ones
        for part in split(positions, self.micro_batch_size, avoid_ones=avoid_ones):
            indices = [permutation[p] for p in part]
            queue.append((part[0], len(part), self._feed.fetcher.submit(epoch, indices)))
        return queue

    def _seed(self, window: int, first_position: int) -> None:
        """Derives a micro-batch's random numbers (dropout) from what it is, not from a state."""
        self.loop.skipped = ""  # it is handed out next
        self._team_engine.seed_draws(self.cursor.seed, "micro-batch", window, first_position)


@final
class SyncLoader(TeamLoader):
    """The loader of SYNC: windows are slices of the epoch, split by share."""

    def __init__(self, engine: WindowEngine, feed: Feed) -> None:
        super().__init__(engine, feed)
        self._engine = engine
        # By the plan itself: a plan may be replaced by another one for the same window.
        self._fetched: dict[WindowPlan, deque[tuple[int, int, Pending]]] = {}

    def _train(self, permutation: Indices) -> Generator[Any, None, None]:
        """Plans the first windows and computes what is left of the epoch."""
        engine = self._engine
        if engine.team.world_size > 1 and not engine.policy.is_calibrated:
            engine.calibrate()
        engine.exchange_plan(work_for_all=_LONGER_EPOCH * len(self))
        engine.exchange_plan()
        yield from self._windows(permutation)

    def _forget(self) -> None:
        self._fetched.clear()

    def _windows(self, permutation: Indices) -> Generator[Any, None, None]:
        engine = self._engine
        while True:
            if engine.team.is_parked:
                if self.loop.skipped:
                    self.loop.skipped = "this rank was parked, as it cost more than it brought"
                engine.wait_for_recall()
                if engine.others_left:
                    return
            plan = engine.plans.peek()
            if self._finished or plan is None:
                break
            self._fetch(plan, permutation)
            micro_batches = self._fetched.pop(plan)
            self._fetched.clear()
            if (ahead := engine.plans.peek(1)) is not None and not self._is_last(plan):
                self._fetch(ahead, permutation)
            share = engine.open_share(len(micro_batches))
            if not micro_batches:
                engine.close(abandon=engine.options.stop_requested())
                if engine.others_left:
                    return
            else:
                yield from self._compute(plan, share, micro_batches, permutation)
        if engine.team.parked:
            engine.recall(Call.END)

    def _compute(
        self,
        plan: WindowPlan,
        share: Share,
        micro_batches: deque[tuple[int, int, Pending]],
        permutation: Indices,
    ) -> Generator[Any, None, None]:
        """Hands out this rank's share; all of it anew where a micro-batch does not fit."""
        engine = self._engine
        while micro_batches:
            first, samples, pending = micro_batches.popleft()
            batch = self._received(pending)
            self._seed(plan.window, first)
            share.start_micro_batch(samples)
            try:
                yield batch
            except MicroBatchTooLarge:
                if samples == 1 or share.turns:
                    raise MicroBatchTooLarge(samples) from None
                engine.limits.shrink(samples)
                engine.drop_share()
                self._fetched.clear()
                self._fetch(plan, permutation)
                micro_batches = self._fetched.pop(plan)
                share = engine.open_share(len(micro_batches))
                continue
            if share.in_micro_batch and share.turns:
                engine.end_micro_batch()
            elif share.in_micro_batch:
                raise share.not_ended()
            if engine.window != plan.window or engine.stopping:
                return

    def _is_last(self, plan: WindowPlan) -> bool:
        return self._feed.max_steps is not None and plan.window + 1 >= self._feed.max_steps

    def _fetch(self, plan: WindowPlan, permutation: Indices) -> None:
        """Asks for this rank's samples of a window, unless that has been done."""
        if plan in self._fetched:
            return
        positions = plan.positions(self._engine.team.rank)
        self._fetched[plan] = self._submit(plan.epoch, positions, permutation)


def split(
    positions: Sequence[int], micro_batch_size: int, *, avoid_ones: bool = False
) -> list[Sequence[int]]:
    """Cuts a share into full micro-batches and one of what remains.

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
