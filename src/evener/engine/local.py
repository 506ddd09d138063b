"""CADENCE and ASYNC: a window is some local optimizer steps of each rank.

Ranks average their differences from the consensus.
"""

import math
import time
from collections import deque
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Final, NamedTuple, NoReturn, final

from torch import Tensor

from evener.averaging.outer import Averaged
from evener.averaging.weights import power_of_two_near
from evener.comm.background import BackgroundJob
from evener.comm.base import Communicator
from evener.data.cursor import RangeSet, Slice
from evener.data.leases import LeaseBook
from evener.engine.consensus import Replica
from evener.engine.engine import Engine
from evener.engine.engine_options import EngineOptions
from evener.engine.finite import non_finite_on, overflow
from evener.engine.results import Applied, CadenceRecord, WindowResult, Work
from evener.engine.rounds import Round
from evener.engine.schedule import agree_on_rates
from evener.engine.share import Share, needs_plans
from evener.engine.steps import LocalSteps
from evener.engine.team import Team
from evener.engine.training_state import OptimizerState, TrainingState
from evener.errors import CollectiveError
from evener.planning.cadence import CadencePolicy
from evener.planning.plans import LocalPlan
from evener.planning.policies import ApplyPolicy
from evener.planning.report import PARAMETERS, Report
from evener.protocol.machine import Action, State, land, unlike_parameters
from evener.protocol.row import Plan, Purpose, checksum

#: Batches of the queue that are being fetched while one is computed.
_AHEAD: Final = 3


class Exchanged(NamedTuple):
    """The result of an exchange.

    Attributes:
        over: The plan of the window.
        found: Its round.
        next_plan: ``None`` when something was not finite.
        differences: The exchanged buffers, if a rank has changed any.
    """

    over: LocalPlan
    found: Round
    next_plan: Plan | None = None
    differences: Tensor | None = None


