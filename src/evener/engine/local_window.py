"""What ranks exchange at the end of a window of local steps: reports, differences, a plan."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from torch import Tensor

from evener.averaging.weights import combine
from evener.data.cursor import Slice
from evener.data.leases import LeaseBook
from evener.engine.membership import ActiveTeam
from evener.engine.replica import Replica
from evener.engine.same_data import DATA_LENGTH, data_row, refuse_other_data
from evener.engine.schedule import Schedule, agree_on_rates
from evener.engine.team import Meeting, Team
from evener.planning.cadence import CadencePolicy
from evener.planning.local import (
    LOCAL_REPORT_LENGTH,
    LocalPlan,
    LocalReport,
    decode_local_plan,
    decode_local_reports,
    encode_local_plan,
    encode_local_report,
    local_plan_length,
)


def local_payload_length(world_size: int) -> int:
    """Length of the longest row: a report, or a plan and what the rank says of its data."""
    return max(LOCAL_REPORT_LENGTH, local_plan_length(world_size) + DATA_LENGTH)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What an exchange came to; the same on every rank but for the wait.

    Attributes:
        plan: The plan of the window.
        reports: By rank.
        leaving: Whether somebody wants to stop.
        left: Whether somebody has left the loop over the epoch.
        next_plan: The plan of the next window; ``None`` when something was not finite.
        retired: What each rank has done, in the order of its queue.
        weight: Of the whole window.
        loss: Mean loss; ``nan`` without weight.
        differences: The exchanged buffers, where a rank has changed any.
        wait_s: Seconds that this rank waited for the others.
    """

    plan: LocalPlan
    reports: tuple[LocalReport, ...]
    leaving: bool
    left: bool
    next_plan: LocalPlan | None
    retired: tuple[tuple[Slice, ...], ...]
    weight: float
    loss: float
    differences: Tensor | None
    wait_s: float

    @property
    def num_steps(self) -> int:
        """Local steps of all ranks, those left out included."""
        total = 0
        for report in self.reports:
            total += report.steps
        return total

    @property
    def num_skipped(self) -> int:
        """How many of these were left out."""
        total = 0
        for report in self.reports:
            total += report.skipped
        return total


@final
class WindowExchange:
    """The exchange that closes a window, over whatever joins the ranks.

    It touches only scratch buffers, the lease book and the planner, so it may run in a thread while
    the rank goes on with local steps.
    """

    def __init__(
        self,
        wire: ActiveTeam | Team,
        replica: Replica,
        policy: CadencePolicy,
        schedule: Schedule,
    ) -> None:
        self._schedule = schedule
        self._wire = wire
        self._replica = replica
        self._parameters = replica.parameters
        self._buffers = replica.buffers
        self._policy = policy

    def first_plan(
        self, book: LeaseBook, window: int, limit: int | None, leaving: int
    ) -> tuple[LocalPlan, bool]:
        """Agrees on the first plan of an epoch; all ranks call it together.

        Args:
            book: Who holds which batches.
            window: Number of the window.
            limit: Local steps that the run may do; ``None`` for any number.
            leaving: Whether this rank wants to stop.

        Returns:
            The plan, and whether somebody wants to stop.

        Raises:
            UsageError: Ranks train on different data.
        """
        draft = self._policy.plan(window, book.cursor.epoch, left=book.num_left, limit=limit)
        row = encode_local_plan(draft)
        own = data_row(book.cursor, book.batch_size)
        rows, anyone = self._wire.meet(
            Meeting.PLAN, window=window, leaving=leaving, payload=[*row, *own]
        )
        plan = decode_local_plan(rows[0][: len(row)], self._wire.world_size)
        stop = len(row) + DATA_LENGTH
        refuse_other_data(
            self._wire.rank, {r: other[len(row) : stop] for r, other in enumerate(rows)}
        )
        book.fill(plan.queues)
        return plan, anyone > 0

    def run(
        self,
        plan: LocalPlan,
        report: LocalReport,
        packed: Tensor,
        book: LeaseBook,
        limit: int | None,
    ) -> Outcome:
        """Exchanges a window; all ranks call it together.

        Args:
            plan: The window's.
            report: This rank's.
            packed: Its snapshot of buffers.
            book: Who holds which batches.
            limit: Local steps that the run may do, this window included; ``None`` for any number.

        Raises:
            UsageError: Learning rates differ between ranks.
            ReplicasDifferError: So does the consensus.
        """
        started_s = time.perf_counter()
        rows, anyone = self._wire.meet(
            Meeting.WINDOW,
            window=plan.window,
            leaving=report.leaving,
            payload=encode_local_report(report),
        )
        wait_s = time.perf_counter() - started_s
        reports = decode_local_reports(rows)
        if len({report.rates for report in reports}) > 1:
            told = self._wire.introduce({"rates": self._schedule.agreed_rates})
            agree_on_rates({rank: other["rates"] for rank, other in enumerate(told)})
        self._replica.verify(self._wire.comm, plan.window)
        weight, loss = combine(reports) or (0.0, float("nan"))
        left = any(report.left for report in reports)
        retired: tuple[tuple[Slice, ...], ...] = ()
        next_plan = differences = None
        if not any(r.non_finite for r in reports):
            differences = self._average(plan, reports, weight, packed)
            retired = tuple(
                tuple(book.retire(rank, r.steps, r.samples)) for rank, r in enumerate(reports)
            )
            next_plan = self._plan_next(plan, reports, book, limit, stop=left or anyone > 0)
        return Outcome(
            plan=plan,
            reports=reports,
            leaving=anyone > 0,
            left=left,
            next_plan=next_plan,
            retired=retired,
            weight=weight,
            loss=loss,
            differences=differences,
            wait_s=wait_s,
        )

    def _average(
        self, plan: LocalPlan, reports: Sequence[LocalReport], weight: float, packed: Tensor
    ) -> Tensor | None:
        if weight == 0:
            return None
        what = f"window {plan.window}"
        own = reports[self._wire.rank].weight
        self._parameters.exchange(self._wire.comm, own, weight, what=what)
        if not any(r.buffers_changed for r in reports):
            return None
        self._buffers.exchange(packed, self._wire.comm, own, weight, what=what)
        return packed

    def _plan_next(
        self,
        plan: LocalPlan,
        reports: Sequence[LocalReport],
        book: LeaseBook,
        limit: int | None,
        *,
        stop: bool,
    ) -> LocalPlan:
        """Rank 0 plans with what it has just heard, and all follow.

        A round of its own: a window of local steps is long, and a fresh plan is worth the
        millisecond.
        """
        row: list[float] = []
        if self._wire.rank == 0:
            self._policy.observe(reports, _sync_s(reports))
            done = sum(r.steps for r in reports)
            draft = self._policy.plan(
                plan.window + (done > 0),
                plan.epoch,
                left=book.num_left,
                limit=None if limit is None else limit - done,
                stop=stop,
            )
            row = encode_local_plan(draft)
        rows, _ = self._wire.meet(Meeting.PLAN, window=plan.window, payload=row)
        length = local_plan_length(self._wire.world_size)
        agreed = decode_local_plan(rows[0][:length], self._wire.world_size)
        # Who has gone on may have begun what would be handed on; at the tail nobody has.
        at_tail = book.num_free == 0
        book.fill(agreed.queues, hand_on=plan.blocking and at_tail)
        return agreed


def _sync_s(reports: Sequence[LocalReport]) -> float:
    """What averaging cost in the window before: the last one's wait, and the work of it."""
    return min(r.wait_s for r in reports) + max(r.sync_s for r in reports)
