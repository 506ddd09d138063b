"""CADENCE and ASYNC: a window is some local optimizer steps of each rank.

Ranks average their differences from the consensus.
"""

import math
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Final, NoReturn, final

from torch import Tensor

from evener.averaging.weights import power_of_two_near
from evener.data.cursor import Slice
from evener.data.leases import LeaseBook
from evener.engine.changing import ElasticEngine
from evener.engine.engine import EngineOptions
from evener.engine.exchanging import BackgroundExchanger, Exchanged, Exchanger
from evener.engine.finite import non_finite_on, overflow
from evener.engine.replica import Replica
from evener.engine.results import Applied, CadenceRecord, Round, WindowResult, Work
from evener.engine.schedule import agree_on_rates
from evener.engine.share import Share, WindowSpans, needs_plans
from evener.engine.state import OptimizerState, TrainingState
from evener.engine.steps import LocalSteps
from evener.engine.team import Team
from evener.errors import CollectiveError
from evener.planning.cadence import CadencePolicy
from evener.planning.plans import LocalPlan
from evener.planning.policies import ApplyPolicy
from evener.planning.report import PARAMETERS, Report
from evener.protocol.machine import Do, State, judge, land, unlike_parameters
from evener.protocol.row import DATA_LENGTH, Purpose, Row, checksum, pack

#: Batches of the queue that are being fetched while one is computed.
_AHEAD: Final = 3


