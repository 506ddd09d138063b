"""SYNC: a window is one optimizer step over a fixed batch; gradients are averaged."""

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NoReturn, final

from torch import Tensor
from torch.optim import Optimizer

from evener.averaging.gradients import Reading
from evener.averaging.weights import power_of_two_near
from evener.checkpoint import flatten_optimizer
from evener.data.cursor import Slice
from evener.engine.drafts import DraftingEngine
from evener.engine.engine import EngineOptions
from evener.engine.finite import non_finite_on, overflow
from evener.engine.results import Applied, Round, WindowResult
from evener.engine.share import Share, Stopwatch
from evener.engine.state import OptimizerState, TrainingState
from evener.engine.team import Team
from evener.errors import CollectiveError, LeftOutError, UsageError
from evener.planning.plans import WindowPlan
from evener.planning.policies import Policy
from evener.planning.report import LOSS, NOTHING, Report
from evener.planning.shares import in_whole_micro_batches
from evener.protocol.formation import PARKED
from evener.protocol.machine import Do
from evener.protocol.row import ALL, Purpose, Row, checksum, pack


@final
class SyncEngine(DraftingEngine):
    """A rank's windows of SYNC.

    The loader hands out this rank's micro-batches, which ``share`` accounts for; after the last one
    the window is closed. The round of rows precedes the exchange of gradients. So a mistake
    (another collective, a non-finite gradient, a stop) is known before anything is averaged.

    A *part* is the number of one optimizer, which is then stepped alone on the gradients of its own
    parameters; ``None`` stands for all optimizers together.
    """

    def __init__(
        self, team: Team, policy: Policy, training: TrainingState, options: EngineOptions
    ) -> None:
        super().__init__(team, policy, training, options)
        #: Updates of optimizers that were stepped alone in this window.
        self._turns: list[WindowResult] = []
        self._result: WindowResult | None = None
        #: Whether the loop's present micro-batch is void.
        self._is_void = False
        #: Why ranks could not exchange something after an update.
        self._torn: CollectiveError | None = None
        #: Epoch of windows without plans, and their samples so far.
        self._stream = (0, 0)
        #: Optimizer states as ``prepare_save`` gathered them, until they are asked for.
        self._gathered: list[OptimizerState] | None = None
        self._sharded.divide(team.comm)

    # ── an epoch ─────────────────────────────────────────────────────────────────────────────────

    def _begin(self) -> None:
        self.flat.attach_data()  # the model may have been given another memory format
        self._drop_plans()
        super()._begin()

    def begin_stream(self, epoch: int) -> None:
        """Start an epoch of windows without plans; all ranks call it together."""
        self.settle()
        self._begin()
        self._stream = (epoch, 0)

    def settle(self) -> None:
        """Commit what has been applied and not yet committed; all ranks call it together."""
        if self.committing:
            return  # it is committed; in a commit, not all ranks have left their loops
        if self._turns and self.share.in_micro_batch:
            self.share.end_micro_batch()
            self.close()  # by its plan, which ranks without a share and the data position follow
        if self.has_left or self.state.applied:
            try:
                self._meet(Purpose.REST, report=Report(**self._told()))
            except CollectiveError as error:
                self._survive(error)

    def end_epoch(self) -> None:
        """Commit the last window of an epoch, and take parked ranks back; all call it together."""
        self.state = self.state.release()
        self.settle()
        if self.state.parked:  # no window was left to commit
            try:
                self._regroup()
            except CollectiveError as error:
                self._survive(error)

    def leave(self) -> None:
        """Leave an epoch in its middle; the others learn of it in ``settle``."""
        # Otherwise the team has stopped, or has changed after others left: no rank waits for a row.
        if self.is_working or self.state.applied or not self.in_epoch:
            super().leave()
        if not self._turns:
            self.drop_share()
        self._is_void = False

    # ── this rank's part of a window ─────────────────────────────────────────────────────────────

    def open_share(self, num_micro_batches: int) -> Share:
        """Start this rank's part of a window."""
        whole_window = num_micro_batches == 1 and self.comm.world_size == 1
        scale = None
        if not whole_window or self._scale.is_used:
            expected = self._expected_weight or float(self.batch_size or 1)
            scale = power_of_two_near(expected) / self._scale.value
        return self._open(num_micro_batches, scale)

    def end_micro_batch(self) -> WindowResult | None:
        """End a micro-batch; close the window with the last one of this rank's share."""
        if self._is_void:  # a rank was lost meanwhile: the window is computed again
            self._is_void = False
            self.drop_share()
            self.open_share(0)
            return None
        last = self.share.end_micro_batch()
        if not self.in_epoch:
            return self._close(Purpose.STEP)
        if not self.is_working:
            return None  # dropped at an optimizer's turn: the rest of the share is void
        if self._is_interrupted() and not last:
            return self.close(drop=not self._turns)
        return self.close() if last else None

    def step_part(self, part: int) -> WindowResult | None:
        """Step one optimizer alone on this window's samples, and leave the window open.

        Without plans it closes a window of its own.

        Returns:
            The update; ``None`` where it is dropped.
        """
        share = self.share
        if self.team.is_elastic:
            raise UsageError(
                "ddp.step(optimizer) needs a fixed team: where a rank is lost between two turns, "
                "the first one cannot be undone. Step all optimizers together, or leave elastic out"
            )
        share.start_turn(part)
        if not self.in_epoch:
            share.end_micro_batch()
            return self._close(Purpose.STEP, part)
        if not self.is_working:
            self.flat.zero_(part)
            return None
        share.pause()
        result = self._close(Purpose.WINDOW, part)
        share.resume()
        return result

    def close(self, *, drop: bool = False) -> WindowResult | None:
        """Close a planned window; all ranks call it together.

        A rank without a share does not know whether the others step one optimizer, close the
        window, or have left the loop. It joins their rounds until the window is over.

        Args:
            drop: This rank was told to stop in mid-window: no rank applies the window, it stays
                uncommitted, and the run can resume from there later.

        Returns:
            The applied window, or ``None`` when there is none.

        Raises:
            NonFiniteGradientError: On every rank, when a loss or gradient is not finite.
        """
        plan, window = self.state.plan, self.window
        assert isinstance(plan, WindowPlan)
        self.plan_ahead()  # without a share it was not done
        if plan.shares[self.rank]:
            return self._close(Purpose.WINDOW, drop=drop)
        if self.state.is_parked:
            with self.team.in_phase(PARKED):
                return self._close(Purpose.IDLE)
        generation, result = self.state.generation, self._close(Purpose.IDLE)
        while self.is_working and (self.window, self.state.generation) == (window, generation):
            result = self._close(Purpose.IDLE)
        return result

    def join_unplanned(self) -> WindowResult | None:
        """Take part in a window without a plan, with nothing; ``None`` where no rank had data."""
        generation = -1
        while generation != self.state.generation:
            generation = self.state.generation  # in another one the window is computed again
            self.open_share(0)  # every window has a scale of its own
            if result := self._close(Purpose.IDLE):
                return result
        return None

    def _close(
        self, purpose: Purpose, part: int | None = None, *, drop: bool = False
    ) -> WindowResult | None:
        """Say what this rank did, and do what follows from what all say."""
        if self.has_left and purpose is Purpose.STEP:
            self.settle()  # plans of a loop that was left by `break` do not hold after it
        self._result, window = None, self.window
        try:
            self._say(purpose, part, drop=drop)
        except CollectiveError as error:
            self._survive(error, may_join=self.in_epoch)
            if self.window == window:
                return None  # the window is done again
        return self._result

    def _say(self, purpose: Purpose, part: int | None, *, drop: bool) -> None:
        report = self._report(part)
        self.spans.begin_wait()
        self._meet(
            purpose,
            part=ALL if part is None else part,
            drop=drop,
            renew=self._renews if self.state.plans else self._wants_renewal,
            trainable=len(self.flat.parameters),
            rates=checksum([float(g["lr"]) for o in self.optimizers for g in o.param_groups]),
            hooked=self.habits.are_hooked,
            summed=self.share.is_summed(part),
            report=report,
            body=self._draft or (),
        )

    def _meet(self, purpose: Purpose, **said: Any) -> Round:
        """Add to the row the non-finite value that a device has found in the previous window."""
        may_shrink = self._scale.is_used and self._scale.may_shrink(self.rank)
        late = self._undecided
        return super()._meet(
            purpose,
            may_skip=self._skips or may_shrink,
            late_non_finite=0 if late is None else late.non_finite,
            **said,
        )

    def _report(self, part: int | None) -> Report:
        """Return what this rank did; in an optimizer's turn, as far as its own losses go."""
        if self.state.is_parked:
            return NOTHING
        share, averager = self.share, self._averager
        closes_turns = bool(self._turns) and part is None
        done = Report(
            weight=share.weight if closes_turns else share.weight_of(part),
            micro_batches=share.micro_batches,
            samples=share.samples,
            buffers_changed=not self.buffers.is_empty and self.buffers.changed(),
            limit=self.limits.own,
            warmup_micro_batches=share.warmup_micro_batches,
            warmup_samples=share.warmup_samples,
            **self._told(),
        )
        self._late = None
        together = part is None and not closes_turns
        if self.queue is not None and together and self._let_decide(self.queue):
            return done
        norms = [] if closes_turns else averager.gather(part, unmeasured=self._finds_in_mean)
        losses = share.losses_of(part)
        values = Reading([*losses, *norms]).read()  # the one wait for a device
        loss_sum = share.loss_sum_of(part, (value for (value,) in values[: len(losses)]))
        index = averager.judge(values[len(losses) :], part)
        found = 0 if index is None else index + 1
        update_s = 0.0 if self._update_lap is None else self._update_lap.seconds
        return done._replace(
            loss_sum=loss_sum,
            non_finite=found if math.isfinite(loss_sum) else LOSS,
            own_norm=averager.own_norm,
            compute_s=share.compute_s + update_s,
            update_s=update_s,
            update_parts=self.comm.world_size if self._sharded.is_on else 1,
            warmup_s=share.warmup_s,
        )

    # ── what a round leads to ────────────────────────────────────────────────────────────────────

    def _carry_out(self, do: Do, found: Round) -> None:
        if do is Do.APPLY:
            self._finish(found)
        elif do is Do.TURN and self.state.is_parked:
            return
        elif do is Do.TURN:
            assert isinstance(self.state.plan, WindowPlan)
            self._result = self._apply(found, self.state.plan)
            self._turns.append(self._result)
        elif do is Do.DROP:
            self.drop_share()
            self._drop_plans()
        elif do is Do.RESTORE:
            self.flat.zero_(found.verdict.part)
            self._turns.clear()
        elif do is Do.UNDO:
            self._undo(failed=found.verdict.culprit is not None)
        elif do is Do.CHANGE:
            if self.state.applied:
                self._meet(Purpose.CHANGE, report=Report(**self._told()))
            # As after a loss. This rank may be left out here, too, if it is stopped meanwhile.
            self._survive(CollectiveError(""), may_join=self.in_epoch)

    def _finish(self, found: Round) -> None:
        """Apply a window, which is committed when the next round shows that all have."""
        self.spans.begin_sync()
        plan, leases = self.state.plan, []
        reports = self._reports(found.rows)
        self.habits.after_window(reports)
        if isinstance(plan, WindowPlan):
            planner = self.state.planner
            self._check_plan(planner, found.rows[planner].body, self.window + len(self.state.plans))
            self._take_draft()
            leases.append(self._leases.pop(plan.window))
            if self._late is None:
                self._unlearnt.append((reports, plan, self._exchange_s(found)))
        else:
            plan = self._unplanned(reports)
        if self.state.is_parked:
            self._pass_by(found, plan, leases)
            return
        result = self._end_turns(found) if self._turns else self._apply(found, plan)
        sync_s = self._sync_s + self._compare_parameters(plan)
        made = self._late is not None or not result.skipped
        weight = result.weight if made else 0.0
        self._advance(made=made, skipped=not made, samples=plan.size, weight=weight)
        self._result = replace(result, progress=self.progress)
        if self._late is not None:
            self._result = self._late.show(result, self.progress)
        told = {"wait_s": found.wait_s, "sync_s": sync_s, **self.spans.apply()}
        self._applied = Applied(self._result, leases, told)
        self._undecided, self._late = self._late, None
        if (torn := self._torn) is not None:  # the window counts as applied by now
            self._torn = None
            raise torn

    def _pass_by(self, found: Round, plan: WindowPlan, leases: Sequence[Slice]) -> None:
        """Follow a window that the others have applied, as a parked rank."""
        skipped, weight = found.verdict.skip, found.verdict.weight
        self._advance(made=not skipped, skipped=skipped, samples=plan.size, weight=weight)
        result = self._result_of(
            found,
            plan,
            start=plan.start,
            size=plan.size,
            grad_norm=math.nan,
            lr=math.nan,
            skipped=skipped,
        )
        self._applied = Applied(result, leases, {})

    def _compare_parameters(self, plan: WindowPlan) -> float:
        """Look whether ranks hold the same, where that is due; return the seconds it took."""
        started_s = time.perf_counter()
        if self._check.every and self._check.is_due(plan.window):
            try:
                self._check.compare(self.comm, plan.window)
            except CollectiveError as error:
                self._torn = error
        return time.perf_counter() - started_s

    def _unplanned(self, reports: Sequence[Report]) -> WindowPlan:
        """Return the plan that a window without one has followed."""
        epoch, start = self._stream
        shares = tuple(report.samples for report in reports)
        plan = WindowPlan(self.window, epoch, start, sum(shares), shares)
        self._stream = (epoch, plan.stop)
        return plan

    def _exchange_s(self, found: Round) -> float:
        """Return the cost of the previous window's exchange: waiting, and moving bytes."""
        if Do.COMMIT not in found.verdict.do:
            return math.nan
        reports = [row.report for row in found.rows.values()]
        return min(r.wait_s for r in reports) + max(r.sync_s for r in reports)

    # ── the update ───────────────────────────────────────────────────────────────────────────────

    def _apply(self, found: Round, plan: WindowPlan) -> WindowResult:
        """Average and update: all optimizers, or one in its turn.

        Raises:
            NonFiniteGradientError: The sum over ranks overflowed.
        """
        if self._late is not None:
            return self._apply_late(found, plan, self._late)
        verdict, closes = found.verdict, Do.APPLY in found.verdict.do
        part, weight, skipped = verdict.part, verdict.weight, verdict.skip
        what, norm, started_s = f"window {plan.window}", math.nan, time.perf_counter()
        if self._sharded.is_on:
            hooked = [rank for rank, row in found.rows.items() if row.hooked]
            self._sharded.join_if_needed(hooked)
        if not skipped:
            averager = self._sharded if self._sharded.is_on else self._averager
            max_norm = self.options.max_grad_norm
            norm = averager.average(
                self.share.scale_of(part), verdict.divisor, part, what=what, max_norm=max_norm
            )
        skipped = skipped or self._overflowed(norm, plan, part)
        if closes:
            self._average_buffers(found, 0.0 if skipped else weight, what)
        self._sync_s = time.perf_counter() - started_s
        watch = Stopwatch(self.slowdown, self.queue)
        if not self._schedule.is_empty:
            self._schedule.before_update(self.progress)
        lr = float(self.optimizers[part or 0].param_groups[0]["lr"])
        stepped = self.optimizers if part is None else [self.optimizers[part]]
        if not skipped:
            self._step(stepped, part)
        # Also for a skipped window: it may have overflowed because another weight was expected.
        self._expected_weight = weight or self._expected_weight
        if weight and self._scale.is_used:
            self._scale.update(overflowed=skipped)
        self.flat.zero_(part)
        self._update_lap = watch.stop()
        if not skipped:
            self._share_parameters(part, what)
            if not self._schedule.is_empty:
                self._schedule.after_update(None if part is None else stepped[0])
        return self._result_of(
            found, plan, start=plan.start, size=plan.size, grad_norm=norm, lr=lr, skipped=skipped
        )

    def _commit(self, rows: Mapping[int, Row]) -> None:
        """Commit the previous window; if the device decides about its update, it has done so."""
        if self.state.is_elastic:
            self.team.await_lease()
        if self._undecided is not None:
            self._learn_late(self._undecided)
        super()._commit(rows)

    def _end_turns(self, found: Round) -> WindowResult:
        """Return what optimizers have done in their turns, as one window."""
        turns, self._turns, self._sync_s = self._turns, [], 0.0
        weight, last = turns[0].weight, turns[-1]
        self._average_buffers(found, weight, f"window {last.window}")
        skipped = all(turn.skipped for turn in turns)
        return replace(
            last,
            weight=weight,
            skipped=skipped,
            applied_t=time.time(),
            ranks=self._records(found.rows),
        )

    def _average_buffers(
        self, found: Round, weight: float, what: str, unless: Tensor | None = None
    ) -> None:
        """Average the model's buffers by weight; a window without weight leaves them as before."""
        if not any(row.report.buffers_changed for row in found.rows.values()):
            return
        if weight:
            self.buffers.average(self.share.weight, weight, what=what, unless=unless)
        else:
            self.buffers.restore()

    @property
    def _finds_in_mean(self) -> bool:
        """Return whether ranks take no norms of their own gradients, in a sharded update.

        The norm of the mean is taken anyway, before anything is applied, and ``blame`` then finds
        the rank. A loss scale, and batches that others hand out, are judged by ranks' own norms.
        """
        is_planned = isinstance(self.state.plan, WindowPlan)
        return self._sharded.can_blame and is_planned and not self._scale.is_used

    def _overflowed(self, norm: float, plan: WindowPlan, part: int | None) -> bool:
        """Return whether to skip a window, because its mean gradient is not finite.

        Raises:
            NonFiniteGradientError: It must not be left out.
        """
        if math.isfinite(norm):
            return False
        if self._skips or self._scale.can_shrink:
            return True
        blamed, step, are_finite = None, self.progress.steps + 1, self._averager.has_measured
        if self._sharded.is_on:
            blamed = self._sharded.blame(part, what=f"window {plan.window}")
            are_finite |= self._sharded.can_blame
        self.flat.zero_(part)
        if blamed is None:
            raise overflow(plan, step, are_finite=are_finite)
        rank, number = blamed
        raise non_finite_on(rank, number + 1, plan, self.flat.names, step)

    def _step(self, stepped: Sequence[Optimizer], part: int | None) -> None:
        """Update the parameters, or this rank's part of them."""
        if self._sharded.is_on:
            self.habits.step(stepped, self._sharded.stepping(stepped))
        else:
            self.flat.mask_untouched(part)
            self.habits.step(stepped)
            self.flat.attach_data()

    def _share_parameters(self, part: int | None, what: str) -> None:
        """Give every rank the bits of the rank that owns them; waits for slower ranks."""
        if self._sharded.is_on or self.options.unlike_devices:
            started_s = time.perf_counter()
            try:
                # In a sharded update a rank writes only its own part once norms were exchanged.
                have_met = self._sharded.is_on
                self._averager.unify(part, what=f"parameters of {what}", have_met=have_met)
            except CollectiveError as error:
                self._torn = error
            self._sync_s += time.perf_counter() - started_s

    def _refuse_non_finite(self, rank: int, rows: Mapping[int, Row]) -> NoReturn:
        plan, code = self.state.plan, rows[rank].report.non_finite
        if (late := self._undecided) is not None and rows[rank].late_non_finite:
            plan, code, self._undecided = late.plan, rows[rank].late_non_finite, None
        if plan is None:
            plan = self._unplanned(self._reports(rows))
        error = non_finite_on(rank, code, plan, self.flat.names, self.progress.steps + 1)
        raise self._scale.exhausted(error)

    def _drop_out(self, left_out: LeftOutError, *, may_join: bool) -> None:
        super()._drop_out(left_out, may_join=may_join)
        self._result = None  # the others may have done it otherwise

    def _break_off(self) -> None:
        share = self.share
        self.drop_share()
        self.open_share(0)
        # The loop may be in a micro-batch, which is then void.
        self._is_void = share.in_micro_batch and self.in_epoch
        if self._is_void:
            self.share.start_micro_batch(share.open_samples)
        self._turns.clear()
        self._go_back_to_parking()
        self._drop_plans()
        self._take_again()
        self._to_park, self._num_trials = frozenset(), 0

    # ── plans ────────────────────────────────────────────────────────────────────────────────────

    def plan_ahead(self) -> None:
        """Make the plan of the window after the next, once, while a device computes gradients.

        Only the planner plans, and decides whether a rank should be parked or called back.
        """
        super().plan_ahead()
        if self.state.plans and self._draft is None:
            if self.world_size > 1 and self.rank == self.state.planner:
                self._judge_ranks()
            self._make_draft()
            parks = self._to_park or self.team.parked or any(self.state.planned_to_park)
            self._renews = self._wants_renewal and not parks

    def _learn(self) -> None:
        """Give the policy the reports of closed windows, when it is needed.

        Any rank may become the planner. One that is not, or has no other rank to plan for, keeps
        the last windows in mind until then: to judge each of them costs more than all of them at
        once.
        """
        for reports, plan, exchange_s in self._unlearnt:
            self._policy.observe(reports, plan, exchange_s)
        self._unlearnt.clear()

    def _make_draft(self, *, work_for_all: float = 0.0) -> int:
        """Lease the slice after the last planned one; the planner plans it.

        Returns:
            The number of the window that it will be.
        """
        number = self.window + len(self.state.plans)
        piece = self.cursor.take(self.batch_size)
        self._draft, self._renews = (), False
        if piece is not None:
            self._leases[number] = piece
        if piece is not None and self.rank == self.state.planner:
            policy = self.policy if self.world_size > 1 else self._policy
            self._plan_without(self._to_park)
            if self._num_trials:
                self._num_trials, work_for_all = self._num_trials - 1, math.inf
            plan = policy.plan(
                number, piece.epoch, piece.start, piece.size, work_for_all=work_for_all
            )
            flags = tuple(int(rank in self._to_park) for rank in range(self.world_size))
            plan = replace(plan, parked=flags)
            if self.whole_micro_batches:
                shares = in_whole_micro_batches(plan.shares, self.whole_micro_batches)
                plan = replace(plan, shares=shares)
            self._draft = tuple(pack(plan))
        return number

    def _take_draft(self) -> tuple[float, ...]:
        draft, self._draft = self._draft, None
        return draft or ()

    def _check_plan(self, planner: int, numbers: Sequence[float], number: int) -> None:
        """Refuse a plan for another slice of the epoch than the one that this rank has leased.

        Raises:
            UsageError: The planner is at another place of the data.
        """
        piece = self._leases.get(number)
        agreed = tuple(int(n) for n in numbers[:4]) or None
        own = None if piece is None else (number, piece.epoch, piece.start, piece.size)
        if agreed != own:
            raise UsageError(
                f"rank {planner} plans (window, epoch, start, size) {agreed}, rank {self.rank} is "
                f"at {own}; every rank must use the same data set size, batch_size "
                "and seed, and resume from the same checkpoint"
            )

    # ── state ────────────────────────────────────────────────────────────────────────────────────

    def consensus(self) -> AbstractContextManager[None]:
        """Show the agreed buffers; parameters are equal at all times.

        Buffers move on with this rank's part of the next window.
        """
        self.flat.attach_data()  # values assigned to .data count
        return self.buffers.consensus()

    def restored(self) -> None:
        """Take the buffers as they are for the agreed ones."""
        self.buffers.reset()

    def prepare_save(self) -> None:
        """Gather optimizer states on the rank that saves; all ranks call it together."""
        if self._sharded.is_on:
            every = range(len(self.optimizers))
            whole = self._sharded.state_dicts(every, keeps=self.is_main)
            self._gathered = [flatten_optimizer(one) for one in whole]

    def optimizer_states(self) -> list[OptimizerState]:
        """Return the states that every rank has, or those of the last ``prepare_save``."""
        if not self._sharded.is_on:
            return self.training.own_states()
        gathered, self._gathered = self._gathered, None
        assert gathered is not None, "prepare_save was not called"
        return gathered
