"""Local steps through a change of the team: the remaining ranks keep their steps."""

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from evener.data.cursor import Slice
from evener.data.leases import LeaseBook
from evener.engine.changing import ElasticEngine
from evener.engine.engine import EngineOptions
from evener.engine.exchanging import BackgroundExchanger, Exchanged, Exchanger
from evener.engine.moments import RecentMoments
from evener.engine.replica import Replica
from evener.engine.results import Progress
from evener.engine.share import WindowSpans
from evener.engine.state import TrainingState
from evener.engine.steps import LocalSteps
from evener.engine.team import Team
from evener.errors import LeftOutError
from evener.planning.cadence import CadencePolicy
from evener.planning.local_plan import LocalPlan
from evener.planning.policies import ApplyPolicy
from evener.planning.report import Report
from evener.protocol.row import Row, pack


class KeepingEngine(ElasticEngine):
    """An engine whose ranks make local steps, and keep them when their team changes.

    The batches of a lost rank go back to the epoch. The remaining ranks keep theirs. The next
    generation begins with a plan that closes the window, so that they average their steps at once.
    The same happens when a rank joins while they have already made steps of the next window. Only
    the lost rank's batches are computed again, and no optimizer has to be rolled back.

    An exchange that failed may have landed on some ranks. The others receive the consensus from one
    of these. They land by it as they would have landed by the exchange.

    Args:
        team: The ranks.
        policy: Plans; only the planner's counts.
        training: What this rank trains with: the model is its working copy.
        options: What the engine is told.
        background: For ASYNC: a second communicator of the same ranks, for the thread that
            exchanges.
    """

    def __init__(
        self,
        team: Team,
        policy: CadencePolicy,
        training: TrainingState,
        options: EngineOptions,
        *,
        background: Team | None = None,
    ) -> None:
        way = ApplyPolicy.CADENCE if background is None else ApplyPolicy.ASYNC
        super().__init__(team, training, options, way)
        self._background = background
        self._exchanger: Exchanger[Exchanged] = Exchanger()
        if background is not None:
            self._exchanger = BackgroundExchanger(f"average-{team.rank}")
            self.spans = WindowSpans(team, background)
        self._policy = policy
        policy.set_absent(team.absent)
        self._replica = Replica(self.flat, self.buffers, self._check, team.comm)
        self._steps = LocalSteps(training, options)
        self._moments = RecentMoments(team.comm, self.optimizers, self._schedule)
        self._book: LeaseBook | None = None
        #: The rest of this rank's queue, without the batch that is open.
        self._own: deque[Slice] = deque()
        self._in_batch = False
        #: This rank's work in the window whose exchange has begun and not landed.
        self._flown: Report | None = None
        #: Progress and loss scale before a window that has landed on other ranks only.
        self._lag: tuple[Progress, float] | None = None
        #: Whether the loop's present micro-batch is void.
        self._is_void = False

    @property
    def policy(self) -> CadencePolicy:
        """Return the policy that divides the work; only the planner's decides."""
        return self._policy

    # ── plans ────────────────────────────────────────────────────────────────────────────────────

    def _exchange_plans(self, *work_for_all: float, change: int = 0) -> None:
        """Agree on the plan of the next window, which may be over; all ranks call it together."""
        held = self._tell_held()
        book = self._book = LeaseBook(
            self.cursor,
            self.batch_size,
            self.world_size,
            avoid_ones=self.options.avoid_ones,
            held=held,
        )
        draft: tuple[float, ...] = ()
        if self.rank == self.state.planner:
            if held and any(held.values()):
                done = [len(held.get(rank, ())) for rank in range(self.world_size)]
                draft = tuple(pack(self._policy.close(self.window, self.cursor.epoch, done)))
            else:
                draft = self._draft(self.window, book.num_left, self._steps_left)
        self._agree_on_plan((*self._data(), *draft), change)
        plan = self.state.plan
        if isinstance(plan, LocalPlan):
            book.fill(plan.queues)
            self._go_by(plan)

    def _tell_held(self) -> dict[int, list[Slice]] | None:
        """Tell the others of an elastic team this rank's part of a window; return each rank's."""
        if not self.team.is_elastic:
            return None
        own = () if self._book is None else self._book.queue(self.rank)[: self._steps.num_done]
        told = self.team.introduce([(piece.start, piece.size) for piece in own])
        epoch = self.cursor.epoch
        return {
            rank: [Slice(epoch, *piece) for piece in pieces]
            for rank, pieces in zip(self.team.members, told, strict=True)
        }

    def _draft(
        self, window: int, left: int, limit: int | None, *, stop: bool = False
    ) -> tuple[float, ...]:
        plan = self._policy.plan(window, self.cursor.epoch, left=left, limit=limit, stop=stop)
        return tuple(pack(plan))

    def _go_by(self, plan: LocalPlan) -> None:
        """Follow a plan; batches of it that this rank has already computed count."""
        done = self._steps.num_done + self._in_batch  # the open batch must not be handed out again
        self._own = deque(self._leases.queue(self.rank)[done:])
        self._steps.follow(plan, self.rank)

    @property
    def _leases(self) -> LeaseBook:
        assert self._book is not None, "no epoch was begun"
        return self._book

    @property
    def _steps_left(self) -> int | None:
        return None if self._max_steps is None else max(0, self._max_steps - self.turns)

    # ── a change of the team ─────────────────────────────────────────────────────────────────────

    def drop_share(self) -> None:
        """Throw away what the open batch has accumulated, in gradients and buffers."""
        self._in_batch = False
        self.flat.zero_()
        self.buffers.rewind()
        self._steps.resume_clock()

    def _let_go(self) -> None:
        super()._let_go()
        self._exchanger.close()

    def _break_off(self) -> None:
        self._is_void = self.share.in_micro_batch and self.in_epoch
        if self._in_batch:
            samples = self.share.open_samples
            self.drop_share()
            self._open(0, 1.0)
            if self._is_void:  # the loop completes it, but it is void
                self.share.start_micro_batch(samples)
        self._own.clear()
        if self._cursor is not None:
            self._cursor.release()
        self._take_again()

    def _drop_out(self, left_out: LeftOutError, *, may_join: bool) -> None:
        super()._drop_out(left_out, may_join=may_join)
        self._flown = self._book = self._lag = None
        self._steps.next_window(0)

    def _use_team(self) -> None:
        super()._use_team()
        # A rank of an earlier generation that was stopped and continues may write into that
        # generation's memory, so the tensors move out of it.
        self.buffers.move(self.comm)
        self._replica.move(self.comm)
        self._moments.use(self.comm)
        self.team.form_beside()

    def _continue_from(self, base: int) -> None:
        if self._lag is not None:
            return
        if self._flown is not None and self.window == base:
            self._steps.take_back(self._flown)
            self._flown = None
        if self._flown is None and self._steps.num_done:
            self._schedule.agree(self.progress, 0)  # no further step is made before the average

    def _shared(self) -> Iterator[tuple[str, Tensor]]:
        self._replica.adopt()
        yield from (("parameters", agreed) for agreed in self._replica.consensus)
        yield from (("buffers", agreed) for agreed in self.buffers.agreed)
        yield from self.training.frozen()

    def _hashes(self) -> list[int]:
        self._replica.adopt()
        # Without showing the consensus: the loop may be between a forward and its backward.
        return self._check.hashes(self._replica.consensus, self.buffers.agreed)

    @property
    def _keeps_own(self) -> bool:
        return self._flown is not None

    def _take_counters(self, counters: Mapping[str, Any]) -> None:
        if self._flown is not None:
            self._lag = self.progress, self._scale.value
        super()._take_counters(counters)

    def _take_model(self) -> None:
        if self._flown is None:
            self._replica.restore()
            self._scale.reset()

    def _commit(self, rows: Mapping[int, Row]) -> None:
        """Commit the previous window, if this rank may."""
        if self.state.is_elastic:
            self.team.await_lease()
        super()._commit(rows)

    def _resume(self) -> bool:
        # In a commit the model shows the consensus, and not this rank's working copy.
        if self._lag is not None and not self.committing:
            self._catch_up(*self._lag)
            self._lag = None
        has_plans = super()._resume()
        if self._is_void:
            self.buffers.keep()  # the void batch goes back to these, not to the previous ones
        return has_plans

    def _catch_up(self, before: Progress, scale: float) -> None:
        """Let the window in flight land, by the consensus that has arrived."""
        flown, self._flown = self._flown, None
        assert flown is not None
        self._replica.catch_up(moved_on=self._steps.num_done > 0)
        self._leases.retire(self.rank, flown.steps, flown.samples)
        self._schedule.agree(self.progress, self.progress.steps - before.steps)
        self._scale.follow(scale)
        if self.progress.weight > before.weight:
            self._moments.add(flown.weight)
