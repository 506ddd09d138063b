"""Runs SYNC windows on one rank: plan, compute, meet, average, update, commit."""

import math
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from typing import Any, final

import torch

from evener.averaging.buffers import BufferAverager
from evener.averaging.gradients import GradientAverager
from evener.averaging.weights import combine, power_of_two_near
from evener.cadence.plan import WindowPlan, WindowReport
from evener.cadence.policies import Policy
from evener.comm.flat import FlatBuffers
from evener.data.cursor import Cursor
from evener.run.finite import find_non_finite, overflow
from evener.run.moments import SavedState, own_state
from evener.run.notices import parked, slow_rank_0
from evener.run.planning import AppliedWindow, PlanQueue, refuse_other_work
from evener.run.results import Progress, RankRecord, WindowResult
from evener.run.row import (
    Note,
    Row,
    decode_row,
    encode_row,
    refuse_other_parameters,
    seconds_of_exchange,
)
from evener.run.share import Share
from evener.run.team import Meeting, Team
from evener.run.windows import Engine, EngineOptions

#: Windows after which a parked rank is tried again, if the epoch does not end before.
PARKED_WINDOWS = 500

#: Timing of a rank: samples, micro-batches, seconds.
Measurement = tuple[int, int, float]


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
        averager: GradientAverager,
        buffers: BufferAverager,
        optimizers: Sequence[torch.optim.Optimizer],
        policy: Policy,
        options: EngineOptions,
    ) -> None:
        super().__init__(team, flat, buffers, options)
        self.plans = PlanQueue(team.rank, team.world_size, policy)
        self._averager = averager
        self._optimizers = optimizers
        self._applied: AppliedWindow | None = None
        self._expected_weight = 0.0
        self._update_s = 0.0
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

    def settle(self) -> None:
        """Commits what has been applied and not yet committed; all ranks call it together."""
        if self._applied is not None:
            self.flush()

    def exchange_plan(self, *, min_share: int = 0) -> None:
        """Agrees on the plan of the next slice of the epoch; all ranks call it together."""
        draft = self.plans.draft(self.window, min_share=min_share)
        rows = self._meet(Meeting.PLAN, [*draft, self.plans.fingerprint])
        self.plans.compare([row[len(draft)] for row in rows], self.team.parked)
        self.plans.accept(rows[0])

    def exchange_timings(self, own: Sequence[Measurement]) -> list[list[Measurement]]:
        """Gives every rank every rank's timings; all ranks call it together."""
        rows = self._meet(Meeting.PROBE, [len(own), *(x for triple in own for x in triple)])
        return [
            [(int(r[3 * k + 1]), int(r[3 * k + 2]), r[3 * k + 3]) for k in range(int(r[0]))]
            for r in rows
        ]

    def open_share(self, num_micro_batches: int, *, timing: bool = False) -> Share:
        """Starts this rank's part of a window; with ``timing`` it will be dropped."""
        whole_window = num_micro_batches == 1 and self.team.comm.world_size == 1
        scale = None if whole_window and not self.options.loss_scale.is_used else self._scale
        self.share = Share(
            num_micro_batches, scale=scale, slowdown=self.options.slowdown, timing=timing
        )
        return self.share

    def end_micro_batch(self) -> WindowResult | None:
        """Ends a micro-batch; closes the window with the last one of this rank's share."""
        last = self.share.end_micro_batch()
        if self.share.timing:
            return None
        if self.options.stop_requested() and not last:
            return self.close(abandon=True)
        return self.close() if last else None

    def consensus(self) -> AbstractContextManager[None]:
        """Shows the agreed buffers; parameters are equal at all times."""
        return self.buffers.consensus()

    def restored(self) -> None:
        """Takes the buffers as they are for the agreed ones."""
        self.buffers.reset()

    def saved_states(self) -> list[SavedState]:
        """This rank's optimizer states, which are every rank's."""
        return [own_state(optimizer) for optimizer in self._optimizers]

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
        plan = self.plans.pop()
        report = self._report(abandon)
        draft = self.plans.draft(self.window + 1)
        misfit = self.policy.rank_to_park(self.plans.batch_size)
        note = self._note(park=misfit, buffers_changed=self.buffers.changed())
        own = Row(report, draft, note)
        payload = encode_row(report, draft, note, self.team.world_size)
        started_s = time.perf_counter()
        numbers, leaving = self.team.meet(
            Meeting.WINDOW, window=self.window, leaving=report.leaving, payload=payload
        )
        rows = [own if r == self.team.rank else decode_row(n) for r, n in enumerate(numbers)]
        wait_s = time.perf_counter() - started_s
        exchange_s = math.nan
        if self._applied is not None:
            exchange_s = seconds_of_exchange(rows, self.team.parked)
        self._commit(rows)
        self.stopping |= leaving > 0
        if leaving == 2:
            self.drop_share()
            self.plans.drop()
            return None
        self.plans.accept(rows[0].plan)
        reports = [r.report for r in rows]
        refuse_other_work(reports, plan)
        refuse_other_parameters(rows, self.team.parked)
        bad = find_non_finite(reports, plan, self.flat.names, self.progress.steps + 1)
        if bad is not None and not self._may_skip(reports):
            self.flat.zero_()
            raise self.options.loss_scale.exhausted(bad)
        buffers_changed = any(r.note.buffers_changed for r in rows)
        result, sync_s = self._apply(plan, reports, buffers_changed)
        self._applied = AppliedWindow(result, self.plans.lease_of(plan.window), wait_s, sync_s)
        self.policy.observe(reports, plan, exchange_s)
        self.progress = result.progress
        if (misfit := rows[0].note.park) == 0:
            self._warn_of_rank_0()
        elif misfit is not None:
            self._park(misfit)
        elif self.team.parked and self.window >= self._recall_at:
            self.recall(go_on=True)
        return result

    def flush(self) -> None:
        """Commits the last window of an epoch; all ranks call it together."""
        payload = encode_row(WindowReport(), (), self._note(), self.team.world_size)
        self._commit([decode_row(n) for n in self._meet(Meeting.FLUSH, payload)])

    # ── parking ──────────────────────────────────────────────────────────────────────────────

    def recall(self, *, go_on: bool) -> None:
        """Calls parked ranks back with the state of now; all that are not parked call it together.

        Args:
            go_on: The epoch goes on, so new plans are made for the whole team.
        """
        self.flush()
        self.plans.drop()
        leaving = int(self.stopping or self.wants_stop())
        self.stopping |= self.team.recall(self.window, leaving, [float(go_on)]) > 0
        self._rejoined(go_on, receives=False)

    def wait_for_recall(self) -> None:
        """Waits, parked, to be called back, and takes over the state of the others."""
        said, leaving = self.team.wait_for_recall(self.window, int(self.wants_stop()))
        self.stopping |= leaving > 0
        self._rejoined(said[0] > 0, receives=True)

    def _park(self, rank: int) -> None:
        """Goes on without a rank that costs more than it brings; all ranks call it together."""
        speeds = self.policy.solo_speeds(self.plans.batch_size)
        self.flush()
        self.plans.drop()
        self.team.park(rank)
        self._use_team()
        self._recall_at = self.window + PARKED_WINDOWS
        self.options.notice(parked(rank, speeds, PARKED_WINDOWS))
        if not self.team.is_parked:
            self.exchange_plan()
            self.exchange_plan()

    def _warn_of_rank_0(self) -> None:
        if not self._warned_of_rank_0:
            self.options.notice(slow_rank_0(self.policy.solo_speeds(self.plans.batch_size)))
        self._warned_of_rank_0 = True

    def _rejoined(self, go_on: bool, *, receives: bool) -> None:
        cursor = self.plans.cursor
        counters: dict[str, Any] = {
            "progress": asdict(self.progress),
            "expected_weight": self._expected_weight,
            "cursor": cursor.state_dict(),
            "loss_scale": self.options.loss_scale.state_dict(),
        }
        counters = self.options.transfer_state(counters, receives)
        if receives:
            self.progress = Progress(**counters["progress"])
            self._expected_weight = counters["expected_weight"]
            cursor.load_state_dict(counters["cursor"])
            self.options.loss_scale.load_state_dict(counters["loss_scale"])
            self.flat.zero_()
            self.buffers.reset()
        self._use_team()
        if go_on:
            self.exchange_plan(min_share=1)
            self.exchange_plan(min_share=1)

    def _use_team(self) -> None:
        self.policy.set_parked(self.team.parked)
        self._averager.comm = self.team.comm
        self.buffers.comm = self.team.comm

    @property
    def _scale(self) -> float:
        expected = self._expected_weight or float(self.plans.batch_size)
        return power_of_two_near(expected) / self.options.loss_scale.value

    def _meet(self, kind: Meeting, payload: Sequence[float]) -> list[list[float]]:
        rows, leaving = self.team.meet(
            kind, window=self.window, leaving=int(self.wants_stop()), payload=payload
        )
        self.stopping |= leaving > 0
        return rows

    def _note(self, *, park: int | None = None, buffers_changed: bool = False) -> Note:
        wait_s, sync_s = (a.wait_s, a.sync_s) if (a := self._applied) else (0.0, 0.0)
        return Note(
            park=park,
            buffers_changed=buffers_changed,
            wait_s=wait_s,
            sync_s=sync_s,
            trainable=len(self.flat.parameters),
        )

    def _report(self, abandon: bool) -> WindowReport:
        share = self.share
        index = self._averager.gather()
        loss_sum = share.loss_sum
        non_finite = 0 if index is None else index + 1
        if not math.isfinite(loss_sum):
            non_finite = -1
        return WindowReport(
            weight=share.weight,
            loss_sum=loss_sum,
            # The last update is this rank's own work too, and part of what it costs a window.
            compute_s=share.compute_s + self._update_s,
            micro_batches=share.micro_batches,
            samples=share.samples,
            non_finite=non_finite,
            leaving=2 if abandon else int(self.wants_stop()),
        )

    def _apply(
        self, plan: WindowPlan, reports: Sequence[WindowReport], buffers_changed: bool
    ) -> tuple[WindowResult, float]:
        """Averages and updates; returns the result and the seconds of the exchange."""
        total_weight, loss = combine(reports) or (0.0, math.nan)
        what = f"window {plan.window}"
        norm, sync_s = math.nan, 0.0
        skipped = total_weight == 0 or any(r.non_finite for r in reports)
        if not skipped:
            started_s = time.perf_counter()
            norm = self._averager.average(
                self.share.scale, total_weight, what=what, max_norm=self.options.max_grad_norm
            )
            if buffers_changed:
                self.buffers.average(self.share.weight, total_weight, what=what)
            sync_s = time.perf_counter() - started_s
            skipped = self._overflowed(norm, plan)
        elif buffers_changed:
            self.buffers.restore()
        started_s, slow_start = time.perf_counter(), self.options.slowdown.start()
        self.options.before_update(self.progress)
        lr = float(self._optimizers[0].param_groups[0]["lr"])
        if not skipped:
            self._update()
        # Also of a window left out: it may have overflowed because another weight was expected.
        self._expected_weight = total_weight or self._expected_weight
        if total_weight:
            self.options.loss_scale.update(overflowed=skipped)
        self.flat.zero_()
        elapsed_s = time.perf_counter() - started_s
        self._update_s = elapsed_s + self.options.slowdown.after(slow_start)
        result = WindowResult(
            window=plan.window,
            epoch=plan.epoch,
            start=plan.start,
            size=plan.size,
            loss=loss,
            weight=total_weight,
            grad_norm=norm,
            lr=lr,
            skipped=skipped,
            progress=self.progress.after(plan.size, 0.0 if skipped else total_weight, skipped),
            applied_t=time.time(),
            ranks=tuple(RankRecord.of(r) for r in reports),
        )
        return result, sync_s

    def _overflowed(self, norm: float, plan: WindowPlan) -> bool:
        if math.isfinite(norm):
            return False
        if self._may_skip(()):
            return True
        self.flat.zero_()
        raise overflow(plan, self.progress.steps + 1)

    def _may_skip(self, reports: Sequence[WindowReport]) -> bool:
        """Whether what is not finite is to be left out rather than to stop the team."""
        return self.options.non_finite == "skip" or self.options.loss_scale.explains(reports)

    def _update(self) -> None:
        self.flat.mask_untouched()
        for optimizer in self._optimizers:
            optimizer.step()
        self.flat.attach_data()
        if self.options.unlike_devices:
            self._averager.unify(what=f"parameters of window {self.window}")
        self.options.after_update()

    def _commit(self, rows: Sequence[Row]) -> None:
        """All ranks are here, so all have applied the window before: it is committed."""
        if self._applied is None:
            return
        applied, self._applied = self._applied, None
        self.plans.commit(applied.lease)
        if not self.options.on_commit:
            return
        ranks = tuple(
            replace(record, wait_s=row.note.wait_s, sync_s=row.note.sync_s)
            for record, row in zip(applied.result.ranks, rows, strict=True)
        )
        result = replace(applied.result, ranks=ranks)
        # Buffers have moved on with this rank's part of the next window: show the consensus.
        with self.buffers.consensus():
            for callback in self.options.on_commit:
                callback(result)
