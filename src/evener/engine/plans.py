"""The plans that the team has agreed on and not yet computed."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from evener.data.cursor import Cursor, Slice
from evener.engine.results import WindowResult
from evener.errors import ProtocolError, UsageError
from evener.planning.plan import (
    WindowPlan,
    WindowReport,
    decode_plan,
    encode_plan,
    plan_length,
)
from evener.planning.policies import Policy


@dataclass(frozen=True, slots=True)
class AppliedWindow:
    """A window that this rank has applied and that is not known to be committed."""

    result: WindowResult
    lease: Slice | None
    wait_s: float
    sync_s: float


class PlanQueue:
    """Leases slices of the epoch and keeps the agreed plan of each.

    Every rank leases the same slices from its own cursor and drafts a plan; rank 0's draft is the
    one that counts, the others check that it speaks of the slice that they have leased too.
    """

    def __init__(self, rank: int, world_size: int, policy: Policy) -> None:
        self.policy = policy
        self.length = plan_length(world_size)
        self._rank = rank
        self._world_size = world_size
        self._cursor: Cursor | None = None
        self._batch_size = 0
        self._plans: deque[WindowPlan] = deque()
        self._slices: dict[int, Slice] = {}
        self._draft: WindowPlan | None = None

    @property
    def cursor(self) -> Cursor:
        """The cursor of the epoch that was begun."""
        assert self._cursor is not None
        return self._cursor

    @property
    def batch_size(self) -> int:
        """Samples of a window."""
        return self._batch_size

    def begin(self, cursor: Cursor, batch_size: int) -> None:
        """Starts (or goes on with) the cursor's epoch; drops what was leased and not committed."""
        self._cursor, self._batch_size = cursor, batch_size
        self.drop()

    def drop(self) -> None:
        """Forgets all plans and gives their slices back."""
        self._plans.clear()
        self._slices.clear()
        if self._cursor is not None:
            self._cursor.release()

    def peek(self, ahead: int = 0) -> WindowPlan | None:
        """The plan of the next window, or of the one ``ahead`` after it, if there is one."""
        return self._plans[ahead] if len(self._plans) > ahead else None

    def pop(self) -> WindowPlan:
        """Takes the plan of the window that is being closed."""
        return self._plans.popleft()

    def draft(self, window: int, *, work_for_all: float = 0.0) -> list[float]:
        """Leases the slice after the last planned one and drafts its plan.

        Args:
            window: Number of the first window that is not planned, less the plans in the queue.
            work_for_all: See ``Policy.plan``.

        Returns:
            The encoded plan, or an encoded "none" at the end of the epoch; nothing with one rank.
        """
        piece = self.cursor.take(self._batch_size)
        number = window + len(self._plans)
        self._draft = None
        if piece is not None:
            self._slices[number] = piece
            self._draft = self.policy.plan(
                number, piece.epoch, piece.start, piece.size, work_for_all=work_for_all
            )
        # With one rank there is nobody to tell.
        return encode_plan(self._draft, self._world_size) if self._world_size > 1 else []

    def accept(self, floats: Sequence[float]) -> None:
        """Queues rank 0's plan for the slice that was drafted last.

        Raises:
            UsageError: Rank 0 is at another place of the data.
        """
        if self._rank == 0:
            agreed = self._draft  # it is the one that planned
        else:
            agreed = decode_plan(floats[: self.length], self._world_size)
        if _place(agreed) != _place(self._draft):
            raise UsageError(
                f"rank 0 plans (window, epoch, start, size) {_place(agreed)}, rank {self._rank} is "
                f"at {_place(self._draft)}; every rank must use the same data set size, batch_size "
                "and seed, and resume from the same checkpoint"
            )
        if agreed is not None:
            self._plans.append(agreed)

    def lease_of(self, window: int) -> Slice:
        """Hands out the lease of a window that has been applied."""
        return self._slices.pop(window)

    def commit(self, lease: Slice) -> None:
        """Tells the cursor that a window is committed."""
        self.cursor.commit(lease)


def refuse_other_work(reports: Sequence[WindowReport], plan: WindowPlan) -> None:
    """Checks that every rank has computed just what was planned.

    Raises:
        ProtocolError: A rank did more or less: samples would be lost or seen twice.
    """
    for rank, (report, share) in enumerate(zip(reports, plan.shares, strict=True)):
        if report.samples != share:
            raise ProtocolError(
                f"rank {rank} computed {report.samples} samples of window {plan.window}, planned "
                f"were {share}; ranks run different code, or this is a bug of evener"
            )


def _place(plan: WindowPlan | None) -> tuple[int, int, int, int] | None:
    return None if plan is None else (plan.window, plan.epoch, plan.start, plan.size)
