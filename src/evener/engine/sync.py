"""SYNC: a window is one optimizer step over a fixed batch; gradients are averaged."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final, NoReturn, final

import torch
from torch.optim import Optimizer

from evener.averaging.feedback import ErrorFeedback
from evener.averaging.gradients import GradientAverager
from evener.averaging.overlap import OverlappedExchange
from evener.averaging.weights import power_of_two_near
from evener.engine.calibration import time_slices
from evener.engine.consensus import SyncConsensus
from evener.engine.device_update import DeviceUpdate
from evener.engine.engine import Engine
from evener.engine.engine_options import EngineOptions
from evener.engine.finite import non_finite_on, overflow
from evener.engine.link import time_link
from evener.engine.lookahead import Lookahead
from evener.engine.results import Applied, WindowResult, Work
from evener.engine.rounds import Round
from evener.engine.share import Share, Stopwatch
from evener.engine.team import Team
from evener.engine.training_state import OptimizerState, TrainingState
from evener.errors import CollectiveError, NonFiniteGradientError, UsageError
from evener.planning.pieces import ExchangeCost, choose_pieces, describe, processor_part
from evener.planning.plans import WindowPlan
from evener.planning.policies import ApplyPolicy, Policy
from evener.planning.report import NOTHING, Report
from evener.protocol.formation import PARKED
from evener.protocol.machine import Action
from evener.protocol.row import ALL, Purpose, checksum

#: An epoch may be lengthened by this part, so that every rank has work in its first window.
_LONGER_EPOCH: Final = 0.01
#: Backends whose exchanges wait for a link between hosts.
_ACROSS_HOSTS: Final = ("gloo", "hosts")


@final
class SyncEngine(Engine):
    """A rank's windows of SYNC.

    The loader hands out this rank's micro-batches, which ``share`` accounts for; after the last one
    the window is closed. The round of rows precedes the exchange of gradients. So a mistake
    (another collective, a non-finite gradient, a stop) is known before anything is averaged.

    A *part* is the number of one optimizer, which is then stepped alone on the gradients of its own
    parameters; ``None`` stands for all optimizers together.

    Attributes:
        lookahead: Plans the windows.
    """

    def __init__(
        self, team: Team, policy: Policy, training: TrainingState, options: EngineOptions
    ) -> None:
        consensus = SyncConsensus(training, options.verify_every)
        super().__init__(team, training, options, ApplyPolicy.SYNC, consensus)
        self.lookahead = Lookahead(self.generations, self.run, policy, options.guards)
        policy.set_absent(team.absent)
        self._overlap = OverlappedExchange(self.flat, ErrorFeedback(options.wire))
        #: The generation whose ranks it joins, and what an exchange costs there, until it is known
        #: whether overlap pays.
        self._overlaps_in = -1
        self._exchange_cost: ExchangeCost | None = None
        #: How many cores an exchange leaves to this rank.
        self._cores_left = 0.0
        self._averager = GradientAverager(self.flat, team.comm, self._overlap)
        self._sharded = training.sharded
        self._sharded.divide(team.comm)
        #: Tensors that are exchanged lie in its memory.
        self._home = team.whole
        #: Updates of optimizers that were stepped alone in this window.
        self._single_steps: list[WindowResult] = []
        #: The update of this window, and that of the previous one, if the host does not wait.
        self._on_device: DeviceUpdate | None = None
        self._unread: DeviceUpdate | None = None
        #: Time of the last update, which is part of this rank's cost of a window.
        self._update_lap: Stopwatch | None = None
        self._sync_s = 0.0
        #: Why ranks could not exchange something after an update.
        self._torn: CollectiveError | None = None
        #: Epoch of windows without plans, and their samples so far.
        self._stream = (0, 0)
        #: Optimizer states as ``prepare_save`` gathered them, until they are asked for.
        self._gathered: list[OptimizerState] | None = None

    @property
    def policy(self) -> Policy:
        """Return the policy, which knows all windows that are over."""
        return self.lookahead.policy

    @property
    def why_parked(self) -> str:
        """Return why the planner, if this rank is it, has parked ranks; empty without any."""
        return self.lookahead.why_parked

    # ── an epoch ─────────────────────────────────────────────────────────────────────────────────

    def _begin(self) -> None:
        self.flat.attach_data()  # the model may have been given another memory format
        self.lookahead.drop()
        super()._begin()

    def begin_stream(self, epoch: int) -> None:
        """Start an epoch of windows without plans; all ranks call it together."""
        self.settle()
        self._begin()
        self.run.cursor = None
        self._stream = (epoch, 0)

    def _calibrate(self) -> None:
        """Learn how fast ranks are beside one another; all ranks call it together.

        They compute at the same time, as in a window: ranks may share a machine.
        """
        size, policy = self.team.world_size, self.policy
        if size == 1 or (policy.is_calibrated and not self.generations.is_cold):
            return
        if self.generations.has_just_joined:  # until it has seen enough windows of the others
            policy.calibrate([1.0] * size)
            return
        what = "timing its device before the first window"
        self.collectives.ask(what)
        own = time_slices(
            self.flat.groups[0].data.device, self.options.dtype, self.options.slowdown
        )
        speeds = self.collectives.ask(what, own)
        # Ranks that are absent count as fast until they have come and are measured.
        fastest = max(speeds.values())
        policy.calibrate([speeds.get(rank, fastest) for rank in range(size)])

    def _work(self) -> Iterator[Work]:
        rank = self.rounds.rank
        while True:
            state = self.rounds.state
            plans = [plan for plan in state.plans if isinstance(plan, WindowPlan)]
            # A parked rank does not see what functions of ``on_commit`` agree on: if these have
            # stopped the team, there is one more window.
            stops = state.stopping and not state.parked
            if not state.is_working or stops or self._is_beyond(plans[0]):
                return
            if plans[0].shares[rank]:
                positions = [p.positions(rank) for p in plans if not self._is_beyond(p)]
                yield Work(plans[0].window, positions)
            else:
                self.open_share(0)
                self.close()
            if self.commits_at_once:
                self.settle()

    def _is_beyond(self, plan: WindowPlan) -> bool:
        return self.max_steps is not None and plan.window >= self.max_steps

    def plan_ahead(self) -> None:
        """Plan the window after the next, while a device computes gradients."""
        super().plan_ahead()
        self.lookahead.plan_ahead(self.batch_size, self.whole_micro_batches)

    def exchange_plans(self, *, renew: bool = False, work_for_all: bool = False) -> bool:
        """Agree on the plans of the next two windows; see ``Engine``."""
        lookahead, size = self.lookahead, self.batch_size
        longer = _LONGER_EPOCH * self.run.open_cursor.num_windows(size)
        for wanted in (math.inf, math.inf) if work_for_all else (longer, 0.0):
            number = lookahead.make_first(
                size, self.whole_micro_batches, work_for_all=wanted, renew=renew
            )
            found = self._agree_on_plan(lookahead.take(), renew=renew)
            if found is None:
                return self.generations.change()
            lookahead.check(found.rows[self.rounds.state.planner].plan, number)
        if self._overlaps_in != self.rounds.state.generation:
            self._connect_overlap()
        return True

    def _connect_overlap(self) -> None:
        """Join the ranks that are present once more where overlap pays; they call it together."""
        self._overlaps_in = self.rounds.state.generation
        if self._can_overlap():
            self.team.open_gradients()
        overlap, gradients = self._overlap, self.team.gradients
        overlap.use(gradients)
        self._exchange_cost = None
        if gradients:
            device = self.flat.groups[0].grad.device
            found = time_link(gradients[0], self.team, device, overlap.feedback)
            self._exchange_cost, self._cores_left = found

    def _can_overlap(self) -> bool:
        """Return whether gradients of the ranks that are present could travel during backward."""
        team, wanted = self.team, self.options.overlap
        kinds = {torch.device(team.member_by_rank[rank].device).type for rank in team.members}
        # Inside a host most of an exchange is work for the cores that compute. On GPUs it has not
        # been measured.
        pays = kinds == {"cpu"} and team.comm.backend in _ACROSS_HOSTS
        is_wanted = wanted == "on" or (wanted == "auto" and pays)
        is_possible = kinds <= {"cpu", "cuda"} and not self._sharded.is_on
        return is_wanted and is_possible and len(team.members) > 1

    def _choose_pieces(self, found: Round) -> None:
        """Choose how gradients travel, once the first window has shown how long backward takes."""
        rows, cost, overlap = found.rows.values(), self._exchange_cost, self._overlap
        if cost is None or any(not row.order for row in rows if row.report.samples):
            return  # nothing is to be chosen, or a rank has computed nothing that counts
        self._exchange_cost = None
        backward_s = min(row.backward_s for row in rows)
        cost = cost._replace(processor_part=max(row.slower for row in rows))
        chosen = choose_pieces(overlap.num_bytes, backward_s, cost)
        if self.options.overlap == "on" and not chosen.num_bytes:
            chosen = chosen._replace(num_bytes=overlap.num_bytes)
        if chosen.num_bytes:
            overlap.cut(chosen.num_bytes)
        else:
            overlap.use(())
            self.team.close_gradients()
        if self.rounds.is_main:
            self.options.say(describe(chosen, backward_s))

    def settle(self) -> None:
        """Commit what has been applied and not yet committed; all ranks call it together."""
        if self.rounds.committing:
            return  # it is committed; in a commit, not all ranks have left their loops
        if self._single_steps and self.share.in_micro_batch:
            self.share.end_micro_batch()
            self.close()  # by its plan, which ranks without a share and the data position follow
        if self.rounds.has_left or self.rounds.state.applied:
            self.generations.keep(
                lambda: self._meet_read(Purpose.REST, report=Report(**self.run.late_fields))
            )

    def end_epoch(self) -> None:
        """Commit the last window of an epoch, and take parked ranks back; all call it together."""
        self.rounds.state = self.rounds.state.release()
        self.settle()
        if self.rounds.state.parked:  # no window was left to commit
            self.generations.keep(self.generations.regroup)

    def leave(self) -> None:
        """Leave an epoch in its middle; the others learn of it in ``settle``."""
        state = self.rounds.state
        # Otherwise the team has stopped, or has changed after others left: no rank waits for a row.
        if state.is_working or state.applied or not self.in_epoch:
            super().leave()
        if not self._single_steps:
            self.drop_share()
        self._is_void = False

    # ── this rank's part of a window ─────────────────────────────────────────────────────────────

    def open_share(self, num_micro_batches: int) -> Share:
        """Start this rank's part of a window."""
        whole_window = num_micro_batches == 1 and self.team.comm.world_size == 1
        scale, loss_scale = None, self.run.loss_scale
        if not whole_window or loss_scale.is_used:
            expected = self.run.expected_weight or float(self.batch_size or 1)
            scale = power_of_two_near(expected) / loss_scale.value
            self._overlap.feedback.rescale(scale)
        return self._open(num_micro_batches, scale)

    def redo(self) -> bool:
        """Discard the open share; once gradients have left, all ranks do so; see ``Engine``."""
        if not self._overlap.has_begun:
            return super().redo()
        self.share.in_micro_batch = False
        self.close(redo=True)
        return True

    def drop_share(self) -> None:
        """Discard gradients and buffer changes of the open share."""
        self._overlap.end_window(is_applied=False)
        self.flat.zero_()
        self.buffers.restore()

    @contextmanager
    def in_backward(self, part: int | None) -> Iterator[None]:
        """Compute gradients, which leave meanwhile if they are the share's last; see ``Engine``."""
        overlap, share = self._overlap, self.share
        overlaps = overlap.is_on and self.in_epoch and part is None and share.is_last
        if overlaps and isinstance(self.rounds.state.plan, WindowPlan):
            is_real = self.options.slowdown.factor == 1
            overlap.before_backward(self.window, None if is_real else share.ahead_s)
        try:
            yield
        finally:
            overlap.after_backward()
        self.flat.attach_grads()

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
        if not self.rounds.state.is_working:
            return None  # dropped at the step of one optimizer: the rest of the share is void
        if not last and self.rounds.is_interrupted():
            return self.close(drop=not self._single_steps)
        return self.close() if last else None

    def step_part(self, part: int) -> WindowResult | None:
        """Step one optimizer alone on this window's samples, and leave the window open.

        Without plans it closes a window of its own.

        Returns:
            The update; ``None`` if it is dropped.
        """
        share = self.share
        if self.team.is_elastic:
            raise UsageError(
                "ddp.step(optimizer) needs a fixed team: if a rank is lost between the steps of "
                "two optimizers, the first step cannot be undone. Step all optimizers together, or "
                "do not use elastic"
            )
        share.begin_single_step(part)
        if not self.in_epoch:
            share.end_micro_batch()
            return self._close(Purpose.STEP, part)
        if not self.rounds.state.is_working:
            self.flat.zero_(part)
            return None
        share.pause()
        result = self._close(Purpose.WINDOW, part)
        share.resume()
        return result

    def close(self, *, drop: bool = False, redo: bool = False) -> WindowResult | None:
        """Close a planned window; all ranks call it together.

        A rank without a share does not know whether the others step one optimizer, close the
        window, or have left the loop. It joins their rounds until the window is over.

        Args:
            drop: This rank was asked to stop in mid-window: no rank applies the window, it stays
                uncommitted, and the run can resume from there later.
            redo: All ranks shall compute the window again.

        Returns:
            The applied window, or ``None`` when there is none.

        Raises:
            NonFiniteGradientError: On every rank, when a loss or gradient is not finite.
        """
        rounds = self.rounds
        plan, window, generation = rounds.state.plan, self.window, rounds.state.generation
        assert isinstance(plan, WindowPlan)
        self.plan_ahead()  # without a share it was not done
        if plan.shares[rounds.rank]:
            return self._close(Purpose.WINDOW, drop=drop, redo=redo)
        if rounds.state.is_parked:
            with self.team.in_phase(PARKED):
                return self._close(Purpose.IDLE)
        result = self._close(Purpose.IDLE)
        while rounds.state.is_working and (self.window, rounds.state.generation) == (
            window,
            generation,
        ):
            result = self._close(Purpose.IDLE)
        return result

    def join_unplanned(self) -> WindowResult | None:
        """Take part in a window without a plan, with nothing; ``None`` if no rank had data."""
        generation = -1
        while generation != self.rounds.state.generation:
            generation = self.rounds.state.generation  # in another one it is computed again
            self.open_share(0)  # every window has a scale of its own
            if result := self._close(Purpose.IDLE):
                return result
        return None

    def _close(
        self, purpose: Purpose, part: int | None = None, **wishes: bool
    ) -> WindowResult | None:
        """Say what this rank did, and do what follows from what all say."""
        if self.rounds.has_left and purpose is Purpose.STEP:
            self.settle()  # plans of a loop that was left by `break` do not hold after it
        self.result, window = None, self.window
        generation = self.rounds.state.generation
        self.generations.keep(lambda: self._make_row(purpose, part, **wishes))
        is_again = self.rounds.state.generation != generation and self.window == window
        return None if is_again else self.result

    def _make_row(self, purpose: Purpose, part: int | None, **wishes: bool) -> None:
        report, rounds = self._report(part), self.rounds
        self.spans.begin_wait()
        loss_scale, lookahead = self.run.loss_scale, self.lookahead
        is_planned = bool(rounds.state.plans)
        self._meet_read(
            purpose,
            part=ALL if part is None else part,
            renew=lookahead.renews if is_planned else self.generations.wants_renewal,
            trainable=len(self.flat.parameters),
            rates=checksum([float(g["lr"]) for o in self.optimizers for g in o.param_groups]),
            hooked=self.options.guards.are_hooked,
            summed=self.share.losses(part).is_summed,
            may_skip=self._skips or loss_scale.may_shrink(rounds.rank),
            report=report,
            plan=lookahead.draft,
            **wishes,
        )

    @property
    def _skips(self) -> bool:
        return self.options.non_finite == "skip"

    def _report(self, part: int | None) -> Report:
        """Return what this rank did, of one optimizer's losses if that is stepped alone."""
        if self.rounds.state.is_parked:
            return NOTHING
        share, averager = self.share, self._averager
        ends_single_steps = bool(self._single_steps) and part is None
        done = Report(
            weight=share.weight if ends_single_steps else share.losses(part).weight,
            micro_batches=share.micro_batches,
            samples=share.samples,
            buffers_changed=not self.buffers.is_empty and self.buffers.changed(),
            limit=self.run.limits.own,
            warmup_micro_batches=share.warmup_micro_batches,
            warmup_samples=share.warmup_samples,
            **self.run.late_fields,
        )
        self._on_device = None
        if part is None and not ends_single_steps and self._can_run_ahead():
            assert self.queue is not None
            self._on_device = DeviceUpdate(
                share, averager, self.flat, self.queue, self._update_lap, self.run.progress
            )
            return done
        # In a sharded update the norm of the mean is taken anyway, before anything is applied, and
        # ``blame`` then finds the rank. A loss scale, and batches that others hand out, are judged
        # by ranks' own norms.
        in_mean = self._sharded.can_blame and not self.run.loss_scale.is_used
        in_mean &= self.rounds.state.plan is not None
        norms = [] if ends_single_steps else averager.gather(part, unmeasured=in_mean)
        loss_sum, non_finite = share.losses(part).judge(averager, norms, part)
        update_s = 0.0 if self._update_lap is None else self._update_lap.seconds
        return done._replace(
            loss_sum=loss_sum,
            non_finite=non_finite,
            own_norm=averager.own_norm,
            compute_s=share.compute_s + update_s,
            update_s=update_s,
            update_parts=self.team.comm.world_size if self._sharded.is_on else 1,
            warmup_s=share.warmup_s,
        )

    # ── what a round leads to ────────────────────────────────────────────────────────────────────

    def _carry_out(self, action: Action, found: Round) -> None:
        if action is Action.APPLY:
            self._finish(found)
        elif action is Action.STEP_ONE:
            if not self.rounds.state.is_parked:
                assert isinstance(self.rounds.state.plan, WindowPlan)
                self.result = self._apply(found, self.rounds.state.plan)
                self._single_steps.append(self.result)
        elif action in (Action.DROP, Action.REDO):
            self.drop_share()
            if action is Action.DROP:
                self.lookahead.drop()
        elif action is Action.RESTORE:
            self.flat.zero_(found.decision.part)
            self._single_steps.clear()

    def _finish(self, found: Round) -> None:
        """Apply a window, which is committed when the next round shows that all have."""
        self.spans.begin_sync()
        state, lookahead = self.rounds.state, self.lookahead
        plan, leases = state.plan, []
        reports = found.reports(self.team.world_size)
        if isinstance(plan, WindowPlan):
            lookahead.check(found.rows[state.planner].plan, self.window + len(state.plans))
            lookahead.take()
            leases.append(lookahead.leases.pop(plan.window))
            if self._on_device is None:
                lookahead.observe(reports, plan, _exchange_s(found))
        else:
            plan = self._unplanned(reports)
        late_fields: dict[str, Any] = {}
        if state.is_parked:  # this rank follows what the others have applied
            result = self._result_of(found, plan, skipped=found.decision.skip)
        elif self._single_steps:
            result = self._end_single_steps(found)
        else:
            result = self._apply(found, plan)
        made = not result.skipped
        weight = result.weight if made else 0.0
        hidden_s = self._overlap.hidden_s
        self._choose_pieces(found)
        if len({row.order for row in found.rows.values()}) == 1:
            self._overlap.sort()
        self._overlap.end_window(is_applied=True)
        self.windows_s.append(self.spans.elapsed_s)
        self.run.advance(made=made, skipped=not made, samples=plan.size, weight=weight)
        result = replace(result, progress=self.run.progress)
        if self._on_device is not None:
            result = self._on_device.show(result)
        if not state.is_parked:
            self.result = result
            late_fields = {"wait_s": found.wait_s, "sync_s": self._sync_s, "hidden_s": hidden_s}
            late_fields |= self.spans.apply()
        self.run.applied = Applied(result, leases, late_fields)
        self._unread, self._on_device = self._on_device, None
        if (torn := self._torn) is not None:  # the window counts as applied by now
            self._torn = None
            raise torn

    def _unplanned(self, reports: Sequence[Report]) -> WindowPlan:
        """Return the plan that a window without one has followed."""
        epoch, start = self._stream
        shares = tuple(report.samples for report in reports)
        plan = WindowPlan(self.window, epoch, start, sum(shares), shares)
        self._stream = (epoch, plan.stop)
        return plan

    # ── the update ───────────────────────────────────────────────────────────────────────────────

    def _apply(self, found: Round, plan: WindowPlan) -> WindowResult:
        """Average the gradients and step all optimizers, or one.

        Raises:
            NonFiniteGradientError: The sum over ranks overflowed.
        """
        decision, on_device = found.decision, self._on_device
        closes = Action.APPLY in decision.actions
        part, weight, skipped = decision.part, decision.weight, decision.skip
        what, norm, started_s = f"window {plan.window}", math.nan, time.perf_counter()
        max_norm, schedule = self.options.max_grad_norm, self.training.schedule
        if self._sharded.is_on:
            hooked = [rank for rank, row in found.rows.items() if row.hooked]
            self._sharded.join_if_needed(hooked)
        if on_device is not None:
            on_device.apply(plan, max_norm)
        elif not skipped:
            averager = self._sharded if self._sharded.is_on else self._averager
            norm = averager.average(
                self.share.scale_of(part), decision.divisor, part, what=what, max_norm=max_norm
            )
        if on_device is None and not math.isfinite(norm):
            skipped = skipped or self._overflowed(plan, part)
            self._overlap.feedback.clear()
        if closes:
            self._average_buffers(found, 0.0 if skipped else weight, what)
        self._sync_s = time.perf_counter() - started_s
        watch = Stopwatch(self.options.slowdown, self.queue)
        schedule.before_update(self.run.progress)
        lr = float(self.optimizers[part or 0].param_groups[0]["lr"])
        stepped = self.optimizers if part is None else [self.optimizers[part]]
        if not skipped:
            self._step(stepped, part)
        # Also for a skipped window: it may have overflowed because another weight was expected.
        self.run.expected_weight = weight or self.run.expected_weight
        if weight and self.run.loss_scale.is_used:
            self.run.loss_scale.update(overflowed=skipped)
        self.flat.zero_(part)
        self._update_lap = watch.stop()
        if not skipped:
            self._share_parameters(part, what)
            schedule.after_update(None if part is None else stepped[0])
        return self._result_of(found, plan, grad_norm=norm, lr=lr, skipped=skipped)

    def _end_single_steps(self, found: Round) -> WindowResult:
        """Return the steps of single optimizers as one window."""
        steps, self._single_steps, self._sync_s = self._single_steps, [], 0.0
        weight, last = steps[0].weight, steps[-1]
        self._average_buffers(found, weight, f"window {last.window}")
        skipped = all(step.skipped for step in steps)
        return replace(
            last,
            weight=weight,
            skipped=skipped,
            applied_t=time.time(),
            ranks=found.records(self.team.world_size),
        )

    def _average_buffers(self, found: Round, weight: float, what: str) -> None:
        """Average the model's buffers by weight; a window without weight leaves them as before."""
        if not any(row.report.buffers_changed for row in found.rows.values()):
            return
        if weight:
            self.buffers.average(self.share.weight, weight, what=what)
        else:
            self.buffers.restore()

    def _overflowed(self, plan: WindowPlan, part: int | None) -> bool:
        """Return whether to skip a window, because its mean gradient is not finite.

        Raises:
            NonFiniteGradientError: It must not be left out.
        """
        if self._skips or self.run.loss_scale.can_shrink:
            return True
        blamed, are_finite = None, self._averager.has_measured
        if self._sharded.is_on:
            blamed = self._sharded.blame(part, what=f"window {plan.window}")
            are_finite |= self._sharded.can_blame
        self.flat.zero_(part)
        if blamed is None:
            raise overflow(plan, self.run.progress.steps + 1, are_finite=are_finite)
        rank, number = blamed
        raise self._non_finite(rank, number + 1, plan)

    def _step(self, stepped: Sequence[Optimizer], part: int | None) -> None:
        """Update the parameters, or this rank's part of them."""
        if self._sharded.is_on:
            self.options.guards.step(stepped, self._sharded.stepping(stepped))
        else:
            self.flat.mask_untouched(part)
            self.options.guards.step(stepped)
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

    def _refuse_non_finite(self, rank: int, found: Round) -> NoReturn:
        plan = self.rounds.state.plan
        if not isinstance(plan, WindowPlan):
            plan = self._unplanned(found.reports(self.team.world_size))
        raise self._non_finite(rank, found.rows[rank].report.non_finite, plan)

    # ── an update that a device makes meanwhile ──────────────────────────────────────────────────

    def _can_run_ahead(self) -> bool:
        """Return whether the host need not wait for the numbers of this window.

        Not with several ranks: they exchange these numbers before they exchange gradients.
        Nor if a window that is not finite has to be left out.
        """
        return (
            self.queue is not None
            and self.queue.has_milestones
            and self.team.world_size == 1
            and self.options.slowdown.factor == 1
            and self.share.weight > 0
            and not (self._skips or self.run.loss_scale.is_used)
            and len({group.data.device for group in self.flat.groups}) == 1
        )

    def _meet_read(self, purpose: Purpose, **fields: Any) -> None:
        """Meet, after the numbers of the previous window were read, which is committed there.

        Raises:
            NonFiniteGradientError: One of them is not finite.
        """
        unread, self._unread = self._unread, None
        if unread is not None:
            applied = self.run.applied
            assert applied is not None
            if unread.non_finite:
                self.run.applied, self.run.progress = None, unread.before
                self.drop_share()
                self.lookahead.drop()
                raise self._non_finite(0, unread.non_finite, unread.plan)
            result = unread.complete(applied.result)
            self.run.applied = applied._replace(result=result)
            if applied.leases:
                self.lookahead.observe(list(result.ranks), unread.plan, math.nan)
        overlap, measured = self._overlap, {}
        if overlap.order and self._exchange_cost is not None:
            measured["backward_s"] = overlap.backward_s
            measured["slower"] = processor_part(overlap.busy_cores, self._cores_left)
        self.meet(
            purpose,
            begun=overlap.has_begun,
            late=overlap.is_late,
            order=checksum(overlap.order),
            **measured,
            **fields,
        )

    def _follow(self, found: Round) -> None:
        """Carry out what follows from a round, and end what has begun during backward."""
        overlap, rows = self._overlap, found.rows.values()
        begun = overlap.is_on and any(row.begun for row in rows)
        if begun:
            is_applied = Action.APPLY in found.decision.actions and not found.decision.skip
            overlap.join(self.window, contributes=is_applied, has_late=any(r.late for r in rows))
        try:
            super()._follow(found)
        except CollectiveError:
            raise
        except BaseException:
            overlap.discard()
            raise
        if begun:
            overlap.discard()

    def _non_finite(self, rank: int, code: int, plan: WindowPlan) -> NonFiniteGradientError:
        scale, step = self.run.loss_scale.of(rank), self.run.progress.steps + 1
        return non_finite_on(rank, code, plan, self.flat.names, step, loss_scale=scale)

    # ── a change of the team ─────────────────────────────────────────────────────────────────────

    def drop(self) -> None:
        """Drop the window under way, and all plans."""
        self._overlap.abandon()
        super().drop()
        self._single_steps.clear()
        self.lookahead.drop()
        self.run.lease_applied()
        self.lookahead.forget_parking()

    def use_team(self) -> None:
        """Use the ranks that are present from now on, in plans and in exchanges."""
        super().use_team()
        self.lookahead.use_team(self.batch_size)
        if self._home is not self.team.whole:
            # A rank of an earlier generation that was stopped and continues may write into that
            # generation's memory, so the tensors move out of it.
            self._home = self.team.whole
            self.flat.move(self._home)
        self._overlap.use(())
        self._averager.use(self.team.comm)  # first: it tells which ranks round what they send
        if self._overlaps_in == self.rounds.state.generation and not self.rounds.state.is_parked:
            self._connect_overlap()
        self.buffers.use(self.team.comm)
        if not self.rounds.state.is_parked:
            self._sharded.divide(self.team.comm)

    def close_down(self) -> None:
        """End the exchanges, those in the background too; idempotent."""
        super().close_down()
        self._overlap.close()

    # ── state ────────────────────────────────────────────────────────────────────────────────────

    def load_state_dict(self, state: Mapping[str, Any], members: Sequence[str]) -> None:
        """Continue from a saved state; see ``Engine``."""
        super().load_state_dict(state, members)
        self._overlap.feedback.clear()

    def prepare_save(self) -> None:
        """Gather optimizer states on the rank that saves; all ranks call it together."""
        if self._sharded.is_on:
            sharded, is_main = self._sharded, self.rounds.is_main
            every = range(len(self.optimizers))
            self._gathered = [sharded.state_dict(n, keeps=is_main) for n in every]
        super().prepare_save()

    def optimizer_states(self) -> list[OptimizerState]:
        """Return the states that every rank has, or those of the last ``prepare_save``."""
        if not self._sharded.is_on:
            return self.training.own_states()
        gathered, self._gathered = self._gathered, None
        assert gathered is not None, "prepare_save was not called"
        return gathered


def _exchange_s(found: Round) -> float:
    """Return the cost of the previous window's exchange: waiting, and moving bytes.

    Where gradients travel during backward, ranks only wait for what backward has not hidden.
    """
    took_part = [row.report for row in found.rows.values() if row.report.elapsed_s]
    if Action.COMMIT not in found.decision.actions or not took_part:
        return math.nan
    return min(r.wait_s for r in took_part) + max(r.sync_s for r in took_part)
