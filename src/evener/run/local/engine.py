"""Runs windows of local optimizer steps on one rank: CADENCE, and ASYNC."""

import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import final

from evener.averaging.buffers import BufferAverager
from evener.averaging.parameters import ParameterAverager
from evener.averaging.weights import power_of_two_near
from evener.cadence.cadence import CadencePolicy
from evener.cadence.local import (
    LOCAL_REPORT_LENGTH,
    LocalPlan,
    LocalReport,
    decode_local_report,
    encode_local_report,
)
from evener.comm.flat import FlatBuffers
from evener.data.cursor import Cursor, Slice, derive_seed
from evener.data.leases import LeaseBook
from evener.errors import UsageError
from evener.run.local.exchanging import BackgroundExchanger, Exchanger, InlineExchanger
from evener.run.local.results import AppliedWindow, completed, progress_after, result_of
from evener.run.local.steps import LocalSteps, Work
from evener.run.local.update import LocalUpdate
from evener.run.local.window import Outcome, WindowExchange
from evener.run.team.team import Meeting, Team
from evener.run.windows.base import Engine, EngineOptions
from evener.run.windows.finite import PARAMETERS, find_local_non_finite, overflow
from evener.run.windows.moments import SavedState, mean_states
from evener.run.windows.results import WindowResult
from evener.run.windows.schedule import Schedule
from evener.run.windows.share import Share


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
        flat: The trainable parameters, made for one rank.
        parameters: Keeps their consensus.
        buffers: Keeps that of buffers.
        update: Makes local steps.
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
        flat: FlatBuffers,
        parameters: ParameterAverager,
        buffers: BufferAverager,
        update: LocalUpdate,
        schedule: Schedule,
        policy: CadencePolicy,
        options: EngineOptions,
        background: Team | None = None,
        avoid_ones: bool = False,
    ) -> None:
        super().__init__(team, flat, buffers, options)
        self.limit: int | None = None
        self._policy = policy
        self._avoid_ones = avoid_ones
        self._parameters = parameters
        self._update = update
        self._schedule = schedule
        self._background = background
        self._plans = WindowExchange(self.team, parameters, buffers, policy)
        self._windows = self._plans
        self._exchanger: Exchanger[Outcome] = InlineExchanger()
        if background is not None:
            self._windows = WindowExchange(background, parameters, buffers, policy)
            self._exchanger = BackgroundExchanger(f"average-{team.rank}")
        skip = options.non_finite == "skip"
        self._steps = LocalSteps(team.rank, update, schedule, options.slowdown, skip=skip)
        self._book: LeaseBook | None = None
        self._own: deque[Slice] = deque()
        self._plan: LocalPlan | None = None
        self._in_flight: LocalPlan | None = None
        self._applied: AppliedWindow | None = None
        self._spent_s = 0.0
        self._epoch_done = self._winding_down = self._stopped = False
        self._recent_weight = 0.0
        self._saved: tuple[int, list[SavedState]] | None = None

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
        return self._epoch_done or self._stopped or self._steps_left == 0

    def wants_stop(self) -> bool:
        """Whether this rank was told to stop, or the team has agreed to outside of a window."""
        return self.stopping or super().wants_stop()

    # ── an epoch ─────────────────────────────────────────────────────────────────────────────

    def begin(self, cursor: Cursor, batch_size: int) -> None:
        """Starts or goes on with the cursor's epoch; all ranks call it together.

        Local steps of a loop that was left before its window closed are dropped.
        """
        self.settle()
        self.drop_unaveraged()
        self._book = LeaseBook(
            cursor, batch_size, self.team.world_size, avoid_ones=self._avoid_ones
        )
        self._epoch_done = False

    def drop_unaveraged(self) -> None:
        """Goes back to the consensus if this rank has made steps that no window has closed."""
        if self._steps.next_window(0).steps:
            self._parameters.restore()
            self.buffers.restore()
            self._schedule.agree(self.progress, 0)
        self.flat.zero_()

    def exchange_plan(self) -> None:
        """Agrees on the first window of the epoch; all ranks call it together."""
        book, cursor = self._leases, self._leases.cursor
        own = float(derive_seed(cursor.seed, cursor.num_samples, book.batch_size) % 2**53)
        plan, others, leaving = self._plans.first_plan(
            book, self.window, self._steps_left, own, int(self.wants_stop())
        )
        for rank, other in enumerate(others):
            if other != own:
                raise UsageError(
                    f"rank {rank} has another seed, data set size or batch_size than rank "
                    f"{self.team.rank} (seed {cursor.seed}, {cursor.num_samples} samples, "
                    f"batch_size {book.batch_size}); give every rank the same"
                )
        self._stop_if(leaving)
        self._follow(plan)

    def take(self) -> Slice | None:
        """The next batch of this rank's queue; ``None`` when ``advance`` is due."""
        return self._own.popleft() if not self.finished and self._may_go_on() else None

    def upcoming(self, count: int) -> list[Slice]:
        """The batches after it, to be fetched ahead."""
        return [self._own[i] for i in range(min(count, len(self._own)))]

    def advance(self) -> WindowResult | None:
        """Lands what has landed, and closes the window when it is over.

        Returns:
            The last window that was applied in this call.
        """
        result = None
        while True:
            if self._in_flight is not None:
                if self._may_go_on() and not self._exchanger.ready:
                    return result
                result = self._land() or result
            elif self.finished or self._may_go_on():
                return result
            else:
                self._start()

    def settle(self) -> None:
        """Commits what has been applied and not yet committed; all ranks call it together."""
        if self._in_flight is not None:
            self._land()
        if self._applied is not None:
            self.flush()

    def flush(self) -> None:
        """Commits the last window of an epoch; all ranks call it together."""
        payload = encode_local_report(self._report(Work(), 0, changed=False))
        rows, leaving = self.team.meet(
            Meeting.FLUSH, window=self.window, leaving=int(self.wants_stop()), payload=payload
        )
        self._stop_if(leaving > 0)
        self._commit([decode_local_report(r[:LOCAL_REPORT_LENGTH]) for r in rows])
        if self.finished:
            self.drop_unaveraged()

    # ── a local step ─────────────────────────────────────────────────────────────────────────

    def open_share(self, num_micro_batches: int, *, timing: bool = False) -> Share:
        """Starts a local step."""
        weight = self._steps.batch_weight or float(self._book.batch_size if self._book else 1)
        scale = None if num_micro_batches == 1 else power_of_two_near(weight)
        self.share = Share(
            num_micro_batches, scale=scale, slowdown=self.options.slowdown, timing=timing
        )
        return self.share

    def end_micro_batch(self) -> WindowResult | None:
        """Ends a micro-batch; with the last one of a batch, steps, and closes the window if due."""
        if not self.share.end_micro_batch() or self.share.timing:
            return None
        assert self._plan is not None
        self._parameters.adopt()
        self._steps.finish(
            self.share, self._plan, self._in_flight, self.progress, self._leases.batch_size
        )
        return self.advance()

    # ── closing a window ─────────────────────────────────────────────────────────────────────

    def _may_go_on(self) -> bool:
        """Whether this rank may start a local step now."""
        if not self._own or self._winding_down or self.wants_stop():
            return False
        if self._steps.work.non_finite or (self._in_flight and self._in_flight.blocking):
            return False
        return self._steps.clock.wants_another(time.perf_counter())

    def _start(self) -> None:
        """Takes the snapshot of a window that is over, and begins its exchange."""
        assert self._plan is not None
        started_s, plan = time.perf_counter(), self._plan
        self.flat.attach_grads()  # parameters thawed on this rank, which had no step since
        self._parameters.adopt()
        drift = self._parameters.snapshot()
        changed, packed = self.buffers.changed(), self.buffers.snapshot()
        work = self._steps.next_window(plan.most[self.team.rank])
        code = work.non_finite or (0 if math.isfinite(drift) else PARAMETERS)
        report = self._report(work, code, changed=changed)
        self._exchanger.start(
            partial(self._windows.run, plan, report, packed, self._leases, self._steps_left)
        )
        self._in_flight = plan
        self._spent_s = time.perf_counter() - started_s
        self._steps.resume_clock()

    def _land(self) -> WindowResult | None:
        """Takes over what the exchange came to; waits for it where it has not ended."""
        started_s = time.perf_counter()
        self._in_flight = None  # whatever comes of it
        outcome = self._exchanger.wait()
        waited_s = time.perf_counter() - started_s
        plan = outcome.plan
        self._commit(outcome.reports)
        bad = find_local_non_finite(outcome.reports, plan, self.flat.names)
        if bad is not None or outcome.next_plan is None:
            self.flat.zero_()
            raise bad or AssertionError("a window without a plan after it")
        applying_s = time.perf_counter()
        result = None
        if outcome.num_steps:
            divergence = self._apply(outcome)
            self.progress = progress_after(self.progress, outcome)
            self._schedule.agree(self.progress, outcome.num_steps - outcome.num_skipped)
            result = result_of(outcome, self.progress, self._update.lr)
            spent_s = self._spent_s + waited_s + time.perf_counter() - applying_s
            wait_s = outcome.wait_s if self._background is None else waited_s
            self._applied = AppliedWindow(
                result,
                tuple(piece for queue in outcome.retired for piece in queue),
                wait_s=wait_s,
                sync_s=max(0.0, spent_s - wait_s),
                divergence=divergence,
                stale_steps=self._steps.work.steps,
            )
        if outcome.leaving or self._winding_down:
            # Steps that were made meanwhile are averaged by one more window, at which all wait.
            self._winding_down = not plan.blocking
            self._stop_if(plan.blocking)
        self._follow(outcome.next_plan)
        return result

    def _apply(self, outcome: Outcome) -> float:
        """Moves the consensus on, and this rank with it; returns how far it was from it."""
        moved_on = self._steps.work.steps > 0
        if outcome.weight == 0:
            if not moved_on:
                self.buffers.restore()
            return 0.0
        divergence = self._parameters.agree(moved_on=moved_on)
        if not math.isfinite(divergence):
            raise overflow(outcome.plan, self.progress.steps + 1)
        if outcome.differences is not None:
            self.buffers.agree(outcome.differences, moved_on=moved_on)
        if made := outcome.num_steps - outcome.num_skipped:
            self._steps.mean_weight = outcome.weight / made
        # Recent work counts, as it does in the moments; one window alone may have had none.
        self._recent_weight *= 0.5
        self._recent_weight += outcome.reports[self.team.rank].weight
        return divergence

    def _follow(self, plan: LocalPlan) -> None:
        """Goes on by a plan; what this rank has already done of it counts."""
        rank = self.team.rank
        self._plan = plan
        self._own = deque(self._leases.queue(rank)[self._steps.work.steps :])
        self._epoch_done = self._leases.num_left == 0
        self._steps.clock.limit(plan.most[rank], time.perf_counter() + plan.window_s)
        self._steps.resume_clock()

    def _commit(self, reports: Sequence[LocalReport]) -> None:
        """All ranks are here, so all have applied the window before: it is committed."""
        if self._applied is None:
            return
        applied, self._applied = self._applied, None
        for piece in applied.leases:
            self._leases.cursor.commit(piece)
        result = completed(applied.result, reports)
        with self.consensus() if self.options.on_commit else nullcontext():
            for callback in self.options.on_commit:
                callback(result)

    def _report(self, work: Work, code: int, *, changed: bool) -> LocalReport:
        """This rank's row about its window, and about the one before, which it now knows."""
        last = self._applied
        return LocalReport(
            weight=work.weight,
            loss_sum=work.loss_sum,
            compute_s=work.compute_s,
            busy_s=work.busy_s,
            micro_batches=work.micro_batches,
            samples=work.samples,
            steps=work.steps,
            skipped=work.skipped,
            non_finite=code,
            leaving=int(self.wants_stop()),
            buffers_changed=int(changed),
            divergence=last.divergence if last else 0.0,
            wait_s=last.wait_s if last else 0.0,
            sync_s=last.sync_s if last else 0.0,
            stale_steps=last.stale_steps if last else 0,
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
        return self._shown()

    @contextmanager
    def _shown(self) -> Iterator[None]:
        with self._parameters.shown(), self.buffers.consensus():
            yield

    def restored(self) -> None:
        """Takes the model as it is for the consensus."""
        self._parameters.reset()
        self.buffers.reset()

    def prepare_save(self) -> None:
        """Forms the weighted mean of optimizer states; all ranks call it together."""
        if self._saved is None or self._saved[0] != self.window:
            with self._schedule.as_agreed():
                states = mean_states(self.team.comm, self._update.optimizers, self._recent_weight)
            self._saved = (self.window, states)

    def saved_states(self) -> list[SavedState]:
        """Rank 0's means, of the last ``prepare_save``."""
        assert self._saved is not None, "prepare_save comes first"
        return self._saved[1]

    def close_down(self) -> None:
        """Lets an exchange that is under way end; idempotent."""
        self._exchanger.close()
        if self._background is not None:
            self._background.comm.close()
