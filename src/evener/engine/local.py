"""Runs windows of local optimizer steps on one rank: CADENCE, and ASYNC."""

import math
import time
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import islice
from typing import final

from evener.averaging.weights import power_of_two_near
from evener.data.cursor import Cursor, Slice
from evener.data.leases import LeaseBook
from evener.engine.engine import Engine, EngineOptions
from evener.engine.finite import PARAMETERS, find_local_non_finite, overflow
from evener.engine.flight import Flight
from evener.engine.local_results import (
    AppliedWindow,
    applied_of,
    completed,
    progress_after,
    report_of,
    result_of,
)
from evener.engine.local_window import Outcome
from evener.engine.moments import RecentMoments, SavedState
from evener.engine.replica import Replica
from evener.engine.results import WindowResult
from evener.engine.schedule import Schedule, digest_of
from evener.engine.share import Share
from evener.engine.steps import LocalSteps
from evener.engine.team import Meeting, Team
from evener.planning.cadence import CadencePolicy
from evener.planning.local import LocalPlan, LocalReport, decode_local_reports, encode_local_report


@final
class LocalEngine(Engine):
    """The protocol of a window of local steps, seen from one rank.

    A rank takes batches from the front of its queue and steps its own optimizer on each, until its
    clock says that the window is over. Then it takes a *snapshot* of how far it has moved from the
    consensus, and the ranks exchange reports, differences and the next plan. When that has *landed*
    the consensus moves on, and the working copy with it. In CADENCE a rank waits for it; in ASYNC
    it goes on with the next window, whose deadline runs from the landing.

    Args:
        team: The ranks.
        replica: The model's working copy, and the consensus.
        steps: Makes local steps.
        schedule: Sets learning rates.
        policy: Plans; rank 0's word counts.
        options: What the engine is told.
        background: For ASYNC: the same ranks once more, for the thread that exchanges.
        avoid_ones: Make no batch of a single sample; see ``LeaseBook``.

    Attributes:
        limit: Optimizer steps after which the run ends; ``None`` for no limit.
    """

    def __init__(
        self,
        *,
        team: Team,
        replica: Replica,
        steps: LocalSteps,
        schedule: Schedule,
        policy: CadencePolicy,
        options: EngineOptions,
        background: Team | None = None,
        avoid_ones: bool = False,
    ) -> None:
        super().__init__(team, replica.flat, replica.buffers, options)
        self.limit: int | None = None
        self._policy = policy
        self._avoid_ones = avoid_ones
        self._replica = replica
        self._steps = steps
        self._schedule = schedule
        self._flight = Flight(self.team, background, replica, policy, schedule)
        self._scale = options.loss_scale
        self._book: LeaseBook | None = None
        self._own: deque[Slice] = deque()
        self._plan: LocalPlan | None = None
        self._applied: AppliedWindow | None = None
        self._spent_s = 0.0
        self._epoch_done = self._winding_down = self._at_rest = self._stopped = False
        self._in_batch = self._leaving = False
        self._moments = RecentMoments(team.comm, steps.optimizers, schedule)

    @property
    def policy(self) -> CadencePolicy:
        """Who does how much; rank 0's word counts."""
        return self._policy

    @property
    def turns(self) -> int:
        """Optimizer steps of all ranks, those left out included."""
        return self.progress.steps + self.progress.skipped

    @property
    def finished(self) -> bool:
        """Whether the epoch, or the run, has nothing left to do."""
        return self._epoch_done or self._at_rest or self._stopped or self._steps_left == 0

    def wants_stop(self) -> bool:
        """Whether this rank was told to stop, or the team has agreed to outside of a window."""
        return self.stopping or super().wants_stop()

    # ── an epoch ─────────────────────────────────────────────────────────────────────────────

    def begin(self, cursor: Cursor, batch_size: int) -> None:
        """Starts or goes on with the cursor's epoch; all ranks call it together."""
        self.settle()
        if self._steps.next_window(0).steps:  # an error has kept them from being averaged
            self._replica.restore()
        self.flat.zero_()
        self._schedule.accept()
        self._schedule.agree(self.progress, 0)
        self._plan = None
        self._book = LeaseBook(
            cursor, batch_size, self.team.world_size, avoid_ones=self._avoid_ones
        )
        self._epoch_done = self._at_rest = False

    def leave(self) -> None:
        """Leaves an epoch in its middle; the others learn of it in ``settle``.

        A batch that has not come to its step is dropped, and will be handed out again.
        """
        self.left = self._plan is not None
        if self._in_batch:
            self.drop_share()

    def drop_share(self) -> None:
        """Throws away what the open batch has accumulated, in gradients and buffers."""
        self._in_batch = False
        self.flat.zero_()
        self.buffers.rewind()
        self._steps.resume_clock()

    def exchange_plan(self) -> None:
        """Agrees on the first window of the epoch; all ranks call it together."""
        plan, leaving = self._flight.before.first_plan(
            self._leases, self.window, self._steps_left, int(self.wants_stop())
        )
        self._stop_if(leaving)
        self._follow(plan)

    def take(self) -> Slice | None:
        """The next batch of this rank's queue; ``None`` when ``advance`` is due."""
        return self._own.popleft() if not self.finished and self._may_go_on() else None

    def upcoming(self, count: int) -> list[Slice]:
        """The batches after it, to be fetched ahead."""
        return list(islice(self._own, count))

    def advance(self) -> WindowResult | None:
        """Lands what has landed, and closes the window when it is over.

        Returns:
            The last window that was applied in this call.
        """
        result = None
        while True:
            if self._flight.plan is not None:
                if self._may_go_on() and not self._flight.ready:
                    return result
                result = self._land() or result
            elif self.finished or self._may_go_on():
                return result
            else:
                self._start()

    def settle(self) -> None:
        """Commits what has been applied and not yet committed; all ranks call it together.

        Steps of a loop that was left by ``break`` are averaged first. The ranks need not have left
        it at the same window: who has goes along until all have, and who has not is led out of the
        epoch. Then all are at one consensus.
        """
        while (self.left and not self.finished) or self._some_are_in_flight():
            if self._flight.plan is None:
                self._start()
            self._land()
        if self.left or self._applied is not None:
            self.flush()
        self.left = False

    def _some_are_in_flight(self) -> bool:
        """Whether a rank has begun an exchange that has not landed; all ranks call it together."""
        own = self._flight.plan is not None
        if self._replica.is_shown or self.left or self._plan is None or not self.in_epoch:
            return own  # in a commit, or outside of a loop: all know the same
        rows, _ = self.team.meet(Meeting.FLUSH, window=self.window, payload=[float(own)])
        return any(row[0] for row in rows)

    def flush(self) -> None:
        """Commits the last window of an epoch; all ranks call it together."""
        if self._plan is None:  # all have met an error, and nothing is left to commit
            return
        payload = encode_local_report(self._report(LocalReport(), 0, changed=False))
        rows, leaving = self.team.meet(
            Meeting.FLUSH, window=self.window, leaving=int(self.wants_stop()), payload=payload
        )
        self._stop_if(leaving > 0)
        self.verify()
        self._commit(decode_local_reports(rows))

    # ── a local step ─────────────────────────────────────────────────────────────────────────

    def open_share(self, num_micro_batches: int) -> Share:
        """Starts a local step."""
        weight = self._steps.batch_weight or float(self._book.batch_size if self._book else 1)
        scale = None
        if num_micro_batches > 1 or self._scale.own:
            scale = power_of_two_near(weight) / (self._scale.own or 1.0)
        self.buffers.keep()
        self._in_batch = True
        self.share = Share(
            num_micro_batches,
            scale=scale,
            slowdown=self.options.slowdown,
            known_sizes=self.known_sizes,
        )
        return self.share

    def end_micro_batch(self) -> WindowResult | None:
        """Ends a micro-batch; with the last one of a batch, steps, and closes the window if due."""
        if self._plan is None or not self.in_epoch:
            raise self._needs_plans()
        if not self.share.end_micro_batch():
            return None
        self._in_batch = False
        self._replica.parameters.adopt()
        if not self._steps.finish(
            self.share, self._flight.plan, self.progress, self._leases.batch_size
        ):
            self.buffers.rewind()
            for tell in self.options.on_left_out:
                tell(self.share.micro_batches)
        return self.advance()

    # ── closing a window ─────────────────────────────────────────────────────────────────────

    def _may_go_on(self) -> bool:
        """Whether this rank may start a local step now."""
        if not self._own or self._winding_down or self.wants_stop():
            return False
        in_flight = self._flight.plan
        if in_flight is not None and in_flight.blocking:
            return False
        return self._steps.wants_another()

    def _start(self) -> None:
        """Takes the snapshot of a window that is over, and begins its exchange."""
        assert self._plan is not None
        started_s, plan = time.perf_counter(), self._plan
        taken = self._replica.snapshot()
        work = self._steps.next_window(plan.most[self.team.rank])
        code = work.non_finite or (0 if math.isfinite(taken.drift) else PARAMETERS)
        report = self._report(work, code, changed=taken.changed)
        self._flight.start(plan, report, taken, self._leases, self._steps_left)
        self._spent_s = time.perf_counter() - started_s
        self._steps.resume_clock()

    def _land(self) -> WindowResult | None:
        """Takes over what the exchange came to; waits for it where it has not ended."""
        try:
            outcome, took_s, wait_s = self._flight.land()
        except BaseException:
            self._plan, self.left = None, False  # nothing can be agreed on any more
            raise
        self._commit(outcome.reports)
        bad = find_local_non_finite(outcome.reports, outcome.plan, self.flat.names)
        self.limits.learn([report.limit for report in outcome.reports])
        self._scale.agree(outcome.reports)
        if bad is not None or outcome.next_plan is None:
            self._give_up()
            assert bad is not None, "a window without a plan after it"
            raise self.options.loss_scale.exhausted(bad, outcome.reports[bad.rank].loss_scale)
        applying_s = time.perf_counter()
        result = None
        if outcome.num_steps:
            divergence = self._apply(outcome)
            self.progress = progress_after(self.progress, outcome)
            self._schedule.agree(self.progress, outcome.num_steps - outcome.num_skipped)
            result = result_of(outcome, self.progress, self._steps.lr)
            spent_s = self._spent_s + took_s + time.perf_counter() - applying_s
            stale = self._steps.num_done
            self._applied = applied_of(outcome, result, wait_s, spent_s, divergence, stale)
        self._follow(outcome.next_plan)
        self._leaving = self._leaving or outcome.leaving
        if self._leaving or outcome.left or self._winding_down:
            self._wind_down(blocking=outcome.plan.blocking)
        return result

    def _wind_down(self, *, blocking: bool) -> None:
        """Ends the epoch early: somebody stops, or has left it."""
        # Steps that were made meanwhile are averaged by one more window, at which all wait.
        self._winding_down = not blocking
        if not blocking:
            return
        self._stop_if(self._leaving)
        if not self.finished and not self.left:
            self.left = self.others_left = True
        self._at_rest = True

    def _give_up(self) -> None:
        """Drops the epoch, and what this rank has done since the consensus."""
        self._steps.next_window(0)
        self._replica.restore()
        self._plan, self._winding_down, self._at_rest = None, False, True

    def _apply(self, outcome: Outcome) -> float:
        """Moves the consensus on, and this rank with it; returns how far it was from it."""
        moved_on = self._steps.num_done > 0
        divergence = self._replica.agree(outcome.weight, outcome.differences, moved_on=moved_on)
        if not math.isfinite(divergence):
            raise overflow(outcome.plan, self.progress.steps + 1)
        if outcome.weight == 0:
            return divergence
        self._moments.add(outcome.reports[self.team.rank].weight)
        return divergence

    def _follow(self, plan: LocalPlan) -> None:
        """Goes on by a plan; what this rank has already done of it counts."""
        self._plan = plan
        done = self._steps.num_done + self._in_batch  # a batch that is open is not to come again
        self._own = deque(self._leases.queue(self.team.rank)[done:])
        self._epoch_done = self._leases.num_left == 0
        self._steps.follow(plan)

    def _commit(self, reports: Sequence[LocalReport]) -> None:
        """All ranks are here, so all have applied the window before: it is committed."""
        if self._applied is None:
            return
        applied, self._applied = self._applied, None
        for piece in applied.leases:
            self._leases.cursor.commit(piece)
        if not self.options.on_commit:
            return
        result = completed(applied.result, reports)
        self._schedule.refuse_setting_by_hand()
        with self.consensus():
            self.tell_committed(result)
        self._schedule.accept()  # set in a callback, which runs on every rank for every window

    def _report(self, work: LocalReport, code: int, *, changed: bool) -> LocalReport:
        """This rank's row about its window, and about the one before, which it now knows."""
        return replace(
            report_of(work, self._applied),
            non_finite=code,
            leaving=int(self.wants_stop()),
            left=int(self.left),
            buffers_changed=int(changed),
            loss_scale=self._scale.own,
            limit=self.limits.own,
            rates=digest_of(self._schedule.agreed_rates),
        )

    def _stop_if(self, agreed: bool) -> None:
        if agreed:
            self.stopping = self._stopped = True

    @property
    def _leases(self) -> LeaseBook:
        assert self._book is not None, "no epoch was begun"
        return self._book

    @property
    def _steps_left(self) -> int | None:
        return None if self.limit is None else max(0, self.limit - self.turns)

    # ── state ────────────────────────────────────────────────────────────────────────────────

    def consensus(self) -> AbstractContextManager[None]:
        """Shows the consensus in the model, parameters and buffers."""
        return self._replica.shown()

    def restored(self) -> None:
        """Takes the model as it is for the consensus."""
        self._replica.reset()
        self._scale.reset()

    def prepare_save(self) -> None:
        """Forms the weighted mean of optimizer states; all ranks call it together."""
        self._moments.form(self.window)

    def saved_states(self) -> list[SavedState]:
        """Rank 0's means, of the last ``prepare_save``."""
        return self._moments.states

    def hurry(self, timeout_s: float) -> None:
        """Shortens the deadlines of exchanges, also of one that is under way."""
        super().hurry(timeout_s)
        self._flight.hurry(timeout_s)

    def close_down(self) -> None:
        """Ends an exchange that is under way, without waiting for anybody; idempotent."""
        self._flight.close()
