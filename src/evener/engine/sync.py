"""Runs SYNC windows on one rank: plan, compute, meet, average, update, commit."""

import math
import time
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from typing import Any, final

from evener.averaging.buffers import BufferAverager
from evener.comm.flat import FlatBuffers
from evener.data.cursor import Cursor
from evener.engine.calibration import time_slices
from evener.engine.engine import Engine, EngineOptions
from evener.engine.finite import find_non_finite
from evener.engine.meetings import Met, WindowMeetings
from evener.engine.membership import Call
from evener.engine.moments import SavedState, own_state
from evener.engine.notices import parked, slow_rank_0
from evener.engine.plans import AppliedWindow, PlanQueue, refuse_other_work
from evener.engine.results import Progress, RankRecord, WindowResult
from evener.engine.same_data import DATA_LENGTH, data_row, refuse_other_data
from evener.engine.share import Share
from evener.engine.sync_row import agree_on_part
from evener.engine.team import Meeting, Team
from evener.engine.updates import Updater
from evener.engine.waste import EqualBatches
from evener.planning.plan import WindowPlan
from evener.planning.policies import Policy

#: Windows after which a parked rank is tried again, if the epoch does not end before.
PARKED_WINDOWS = 500


@final
class WindowEngine(Engine):
    """The protocol of a SYNC window, seen from one rank.

    Life of a window: the loader hands out this rank's micro-batches, which ``share`` accounts for;
    after the last one ``close`` meets the others. At that meeting every rank learns that all have
    applied the window before (it is *committed*), whether every gradient is finite, whether
    somebody wants to stop, and the plan of the window after the next. Then gradients are averaged
    and the update is applied.

    The meeting comes before the gradients, so a mistake (another collective, a non-finite
    gradient, a stop) is known before any of it could be averaged in.
    """

    def __init__(
        self,
        *,
        team: Team,
        flat: FlatBuffers,
        buffers: BufferAverager,
        updater: Updater,
        policy: Policy,
        options: EngineOptions,
    ) -> None:
        super().__init__(team, flat, buffers, options)
        self.plans = PlanQueue(team.rank, team.world_size, policy)
        self._updater = updater
        #: Optimizers that have been stepped alone in this window.
        self._turns: list[WindowResult] = []
        self._meetings = WindowMeetings(self, self.plans, updater)
        #: Epoch of windows without plans, and their samples so far.
        self._stream = (0, 0)
        self._equal_batches = EqualBatches()
        self._recall_at = 0
        self._warned_of_rank_0 = False

    @property
    def policy(self) -> Policy:
        """Who does how much; rank 0's word counts."""
        return self.plans.policy

    @property
    def turns(self) -> int:
        """Windows: each is an optimizer step, or one left out."""
        return self.progress.window

    # ── before a window ──────────────────────────────────────────────────────────────────────

    def begin(self, cursor: Cursor, batch_size: int) -> None:
        """Starts or goes on with the cursor's epoch; all ranks call it together."""
        self.settle()
        self.flat.attach_data()  # the model may have been given another memory format
        self.plans.begin(cursor, batch_size)

    def begin_stream(self, epoch: int) -> None:
        """Starts an epoch of windows without plans; all ranks call it together."""
        self.settle()
        self.flat.attach_data()
        self._drop_plans()
        self._stream = (epoch, 0)

    def settle(self) -> None:
        """Commits what has been applied and not yet committed; all ranks call it together."""
        if self._turns and self.share.in_micro_batch:
            self.share.end_micro_batch()
            self.close()  # by its plan, which ranks without a share and the data position follow
        if self.left:
            self._meetings.flush()
            self.left = False
            self._drop_plans()
            if self.team.parked:
                self.recall(Call.LEFT)
        else:
            self.flush()

    def calibrate(self) -> None:
        """Learns how fast ranks are beside one another; all ranks call it together.

        They compute at the same time, as in a window: ranks may share a machine.
        """
        self._meetings.meet(Meeting.CALIBRATION, [])
        device = self.flat.groups[0].data.device
        own = time_slices(device, self.options.dtype, self.options.slowdown)
        rows = self._meetings.meet(Meeting.CALIBRATION, [own])
        self.policy.calibrate([row[0] for row in rows])

    def exchange_plan(self, *, work_for_all: float = 0.0) -> None:
        """Agrees on the plan of the next slice of the epoch; all ranks call it together.

        Args:
            work_for_all: See ``Policy.plan``.
        """
        draft = self.plans.draft(self.window, work_for_all=work_for_all)
        own = data_row(self.plans.cursor, self.plans.batch_size)
        rows = self._meetings.meet(Meeting.PLAN, [*draft, *own])
        stop = len(draft) + DATA_LENGTH
        said = {r: row[len(draft) : stop] for r, row in enumerate(rows)}
        refuse_other_data(
            self.team.rank, {r: row for r, row in said.items() if r not in self.team.parked}
        )
        self.plans.accept(rows[0])

    def open_share(self, num_micro_batches: int) -> Share:
        """Starts this rank's part of a window."""
        whole_window = num_micro_batches == 1 and self.team.comm.world_size == 1
        if whole_window and not self.options.loss_scale.is_used:
            scale = None
        else:
            scale = self._updater.scale(self.plans.batch_size or 1)
        self.share = Share(
            num_micro_batches,
            scale=scale,
            slowdown=self.options.slowdown,
            known_sizes=self.known_sizes,
        )
        return self.share

    def end_micro_batch(self) -> WindowResult | None:
        """Ends a micro-batch; closes the window with the last one of this rank's share."""
        last = self.share.end_micro_batch()
        if self.share.dropped:
            return None
        if not self.in_epoch:
            return self.close_unplanned()
        if self.options.stop_requested() and not last:
            return self.close(abandon=True)
        return self.close() if last else None

    def step_part(self, part: int) -> WindowResult | None:
        """Steps one optimizer alone on this window's samples, and leaves the window open.

        Without plans it closes a window of its own.

        Returns:
            The update; ``None`` where it is dropped.
        """
        share = self.share
        share.start_turn(part)
        if share.dropped:
            self.flat.zero_(part)
            return None
        if not self.in_epoch:
            share.end_micro_batch()
            return self.close_unplanned(part)
        plan = self.plans.peek()
        assert plan is not None
        share.pause()
        met = self._meetings.close(plan, self._meetings.report(part=part), part=part)
        result = None
        if met.abandoned:
            self._abandon()
            share.drop()  # what is left of this batch goes through, for nothing
        else:
            agree_on_part(met.rows, plan.shares, part)
            result = self._take_turn(part, plan, met)
        share.resume()
        return result

    def consensus(self) -> AbstractContextManager[None]:
        """Shows the agreed buffers; parameters are equal at all times."""
        self.flat.attach_data()  # what was assigned to .data counts
        return self.buffers.consensus()

    def restored(self) -> None:
        """Takes the buffers as they are for the agreed ones."""
        self.buffers.reset()

    def saved_states(self) -> list[SavedState]:
        """This rank's optimizer states, which are every rank's."""
        return [own_state(optimizer) for optimizer in self._updater.optimizers]

    def leave(self) -> None:
        """Leaves an epoch in its middle; the others learn of it in ``settle``."""
        self.left = True
        if not self.share.turns:
            self.drop_share()

    # ── closing ──────────────────────────────────────────────────────────────────────────────

    def close(self, *, abandon: bool = False) -> WindowResult | None:
        """Closes the window; all ranks call it together.

        Args:
            abandon: This rank was told to stop in mid-window: nobody applies the window, it
                stays uncommitted, and the run can go on from there later.

        Returns:
            The applied window, or ``None`` when it was abandoned.

        Raises:
            NonFiniteGradientError: On every rank, when a loss or gradient is not finite.
        """
        plan = self.plans.peek()
        assert plan is not None
        # A rank without a share does not know whether an optimizer takes its turn, the window is
        # closed, or the others have left the loop: it goes along.
        idle = plan.shares[self.team.rank] == 0
        while True:
            met = self._meetings.close(
                plan,
                self._meetings.report(abandon and not self._turns, turns=bool(self._turns)),
                idle=idle,
            )
            if met.abandoned:
                self._abandon()
                return None
            part = agree_on_part(met.rows, plan.shares)
            if not idle or part is None:
                break
            self._take_turn(part, plan, met)
        if idle and not any(report.samples for report in met.reports):
            self._drop_plans()
            self.others_left = True
            return None
        self.plans.pop()
        self.plans.accept(met.rows[0].plan)
        self._meetings.draft = None
        refuse_other_work(met.reports, plan)
        result, sync_s = self._apply(plan, met)
        lease = self.plans.lease_of(plan.window)
        self._meetings.applied = AppliedWindow(result, lease, met.wait_s, sync_s)
        self.policy.observe(met.reports, plan, met.exchange_s)
        self.progress = result.progress
        if (misfit := met.rows[0].note.park) == 0:
            self._warn_of_rank_0()
        elif misfit is not None:
            self._park(misfit)
        elif self.team.parked and self.window >= self._recall_at:
            self.recall(Call.GO_ON)
        elif met.rows[0].note.calls:
            self._call(Call.STAY)
        return result

    def close_unplanned(
        self, part: int | None = None, *, idle: bool = False
    ) -> WindowResult | None:
        """Closes a window that no plan was made for; all ranks call it together.

        Args:
            part: Only this optimizer is stepped.
            idle: This rank has run out of data, and goes along with the others.

        Returns:
            The applied window; ``None`` when no rank had data, or the others have left.
        """
        met = self._meetings.close(None, self._meetings.report(part=part), part=part, idle=idle)
        working = [report.micro_batches for report in met.reports]
        if not any(working):
            return None
        part = agree_on_part(met.rows, working, part)
        self._look_for_equal_batches(met)
        epoch, start = self._stream
        shares = tuple(report.samples for report in met.reports)
        plan = WindowPlan(self.window, epoch, start, sum(shares), shares)
        result, sync_s = self._apply(plan, met, part)
        self._stream = (epoch, plan.stop)
        self._meetings.applied = AppliedWindow(result, None, met.wait_s, sync_s)
        self.progress = result.progress
        return result

    def _look_for_equal_batches(self, met: Met) -> None:
        alike = self._equal_batches.see(
            {
                rank: (row.report.loss_sum / row.report.weight, row.note.own_norm)
                for rank, row in enumerate(met.rows)
                if row.report.weight and row.note.own_norm
            }
        )
        if alike:
            self.options.notice(alike)

    def flush(self) -> None:
        """Commits the last window of an epoch; all ranks call it together."""
        if self._meetings.applied is not None:
            self._meetings.flush()

    def _apply(
        self, plan: WindowPlan, met: Met, part: int | None = None
    ) -> tuple[WindowResult, float]:
        """Averages and updates, unless the optimizers have taken their turns; then compares."""
        if self._turns:
            result, sync_s = self._end_turns(plan, met), 0.0
        else:
            self._refuse_non_finite(plan, met, part)
            result, sync_s = self._updater.apply(
                plan,
                met.reports,
                self.share,
                self.progress,
                buffers_changed=met.buffers_changed,
                part=part,
            )
        started_s = time.perf_counter()
        if self.options.check.is_due(plan.window):
            self.options.check.compare(self.team.comm, plan.window)
        return result, sync_s + time.perf_counter() - started_s

    def _end_turns(self, plan: WindowPlan, met: Met) -> WindowResult:
        turns, self._turns = self._turns, []
        weight, skipped = turns[0].weight, all(turn.skipped for turn in turns)
        if met.buffers_changed:
            self._updater.agree_on_buffers(self.share, weight, f"window {plan.window}")
        return replace(
            turns[-1],
            weight=weight,
            skipped=skipped,
            progress=self.progress.after(plan.size, 0.0 if skipped else weight, skipped),
            applied_t=time.time(),
            ranks=tuple(RankRecord.of(r) for r in met.reports),
        )

    def _take_turn(self, part: int, plan: WindowPlan, met: Met) -> WindowResult:
        self._refuse_non_finite(plan, met, part)
        result, _ = self._updater.apply(
            plan, met.reports, self.share, self.progress, buffers_changed=False, part=part
        )
        self._turns.append(replace(result, progress=self.progress))
        return self._turns[-1]

    def _refuse_non_finite(self, plan: WindowPlan, met: Met, part: int | None) -> None:
        bad = find_non_finite(met.reports, plan, self.flat.names, self.progress.steps + 1)
        if bad is not None and not self._updater.may_skip(met.reports):
            self.flat.zero_(part)
            self._turns.clear()
            raise self.options.loss_scale.exhausted(bad)

    def _abandon(self) -> None:
        self.drop_share()
        self._drop_plans()

    def _drop_plans(self) -> None:
        self.plans.drop()
        self._meetings.draft = None

    # ── parking ──────────────────────────────────────────────────────────────────────────────

    def recall(self, said: Call) -> None:
        """Calls parked ranks back with the state of now; all that are not parked call it together.

        Args:
            said: Why; with ``Call.GO_ON`` new plans are made for the whole team.
        """
        self.flush()
        self._drop_plans()
        self._call(said)
        self._rejoined(said, receives=False)

    def wait_for_recall(self) -> None:
        """Waits, parked, to be called back, and takes over the state of the others."""
        said, leaving = self.team.wait_for_call(self.window, self.wants_stop)
        self.stopping |= leaving > 0
        self.others_left = said is Call.LEFT
        self._rejoined(said, receives=True)

    def _call(self, said: Call) -> None:
        leaving = int(self.stopping or self.wants_stop())
        self.stopping |= self.team.call(said, window=self.window, leaving=leaving) > 0

    def _park(self, rank: int) -> None:
        """Goes on without a rank that costs more than it brings; all ranks call it together."""
        speeds = self.policy.solo_speeds(self.plans.batch_size)
        self.flush()
        self._drop_plans()
        self.team.park(rank)
        self._use_team()
        self._recall_at = self.window + PARKED_WINDOWS
        self.options.notice(parked(rank, speeds, PARKED_WINDOWS))
        if not self.team.is_parked:
            self.exchange_plan()
            self.exchange_plan()

    def _warn_of_rank_0(self) -> None:
        if not self._warned_of_rank_0:
            speeds = self.policy.solo_speeds(self.plans.batch_size)
            self.options.notice(slow_rank_0(speeds))
        self._warned_of_rank_0 = True

    def _rejoined(self, said: Call, *, receives: bool) -> None:
        cursor = self.plans.cursor
        counters: dict[str, Any] = {
            "progress": asdict(self.progress),
            "expected_weight": self._updater.expected_weight,
            "cursor": cursor.state_dict(),
            "loss_scale": self.options.loss_scale.state_dict(),
        }
        counters = self.options.transfer_state(counters, receives)
        if receives:
            self.progress = Progress(**counters["progress"])
            self._updater.expected_weight = counters["expected_weight"]
            cursor.load_state_dict(counters["cursor"])
            self.options.loss_scale.load_state_dict(counters["loss_scale"])
            self.flat.zero_()
            self.buffers.reset()
        self._use_team()
        if said is Call.GO_ON:
            self.exchange_plan(work_for_all=math.inf)
            self.exchange_plan(work_for_all=math.inf)

    def _use_team(self) -> None:
        self.policy.set_parked(self.team.parked)
        self._updater.use(self.team.comm)
