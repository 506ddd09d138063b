"""Plans of SYNC: made two windows ahead by one rank, and drawn from slices that all lease."""

from collections.abc import Mapping
from typing import Any

from evener.data.cursor import Slice
from evener.engine.engine import EngineOptions
from evener.engine.late import LateEngine
from evener.engine.state import TrainingState
from evener.engine.team import Team
from evener.errors import UsageError
from evener.planning.policies import Policy
from evener.protocol.row import DATA_LENGTH, Purpose, Row, pack


class DraftingEngine(LateEngine):
    """An engine that plans whole windows ahead of computing them.

    Plans are made two windows ahead, so that data is there before it is needed: the plan of window
    w + 2 travels in the rows of w. Every rank leases the same slices of the epoch; only the planner
    plans, while its device computes the gradients of w.
    """

    def __init__(
        self, team: Team, policy: Policy, training: TrainingState, options: EngineOptions
    ) -> None:
        super().__init__(team, training, options)
        self._policy = policy
        policy.set_parked(team.away)
        #: Leases of planned windows, and of the one whose plan comes next.
        self._leases: dict[int, Slice] = {}
        #: What this rank wants to say of the window after the next: a plan, where it plans.
        self._draft: tuple[float, ...] | None = None
        self._wish = 0

    @property
    def policy(self) -> Policy:
        """Who does how much; it knows all windows that are over."""
        self._learn()
        return self._policy

    def _exchange_plans(self, *work_for_all: float) -> None:
        """Agree on the plans of the next windows; all ranks call it together.

        Args:
            *work_for_all: See ``Policy.plan``; for each of these windows.
        """
        for wanted in work_for_all:
            number = self._make_draft(work_for_all=wanted)
            found = self._meet(Purpose.PLAN, body=(*self._data(), *self._take_draft()))
            self._check_plan(found.rows, number, DATA_LENGTH)

    def plan_ahead(self) -> None:
        """Make the plan of the window after the next, once, while a device computes gradients.

        Only the planner plans, and decides whether a rank should be parked or called back.
        """
        if self.state.plans and self._draft is None:
            self._learn()
            self._make_draft()
            if self.rank == self.state.planner:
                self._wish = self._wanted_change()

    def _learn(self) -> None:
        """Tell the policy of the windows that are over; on all ranks, as any may become planner."""
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
        self._draft, self._wish = (), 0
        if piece is not None:
            self._leases[number] = piece
        if piece is not None and self.rank == self.state.planner:
            plan = self.policy.plan(
                number, piece.epoch, piece.start, piece.size, work_for_all=work_for_all
            )
            self._draft = tuple(pack(plan))
        return number

    def _take_draft(self) -> tuple[float, ...]:
        draft, self._draft = self._draft, None
        return draft or ()

    def _check_plan(self, rows: Mapping[int, Row], number: int, offset: int = 0) -> None:
        """Refuse a plan for another slice of the epoch than the one that this rank has leased.

        Raises:
            UsageError: The planner is at another place of the data.
        """
        planner, piece = self.state.planner, self._leases.get(number)
        agreed = tuple(int(n) for n in rows[planner].body[offset : offset + 4]) or None
        own = None if piece is None else (number, piece.epoch, piece.start, piece.size)
        if agreed != own:
            raise UsageError(
                f"rank {planner} plans (window, epoch, start, size) {agreed}, rank {self.rank} is "
                f"at {own}; every rank must use the same data set size, batch_size "
                "and seed, and resume from the same checkpoint"
            )

    def _take_learnt(self, learnt: Mapping[str, Any]) -> None:
        super()._take_learnt(learnt)
        if not self.policy.is_calibrated:  # until it has seen enough windows of the others
            self.policy.calibrate([1.0] * self.world_size)

    def _drop_plans(self) -> None:
        """Forget all plans and give their slices back."""
        self.state = self.state.release()
        self._leases.clear()
        self._draft = None
        if self._cursor is not None:
            self._cursor.release()
