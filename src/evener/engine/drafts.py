"""An epoch of SYNC: plans for its first windows, then share after share until it ends."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from evener.data.cursor import Slice
from evener.engine.calibration import time_slices
from evener.engine.engine import EngineOptions
from evener.engine.late import LateEngine
from evener.engine.results import WindowResult, Work
from evener.engine.state import TrainingState
from evener.engine.team import Team
from evener.planning.plans import WindowPlan
from evener.planning.policies import Policy
from evener.protocol.row import DATA_LENGTH, Purpose

#: An epoch may be lengthened by this part, so that every rank has work in its first window.
_LONGER_EPOCH: Final = 0.01


class DraftingEngine(LateEngine):
    """An engine that plans windows ahead of computing them.

    Plans are made two windows ahead, so that data is loaded before it is needed: the plan of window
    w + 2 travels in the rows of w. Every rank leases the same slices of the epoch; only the planner
    plans, while its device computes the gradients of w.
    """

    @abstractmethod
    def close(self, *, drop: bool = False) -> WindowResult | None:
        """Close a planned window; all ranks call it together."""

    @abstractmethod
    def _make_draft(self, *, work_for_all: float = 0.0) -> int:
        """Lease the slice after the last planned one; the planner plans it."""

    @abstractmethod
    def _take_draft(self) -> tuple[float, ...]:
        """Return the plan that this rank has made, if it plans."""

    @abstractmethod
    def _check_plan(self, planner: int, numbers: Sequence[float], number: int) -> None:
        """Refuse a plan for another slice of the epoch than the one that this rank has leased."""

    @abstractmethod
    def _learn(self) -> None:
        """Tell the policy of the windows that are over."""

    def __init__(
        self, team: Team, policy: Policy, training: TrainingState, options: EngineOptions
    ) -> None:
        super().__init__(team, training, options)
        self._policy = policy
        policy.set_absent(team.absent)
        #: Leases of planned windows, and of the one whose plan comes next.
        self._leases: dict[int, Slice] = {}
        #: This rank's plan of the window after the next, if it plans.
        self._draft: tuple[float, ...] | None = None
        #: Whether the planner wishes that the members of an elastic team change.
        self._renews = False

    @property
    def policy(self) -> Policy:
        """Return the policy, which knows all windows that are over."""
        self._learn()
        return self._policy

    def work(self) -> Iterator[Work]:
        """Plan the first windows, and go through what is left of the epoch."""
        is_known = self.has_just_joined or self.policy.is_calibrated
        if self.world_size > 1 and (self._is_anew or not is_known):
            self._calibrate()
        self._is_anew = False
        self._step_in()
        self._wants_plans = True
        try:
            self._plan_first(_LONGER_EPOCH * self.cursor.num_windows(self.batch_size), 0.0)
            yield from self._work()
        finally:
            self._wants_plans = False

    def _work(self) -> Iterator[Work]:
        while True:
            plans = [plan for plan in self.state.plans if isinstance(plan, WindowPlan)]
            # A parked rank does not hear what functions of ``on_commit`` agree on: where these have
            # stopped the team, there is one more window.
            stops = self.stopping and not self.state.parked
            if not self.is_working or stops or self._is_beyond(plans[0]):
                return
            if plans[0].shares[self.rank]:
                positions = [p.positions(self.rank) for p in plans if not self._is_beyond(p)]
                yield Work(plans[0].window, positions)
            else:
                self.open_share(0)
                self.close()

    def _is_beyond(self, plan: WindowPlan) -> bool:
        return self._max_steps is not None and plan.window >= self._max_steps

    def _calibrate(self) -> None:
        """Learn how fast ranks are beside one another; all ranks call it together.

        They compute at the same time, as in a window: ranks may share a machine.
        """
        self.ask(Purpose.PROBE)
        own = time_slices(self.device, self.options.dtype, self.slowdown)
        rows = self.ask(Purpose.PROBE, [own])
        fastest = max(numbers[0] for numbers in rows.values())
        speeds = {rank: numbers[0] for rank, numbers in rows.items()}
        # Ranks that are absent count as fast until they have come and are measured.
        self.policy.calibrate([speeds.get(rank, fastest) for rank in range(self.world_size)])

    def _exchange_plans(self, *work_for_all: float, renew: bool = False) -> None:
        """Agree on the plans of the next windows; all ranks call it together."""
        if renew or self._trial_is_due:
            self._to_park = frozenset()
        for wanted in work_for_all:
            if planned := self.state.planned_to_park:
                self._to_park = planned[-1]
            number, planner = self._make_draft(work_for_all=wanted), self.state.planner
            found = self._agree_on_plan((*self._data(), *self._take_draft()), renew=renew)
            self._check_plan(planner, found.rows[planner].body[DATA_LENGTH:], number)

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