@final
class LocalEngine(ElasticEngine):
    """A rank's windows of CADENCE and ASYNC.

    A rank takes batches from the front of its queue and steps its own optimizer on each, until its
    deadline. Then it takes a *snapshot* of its difference from the consensus, and the ranks
    exchange rows, differences and the next plan. When the average *lands*, the rank applies it to
    the consensus and to its working copy. In CADENCE a rank waits for the landing. In ASYNC it
    continues with the next window, whose deadline starts at the landing.

    When the team changes, every rank goes back to the consensus: the steps that it has made since
    the last average are dropped, and their batches go back to the epoch.

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
        self._book: LeaseBook | None = None
        #: The rest of this rank's queue, without the batch that is open.
        self._own: deque[Slice] = deque()
        self._in_batch = False
        #: Whether ranks have trained different parameters in the previous window.
        self._is_unlike = False
        #: Whether the loop's present micro-batch is void.
        self._is_void = False
        #: Seconds that averaging has taken of this rank's time, in the window that is exchanged.
        self._spent_s = 0.0
        self._landing: Exchanged | None = None
        self._result: WindowResult | None = None

    @property
    def policy(self) -> CadencePolicy:
        """Return the policy that divides the work; only the planner's decides."""
        return self._policy

    # ── an epoch ─────────────────────────────────────────────────────────────────────────────────

    def _begin(self) -> None:
        if self._steps.next_window(0).steps:  # an error has kept them from being averaged
            self._replica.restore()
        self.flat.zero_()
        self._schedule.accept()
        self._schedule.agree(self.progress, 0)
        self.cursor.release()
        super()._begin()

    def work(self) -> Iterator[Work]:
        """Plan the first window, and work this rank's queue off."""
        self._is_anew = False
        self._step_in()
        self._wants_plans = True
        try:
            self._plan_first()
            while self.is_working:
                if self._may_go_on():
                    pieces = [self._own.popleft(), *islice(self._own, _AHEAD)]
                    yield Work(self.window, [range(p.start, p.stop) for p in pieces])
                else:
                    self.advance()
        finally:
            self._wants_plans = False

    def advance(self) -> WindowResult | None:
        """Apply exchanges that have ended, and start that of a window that is over.

        Returns:
            The window that was applied last in this call, if any.
        """
        self._result = None
        try:
            while self._has_to_exchange():
                if self.state.flight is None:
                    self._start()
                else:
                    self._land()
        except CollectiveError as error:
            self._survive(error)
        return self._result

    def _has_to_exchange(self) -> bool:
        """Return whether this rank may make no step before it has begun or ended an exchange."""
        if self.state.flight is None:
            return self.is_working and not self._may_go_on()
        return not self._may_go_on() or self._exchanger.ready

    def leave(self) -> None:
        """Leave an epoch in its middle; the others learn of it in ``settle``.

        A batch that has not been stepped on is dropped, and will be handed out again.
        """
        super().leave()
        if self._in_batch or self._is_void:
            self._is_void = False
            self.drop_share()

    def settle(self) -> None:
        """Commit what has been applied and not yet committed; all ranks call it together.

        Steps of a loop that was left by ``break`` are averaged first. The ranks need not have left
        it at the same window. A rank that has left keeps joining exchanges until all have left, and
        the others are led out of the epoch. Then all are at one consensus.
        """
        if self.committing:
            return  # all hold one consensus; the window that lands must not be exchanged again
        try:
            self._settle()
        except CollectiveError as error:
            self._survive(error)

    def _settle(self) -> None:
        while self._is_unsettled():
            if self.state.flight is None:
                self._start()
            self._land()
        if self.has_left or self.state.applied:
            self._rest(busy=False)

    def end_epoch(self) -> None:
        """Commit the last window of an epoch; all ranks call it together."""
        self.settle()

    def _is_unsettled(self) -> bool:
        """Return whether a window must be exchanged before all are at one consensus."""
        flies = self.state.flight is not None
        if self.has_left:
            return flies or bool(self.state.plans)
        if self._background is None or not (self.in_epoch and self.is_working) or self.is_lost:
            return flies
        # In mid-epoch this rank or others may have begun an exchange: all land theirs first.
        rows = self._rest(busy=flies).rows
        return any(row.busy for row in rows.values())

    def _rest(self, *, busy: bool) -> Round:
        return self._meet(Purpose.REST, busy=busy, report=Report(**self._told()))

    # ── a local step ─────────────────────────────────────────────────────────────────────────────

    def open_share(self, num_micro_batches: int) -> Share:
        """Start a local step."""
        weight = self._steps.batch_weight or float(self.batch_size or 1)
        scale = None
        if num_micro_batches > 1 or self._scale.own:
            scale = power_of_two_near(weight) / (self._scale.own or 1.0)
        self.buffers.keep()
        self._in_batch = True
        return self._open(num_micro_batches, scale)

    def end_micro_batch(self) -> WindowResult | None:
        """End a micro-batch; with the last one of a batch, step, and close the window if due."""
        if not self.in_epoch:
            raise needs_plans()
        if self._is_void:  # the team has changed meanwhile: its samples are handed out again
            self._is_void = False
            self.drop_share()
            self._open(0, 1.0)
            return None
        if not self.share.end_micro_batch():
            return None
        self._in_batch = False
        self._replica.adopt()
        made = self._steps.finish(self.share, self.state.flight, self.progress, self.batch_size)
        if not made:
            self.buffers.rewind()
            for tell in self._on_left_out:
                tell(self.share.micro_batches)
        return self.advance()

    def _may_go_on(self) -> bool:
        """Return whether this rank may start a local step now."""
        state = self.state
        if not self._own or state.winding or state.stopping or self.wants_stop():
            return False
        if state.is_elastic and self.team.is_over:
            return False
        if state.flight is not None and state.flight.blocking:
            return False
        return self._steps.wants_another()

    # ── closing a window ─────────────────────────────────────────────────────────────────────────

    def _start(self) -> None:
        """Take the snapshot of a window that is over, and begin its exchange."""
        started_s = time.perf_counter()
        self.spans.finish_work()
        taken = self._replica.snapshot()
        self.state = self.state.start()
        plan = self.state.flight
        assert plan is not None
        work = self._steps.next_window(plan.most[self.rank])
        said = self.state.say(
            Purpose.WINDOW,
            renew=self.is_main and self._wants_renewal,
            leaving=self.state.is_elastic and self.team.is_leaving,
            stop=self.wants_stop() or self.stopping,
            trainable=len(self.flat.parameters),
            rates=checksum([rate for group in self._schedule.agreed_rates for rate in group]),
            report=work._replace(
                non_finite=work.non_finite or (0 if math.isfinite(taken.size) else PARAMETERS),
                buffers_changed=taken.changed,
                loss_scale=self._scale.own,
                limit=self.limits.own,
                **self._told(),
            ),
        )
        self._exchanger.start(partial(self._exchange, said, taken.buffers, self._steps_left))
        self._spent_s = time.perf_counter() - started_s
        self._steps.resume_clock()

    def _exchange(self, state: State, packed: Tensor, limit: int | None) -> Exchanged:
        """Exchange a window; all ranks call it together.

        It writes to scratch buffers and the planner only, so it may run in a thread while the rank
        makes further local steps.

        Args:
            state: This rank's, as it was when the window was over; its own row is said now.
            packed: The snapshot of buffers.
            limit: Local steps that the run may do, this window included; ``None`` for any number.

        Raises:
            UsageError: Learning rates differ between ranks.
            ReplicasDifferError: So does the consensus.
        """
        wire, plan, own = self._background or self.team, state.flight, state.own
        assert plan is not None
        assert own is not None
        started_s = time.perf_counter()
        rows = self._swap(own, wire.comm, wire.members)
        verdict = judge(state, rows)
        found = Round(rows, verdict, time.perf_counter() - started_s)
        if verdict.error is not None:
            self._raise(verdict.error, rows, wire)
        # In ASYNC a window may be over on a rank before its loop has seen the number of the window.
        unlike, was_unlike = unlike_parameters(rows), self._is_unlike
        self._is_unlike = unlike is not None
        if unlike is not None and (was_unlike or plan.blocking):
            raise unlike
        if Do.RATES in verdict.do:
            rates = wire.introduce(self._schedule.agreed_rates)
            agree_on_rates(dict(zip(wire.members, rates, strict=True)))
        self._replica.verify(wire.comm, plan.window)
        if Do.EXCHANGE not in verdict.do:
            return Exchanged(plan, found)
        differences = None
        if verdict.weight:
            what, weight = f"window {plan.window}", own.report.weight
            trainable = min(row.trainable for row in rows.values())
            if any(row.report.buffers_changed for row in rows.values()):
                differences = packed
            self._replica.exchange(
                wire.comm, differences, weight, verdict.weight, trainable=trainable, what=what
            )
        numbers = self._plan_next(wire, state, rows, limit)
        return Exchanged(plan, found, numbers, differences)

    def _plan_next(
        self, wire: Team, state: State, rows: Mapping[int, Row], limit: int | None
    ) -> tuple[float, ...]:
        """Let the planner plan with what it has just heard; return the plan as numbers.

        A round of its own: a window of local steps is long, and a fresh plan is worth the
        millisecond.
        """
        reports = [row.report for row in rows.values()]
        draft: tuple[float, ...] = ()
        sync_s = min(r.wait_s for r in reports) + max(r.sync_s for r in reports)
        self._policy.observe(self._reports(rows), sync_s)
        if self.rank == state.planner:
            done = sum(report.steps for report in reports)
            draft = self._draft(
                state.window + (done > 0),
                self._leases.num_left - done,
                None if limit is None else limit - done,
                stop=any(row.stop or row.left for row in rows.values()),
            )
        said = state.say(Purpose.PLAN, body=(*self._data(), *draft))
        assert said.own is not None
        rows = self._swap(said.own, wire.comm, wire.members)
        if (error := judge(said, rows).error) is not None:
            self._raise(error, rows, wire)
        return rows[state.planner].body[DATA_LENGTH:]

    def _land(self) -> None:
        """Apply the result of the exchange in flight; wait for it if it has not ended."""
        started_s = time.perf_counter()
        self.spans.begin_wait()
        try:
            outcome = self._exchanger.wait()
        except BaseException as error:
            if not (self.team.is_elastic and isinstance(error, CollectiveError)):
                self.state = self.state.end()  # nothing can be agreed on any more
            raise
        took_s = time.perf_counter() - started_s
        self._spent_s += took_s
        self._landing, found = outcome, outcome.found
        if found.verdict.culprit is None:
            verdict = land(self.state, found.rows, outcome.next_plan, found.verdict)
            wait_s = found.wait_s if self._background is None else took_s
            found = Round(found.rows, verdict, wait_s)
        self.spans.begin_sync(found.wait_s)
        self.state = self.state._replace(flight=None)
        self._follow(found)
        plan = self.state.plan
        if isinstance(plan, LocalPlan) and Do.CHANGE not in found.verdict.do:
            # In ASYNC a rank may have begun a batch that would move to another rank's queue. At the
            # end of an epoch all ranks have waited, so no rank has begun one.
            book = self._leases
            hands_on = outcome.over.blocking and book.num_free == 0
            book.fill(plan.queues, hand_on=hands_on)
            self._go_by(plan)

    def _carry_out(self, do: Do, found: Round) -> None:
        reports = self._reports(found.rows)
        if do in (Do.LAND, Do.RESTORE):
            self._scale.agree(reports)
        if do is Do.LAND:
            if any(report.steps for report in reports):
                self._apply(found)
        elif do is Do.RESTORE:
            self._steps.next_window(0)
            self._replica.restore()
        elif do is Do.CHANGE:
            if self.state.applied:
                self._meet(Purpose.CHANGE, report=Report(**self._told()))
            self._survive(CollectiveError(""))  # as after a loss

    def _apply(self, found: Round) -> None:
        """Move the consensus on, and this rank with it."""
        started_s, outcome = time.perf_counter(), self._landing
        assert outcome is not None
        weight, stale_steps = found.verdict.weight, self._steps.num_done
        divergence = self._replica.agree(weight, outcome.differences, moved_on=stale_steps > 0)
        if not math.isfinite(divergence):
            raise overflow(outcome.over, self.progress.steps + 1)
        reports = self._reports(found.rows)
        skipped = sum(report.skipped for report in reports)
        made = sum(report.steps for report in reports) - skipped
        samples = sum(report.samples for report in reports)
        self._advance(made=made, skipped=skipped, samples=samples, weight=weight)
        self._schedule.agree(self.progress, made)
        retired = [
            piece
            for rank, row in found.rows.items()
            for piece in self._leases.retire(rank, row.report.steps, row.report.samples)
        ]
        over, ranges = outcome.over, merged(retired)
        self._result = self._result_of(
            found,
            over,
            start=ranges[0][0],
            size=sum(stop - start for start, stop in ranges),
            grad_norm=math.nan,
            lr=self._steps.lr,
            skipped=weight == 0,
            ranges=ranges,
            cadence=CadenceRecord(
                anchor=over.anchor, window_s=over.window_s, guard=over.verdict.value
            ),
        )
        spent_s = self._spent_s + time.perf_counter() - started_s
        told = {
            "wait_s": found.wait_s,
            "sync_s": max(0.0, spent_s - found.wait_s),
            **self.spans.apply(),
            "divergence": divergence,
            "stale_steps": stale_steps,
        }
        self._applied = Applied(self._result, retired, told)

    def _refuse_non_finite(self, rank: int, rows: Mapping[int, Row]) -> NoReturn:
        assert self._landing is not None
        report = rows[rank].report
        error = non_finite_on(
            rank, report.non_finite, self._landing.over, self.flat.names, report.steps + 1
        )
        raise self._scale.exhausted(error, report.loss_scale)

    # ── plans ────────────────────────────────────────────────────────────────────────────────────

    def _exchange_plans(self, *work_for_all: float, renew: bool = False) -> None:
        """Agree on the plan of the next window; all ranks call it together."""
        book = self._book = LeaseBook(
            self.cursor, self.batch_size, self.team.members, avoid_ones=self.options.avoid_ones
        )
        draft: tuple[float, ...] = ()
        if self.rank == self.state.planner:
            draft = self._draft(self.window, book.num_left, self._steps_left)
        self._agree_on_plan((*self._data(), *draft), renew=renew)
        plan = self.state.plan
        if isinstance(plan, LocalPlan):
            book.fill(plan.queues)
            self._go_by(plan)

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
        samples, self._is_void = (
            self.share.open_samples,
            self.share.in_micro_batch and self.in_epoch,
        )
        self._in_batch = False
        self._open(0, 1.0)
        if self._is_void:  # the loop completes it, but it is void
            self.share.start_micro_batch(samples)
        self._steps.next_window(0)
        self._steps.resume_clock()
        self._own.clear()
        self._go_back()
        if self._cursor is not None:
            self._cursor.release()
        self._take_again()

    def _go_back(self) -> None:
        """Go back to the consensus, and to the learning rates that belong to it."""
        self._replica.restore()
        self.buffers.keep()  # a void batch goes back to these
        self._schedule.agree(self.progress, 0)

    def _use_team(self) -> None:
        super()._use_team()
        # A rank of an earlier generation that was stopped and continues may write into that
        # generation's memory, so the tensors move out of it.
        self.buffers.move(self.comm)
        self._replica.move(self.comm)
        self.team.form_beside()

    def _shared(self) -> Iterator[tuple[str, Tensor]]:
        self._replica.adopt()
        yield from (("parameters", agreed) for agreed in self._replica.consensus)
        yield from (("buffers", agreed) for agreed in self.buffers.agreed)
        yield from self.training.frozen()

    def _hashes(self) -> list[int]:
        self._replica.adopt()
        # Without showing the consensus: the loop may be between a forward and its backward.
        return self._check.hashes(self._replica.consensus, self.buffers.agreed)

    def _take_model(self) -> None:
        self._go_back()
        self._scale.reset()

    def _commit(self, rows: Mapping[int, Row]) -> None:
        """Commit the previous window, if this rank may."""
        if self.state.is_elastic:
            self.team.await_lease()
        super()._commit(rows)

    # ── commits ──────────────────────────────────────────────────────────────────────────────────

    def _completed(self, result: WindowResult, rows: Mapping[int, Row]) -> WindowResult:
        assert result.cadence is not None
        divergence = max((row.report.divergence for row in rows.values()), default=0.0)
        cadence = replace(result.cadence, divergence=divergence)
        return replace(super()._completed(result, rows), cadence=cadence)

    def _tell_committed(self, result: WindowResult) -> None:
        self._schedule.refuse_setting_by_hand()
        super()._tell_committed(result)
        self._schedule.accept()  # set in a callback, which runs on every rank for every window

    # ── state ────────────────────────────────────────────────────────────────────────────────────

    def consensus(self) -> AbstractContextManager[None]:
        """Show the consensus in the model, parameters and buffers."""
        return self._replica.shown()

    def restored(self) -> None:
        """Take the model as it is for the consensus."""
        self._replica.reset()
        self._scale.reset()

    def optimizer_states(self) -> list[OptimizerState]:
        """Return the states of this rank, at the learning rates that all have agreed on."""
        with self._schedule.as_agreed():
            return self.training.own_states()

    def close_down(self) -> None:
        """End an exchange that is under way, without waiting for anybody; idempotent."""
        super().close_down()
        self._exchanger.close()


def merged(pieces: Sequence[Slice]) -> tuple[tuple[int, int], ...]:
    """Return ranges of positions sorted, with adjacent ones merged."""
    ranges: list[tuple[int, int]] = []
    for piece in sorted(pieces, key=lambda p: p.start):
        if ranges and ranges[-1][1] == piece.start:
            ranges[-1] = (ranges[-1][0], piece.stop)
        else:
            ranges.append((piece.start, piece.stop))
    return tuple(ranges)