@final
class LocalEngine(Engine):
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
        way: The policy of the run.
        policy: Plans; only the planner's counts.
        training: What this rank trains with: the model is its working copy.
        options: The options of the engine.
    """

    def __init__(
        self,
        team: Team,
        way: ApplyPolicy,
        policy: CadencePolicy,
        training: TrainingState,
        options: EngineOptions,
    ) -> None:
        self._replica = Replica(
            training, options.verify_every, team.comm, options.wire, options.outer
        )
        super().__init__(team, training, options, way, self._replica)
        self._policy = policy
        policy.set_absent(team.absent)
        # In ASYNC, averages are formed in a thread.
        self._job: BackgroundJob[Exchanged] = BackgroundJob(
            f"average-{team.rank}" if team.background else ""
        )
        self._steps = LocalSteps(training, options)
        self._book: LeaseBook | None = None
        #: The rest of this rank's queue, without the batch that is open.
        self._own: deque[Slice] = deque()
        self._in_batch = False
        #: Whether ranks have trained different parameters in the previous window.
        self._is_unlike = False
        #: Seconds that averaging has taken of this rank's time, in the window that is exchanged.
        self._spent_s = 0.0
        self._landing: Exchanged | None = None

    @property
    def policy(self) -> CadencePolicy:
        """Return the policy that divides the work; only the planner's decides."""
        return self._policy

    # ── an epoch ─────────────────────────────────────────────────────────────────────────────────

    def _begin(self) -> None:
        if self._steps.next_window(0).steps:  # an error has kept them from being averaged
            self._replica.reset_model()
        self.flat.zero_()
        self.training.schedule.accept()
        self.training.schedule.agree(self.run.progress, 0)
        self.run.open_cursor.release()
        super()._begin()

    def _work(self) -> Iterator[Work]:
        """Yield the batches of this rank's queue, window by window."""
        while self.rounds.state.is_working:
            if self._may_go_on():
                pieces = [self._own.popleft(), *islice(self._own, _AHEAD)]
                yield Work(self.window, [range(p.start, p.stop) for p in pieces])
            else:
                self.advance()

    def advance(self) -> WindowResult | None:
        """Apply exchanges that have ended, and start that of a window that is over.

        Returns:
            The window that was applied last in this call, if any.
        """
        self.result = None
        self.generations.keep(self._advance_exchanges)
        return self.result

    def _advance_exchanges(self) -> None:
        while self._has_to_exchange():
            if self.rounds.state.flight is None:
                self._start()
            else:
                self._land()

    def _has_to_exchange(self) -> bool:
        """Return whether this rank may make no step before it has begun or ended an exchange."""
        if self.rounds.state.flight is None:
            return self.rounds.state.is_working and not self._may_go_on()
        return not self._may_go_on() or self._job.ready

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
        if not self.rounds.committing:  # otherwise all are at one, and the window that lands
            self.generations.keep(self._settle)  # must not be exchanged again

    def _settle(self) -> None:
        while self._is_unsettled():
            if self.rounds.state.flight is None:
                self._start()
            self._land()
        if self.rounds.has_left or self.rounds.state.applied:
            self._rest(busy=False)

    def end_epoch(self) -> None:
        """Commit the last window of an epoch; all ranks call it together."""
        self.settle()

    def _is_unsettled(self) -> bool:
        """Return whether a window must be exchanged before all are at one consensus."""
        state = self.rounds.state
        flies = state.flight is not None
        if self.rounds.has_left:
            return flies or bool(state.plans)
        in_loop = self.in_epoch and state.is_working
        if self.team.background is None or not in_loop or self.rounds.is_lost:
            return flies
        # In mid-epoch this rank or others may have begun an exchange: all land theirs first.
        return any(row.busy for row in self._rest(busy=flies).rows.values())

    def _rest(self, *, busy: bool) -> Round:
        return self.meet(Purpose.REST, busy=busy, report=Report(**self.run.late_fields))

    # ── a local step ─────────────────────────────────────────────────────────────────────────────

    def open_share(self, num_micro_batches: int) -> Share:
        """Start a local step."""
        weight = self._steps.batch_weight or float(self.batch_size or 1)
        scale, own = None, self.run.loss_scale.own
        if num_micro_batches > 1 or own:
            scale = power_of_two_near(weight) / (own or 1.0)
        self.buffers.keep()
        self._in_batch = True
        return self._open(num_micro_batches, scale)

    def drop_share(self) -> None:
        """Throw away what the open batch has accumulated, in gradients and buffers."""
        self._in_batch = False
        self.flat.zero_()
        self.buffers.rewind()
        self._steps.resume_clock()

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
        self._replica.add_unfrozen()
        flight = self.rounds.state.flight
        if not self._steps.finish(self.share, flight, self.run.progress, self.batch_size):
            self.buffers.rewind()
            for function in self.on_left_out:
                function(self.share.micro_batches)
        return self.advance()

    def _may_go_on(self) -> bool:
        """Return whether this rank may start a local step now."""
        state = self.rounds.state
        if not self._own or state.winding or state.stopping or self.rounds.wants_stop():
            return False
        if state.is_elastic and self.team.membership.is_over:
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
        rounds = self.rounds
        rounds.state = rounds.state.start()
        plan = rounds.state.flight
        assert plan is not None
        work = self._steps.next_window(plan.most[rounds.rank])
        if not plan.blocking and _is_full(work.steps, plan):
            self._replica.run_ahead(Averaged(sum(map(bool, plan.steps)), plan.anchor))
        rates = self.training.schedule.agreed_rates
        sent = rounds.make_row(
            Purpose.WINDOW,
            renew=rounds.is_main and self.generations.wants_renewal,
            trainable=len(self.flat.parameters),
            rates=checksum(rates),
            digest=self.consensus.digest_if_due(self.window - 1),
            report=work._replace(
                non_finite=work.non_finite or (0 if math.isfinite(taken.size) else PARAMETERS),
                buffers_changed=taken.changed,
                loss_scale=self.run.loss_scale.own,
                limit=self.run.limits.own,
                **self.run.late_fields,
            ),
        )
        self._job.start(partial(self._exchange, sent, taken.buffers, self._steps_left))
        self._spent_s = time.perf_counter() - started_s
        self._steps.resume_clock()

    def _exchange(self, state: State, packed: Tensor, limit: int | None) -> Exchanged:
        """Exchange a window; all ranks call it together.

        It writes to scratch buffers, and to what no other thread reads meanwhile. So it may run in
        a thread while the rank makes further local steps.

        Args:
            state: This rank's, as it was when the window was over; its own row is made now.
            packed: The snapshot of buffers.
            limit: Local steps that the run may do, this window included; ``None`` for any number.

        Raises:
            UsageError: Learning rates differ between ranks.
            ReplicasDifferError: So does the consensus.
        """
        comm, plan, own = self.team.background or self.team.comm, state.flight, state.own
        assert plan is not None
        assert own is not None
        found = self.rounds.exchange(state, comm, self.team.members)
        rows, decision = found.rows, found.decision
        if decision.error is not None:
            raise decision.error
        # In ASYNC a window may end on a rank before its loop has seen the number of the window.
        unlike, was_unlike = unlike_parameters(rows), self._is_unlike
        self._is_unlike = unlike is not None
        if unlike is not None and (was_unlike or plan.blocking):
            raise unlike
        if Action.RATES in decision.actions:
            rates = comm.all_gather_json(self.training.schedule.agreed_rates, what="learning rates")
            agree_on_rates(dict(zip(rows, rates, strict=True)))
        if Action.VERIFY in decision.actions:
            self._replica.compare(comm, plan.window - 1, at_rest=False)
        if Action.EXCHANGE not in decision.actions:
            return Exchanged(plan, found)
        differences = None
        if decision.weight:
            what, weight = f"window {plan.window}", own.report.weight
            trainable = min(row.trainable for row in rows.values())
            if any(row.report.buffers_changed for row in rows.values()):
                differences = packed
            self._replica.exchange(
                comm, differences, weight, decision.weight, trainable=trainable, what=what
            )
        return Exchanged(plan, found, self._plan_next(comm, state, found, limit), differences)

    def _plan_next(
        self, comm: Communicator, state: State, found: Round, limit: int | None
    ) -> Plan | None:
        """Let the planner plan with the reports it has just received; return the plan.

        A round of its own: a window of local steps is long, and a fresh plan is worth the
        millisecond.
        """
        rows = found.rows.values()
        reports = [row.report for row in rows]
        draft: LocalPlan | None = None
        sync_s = min(r.wait_s for r in reports) + max(r.sync_s for r in reports)
        self._policy.observe(found.reports(self.team.world_size), sync_s)
        if self.rounds.rank == state.planner:
            done = sum(report.steps for report in reports)
            draft = self._draft(
                state.window + (done > 0),
                self._leases.num_left - done,
                None if limit is None else limit - done,
                stop=any(row.stop or row.left for row in rows),
            )
        sent = state.make_row(Purpose.PLAN, plan=draft, **self.run.data(self.batch_size))
        planned = self.rounds.exchange(sent, comm, self.team.members)
        if planned.decision.error is not None:
            raise planned.decision.error
        return planned.rows[state.planner].plan

    def _land(self) -> None:
        """Apply the result of the exchange in flight; wait for it if it has not ended."""
        started_s = time.perf_counter()
        rounds = self.rounds
        self.spans.begin_wait()
        try:
            outcome = self._job.wait()
        except BaseException as error:
            if not (self.team.is_elastic and isinstance(error, CollectiveError)):
                rounds.state = rounds.state.end()  # nothing can be agreed on any more
            raise
        took_s = time.perf_counter() - started_s
        self._spent_s += took_s
        self._landing, found = outcome, outcome.found
        if found.decision.culprit is None:
            decision = land(rounds.state, found.rows, outcome.next_plan, found.decision)
            wait_s = found.wait_s if self.team.background is None else took_s
            found = Round(found.rows, decision, wait_s)
        self.spans.begin_sync(found.wait_s)
        rounds.state = rounds.state._replace(flight=None)
        self._follow(found)
        plan = rounds.state.plan
        if isinstance(plan, LocalPlan) and Action.CHANGE not in found.decision.actions:
            # In ASYNC a rank may have begun a batch that would move to another rank's queue. At the
            # end of an epoch all ranks have waited, so no rank has begun one.
            book = self._leases
            hands_on = outcome.over.blocking and book.num_free == 0
            book.fill(plan.queues, hand_on=hands_on)
            self._go_by(plan)

    def _carry_out(self, action: Action, found: Round) -> None:
        reports = found.reports(self.team.world_size)
        if action in (Action.LAND, Action.RESTORE):
            self.run.loss_scale.agree(reports)
        if action is Action.LAND and any(report.steps for report in reports):
            self._apply(found)
        elif action is Action.RESTORE:
            self._steps.next_window(0)
            self._replica.reset_model()

    def _apply(self, found: Round) -> None:
        """Move the consensus on, and this rank with it."""
        started_s, outcome = time.perf_counter(), self._landing
        assert outcome is not None
        weight, stale_steps, plan = found.decision.weight, self._steps.num_done, outcome.over
        counts = [row.report.steps for row in found.rows.values() if row.report.steps]
        divergence = self._replica.agree(
            weight,
            outcome.differences,
            moved_on=stale_steps > 0,
            averaged=Averaged(len(counts), plan.anchor) if _is_full(min(counts), plan) else None,
        )
        if not math.isfinite(divergence):
            raise overflow(outcome.over, self.run.progress.steps + 1)
        reports = found.reports(self.team.world_size)
        skipped = sum(report.skipped for report in reports)
        made = sum(report.steps for report in reports) - skipped
        samples = sum(report.samples for report in reports)
        self.windows_s.append(self.spans.elapsed_s)
        self.run.advance(made=made, skipped=skipped, samples=samples, weight=weight)
        self.training.schedule.agree(self.run.progress, made)
        retired = [
            piece
            for rank, row in found.rows.items()
            for piece in self._leases.retire(rank, row.report.steps, row.report.samples)
        ]
        over, ranges = outcome.over, RangeSet()
        for piece in retired:
            ranges.add(piece.start, piece.stop)
        self.result = self._result_of(
            found,
            over,
            lr=self._steps.lr,
            skipped=weight == 0,
            ranges=tuple((start, stop) for start, stop in ranges.to_list()),
            cadence=CadenceRecord(
                anchor=over.anchor, window_s=over.window_s, guard=over.verdict.value
            ),
        )
        spent_s = self._spent_s + time.perf_counter() - started_s
        late_fields = {
            "wait_s": found.wait_s,
            "sync_s": max(0.0, spent_s - found.wait_s),
            **self.spans.apply(),
            "divergence": divergence,
            "stale_steps": stale_steps,
        }
        self.run.applied = Applied(self.result, retired, late_fields)

    def _refuse_non_finite(self, rank: int, found: Round) -> NoReturn:
        assert self._landing is not None
        report = found.rows[rank].report
        plan, code, step = self._landing.over, report.non_finite, report.steps + 1
        scale = report.loss_scale
        raise non_finite_on(rank, code, plan, self.flat.names, step, loss_scale=scale)

    # ── plans ────────────────────────────────────────────────────────────────────────────────────

    def exchange_plans(self, *, renew: bool = False, work_for_all: bool = False) -> bool:
        """Agree on the plan of the next window; see ``Engine``."""
        book = self._book = LeaseBook(
            self.run.open_cursor,
            self.batch_size,
            self.team.members,
            avoid_ones=self.options.avoid_ones,
        )
        draft: LocalPlan | None = None
        if self.rounds.is_main:
            draft = self._draft(self.window, book.num_left, self._steps_left)
        if self._agree_on_plan(draft, renew=renew) is None:
            return self.generations.change()
        plan = self.rounds.state.plan
        if isinstance(plan, LocalPlan):
            book.fill(plan.queues)
            self._go_by(plan)
        return True

    def _draft(self, window: int, left: int, limit: int | None, *, stop: bool = False) -> LocalPlan:
        epoch = self.run.open_cursor.epoch
        return self._policy.plan(window, epoch, left=left, limit=limit, stop=stop)

    def _go_by(self, plan: LocalPlan) -> None:
        """Follow a plan; batches of it that this rank has already computed count."""
        rank = self.rounds.rank
        done = self._steps.num_done + self._in_batch  # the open batch must not be handed out again
        self._own = deque(self._leases.queue(rank)[done:])
        self._steps.follow(plan, rank)

    @property
    def _leases(self) -> LeaseBook:
        assert self._book is not None, "no epoch was begun"
        return self._book

    @property
    def _steps_left(self) -> int | None:
        return None if self.max_steps is None else max(0, self.max_steps - self.optimizer_steps)

    # ── a change of the team ─────────────────────────────────────────────────────────────────────

    def let_go(self) -> None:
        """End the exchange under way, which uses the connections of this generation."""
        super().let_go()
        self._job.close()

    def drop(self) -> None:
        """Drop all steps since the last average, and go back to the consensus."""
        super().drop()
        self._steps.next_window(0)
        self._own.clear()
        self.recovered()
        if self.run.cursor is not None:
            self.run.cursor.release()
        self.run.lease_applied()

    def recovered(self) -> None:
        """Continue with the consensus, and the learning rates that belong to it."""
        super().recovered()
        self.training.schedule.agree(self.run.progress, 0)

    def use_team(self) -> None:
        """Use the ranks that are present from now on."""
        super().use_team()
        # A rank of an earlier generation that was stopped and continues may write into that
        # generation's memory, so the tensors move out of it.
        self.buffers.use(self.team.comm)
        self._replica.move(self.team.comm)

    # ── state ────────────────────────────────────────────────────────────────────────────────────

    def optimizer_states(self) -> list[OptimizerState]:
        """Return the states of this rank, at the learning rates that all have agreed on."""
        with self.training.schedule.as_agreed():
            return self.training.own_states()

    def close_down(self) -> None:
        """End an exchange that is under way, without waiting for others; idempotent."""
        super().close_down()
        self._job.close()


def _is_full(steps: int, plan: LocalPlan) -> bool:
    """Return whether the outer optimizer steps after a window.

    Short ones are the first and the last of an epoch: they show little of the direction.

    Args:
        steps: Those of the slowest rank.
        plan: The plan of the window.
    """
    return 2 * steps >= plan.anchor
