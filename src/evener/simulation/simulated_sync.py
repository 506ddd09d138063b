"""A team in SYNC in virtual time: the planner of a run, in the middle of an epoch. Pure."""

import math
from collections import deque
from collections.abc import Sequence
from typing import Final

from evener.planning.plans import WindowPlan
from evener.planning.policies import Policy
from evener.planning.report import NOTHING, Report
from evener.simulation.simulated_rank import Link, SimulatedRank, SimulatedWindow

_AHEAD: Final = 2
"""Windows between a plan and its window."""


class SimulatedSync:
    """Windows over a fixed batch, planned and parked as in the engine.

    The plan of window w + 2 is based on reports up to w - 1.

    Args:
        ranks: The ranks.
        link: The link between them.
        policy: Plans the windows; knows only what the caller has given it.
        batch_size: Samples of a window; may be changed between windows.
        divides_updates: Whether each present rank makes its part of the update.

    Attributes:
        now_s: Virtual seconds since the beginning.
        parked: Ranks that are parked.
        windows: Windows so far.
    """

    def __init__(
        self,
        ranks: Sequence[SimulatedRank],
        link: Link,
        policy: Policy,
        *,
        batch_size: int,
        divides_updates: bool = False,
    ) -> None:
        self.policy = policy
        self.batch_size = batch_size
        self.parked: frozenset[int] = frozenset()
        self.now_s = 0.0
        self.windows = 0
        self._ranks = ranks
        self._link = link
        self._divides_updates = divides_updates
        self._planned: deque[WindowPlan] = deque()
        self._unlearnt: list[tuple[Sequence[Report], WindowPlan, float]] = []
        self._recall_at = 0

    @property
    def present(self) -> tuple[int, ...]:
        """Return the ranks that are not parked."""
        return tuple(rank for rank in range(len(self._ranks)) if rank not in self.parked)

    def run(self, num_windows: int) -> list[SimulatedWindow]:
        """Simulate some windows."""
        return [self.window() for _ in range(num_windows)]

    def window(self) -> SimulatedWindow:
        """Simulate a window, and the change of the team that follows from it."""
        while len(self._planned) < _AHEAD:
            self.decide()
        self.observe()
        self.decide()
        parking = self.policy.decide_parking(self.batch_size, self.present[0])
        window = self.compute()
        if parking is not None:
            self._change(self.parked.union(parking.ranks))
            self._recall_at = self.windows + self.policy.windows_apart(self.batch_size, 0.0)
        elif self.parked and self.windows >= self._recall_at:
            self._change(frozenset(), work_for_all=math.inf)
        return window

    def observe(self) -> None:
        """Let the planner learn from the newest window."""
        for reports, plan, exchange_s in self._unlearnt:
            self.policy.observe(reports, plan, exchange_s)
        self._unlearnt.clear()

    def decide(self, *, work_for_all: float = 0.0) -> None:
        """Plan a further window."""
        number, size = self.windows + len(self._planned), self.batch_size
        plan = self.policy.plan(number, 0, number * size, size, work_for_all=work_for_all)
        self._planned.append(plan)

    def compute(self) -> SimulatedWindow:
        """Simulate the window whose plan is the oldest."""
        plan, present = self._planned.popleft(), self.present
        parts = len(present) if self._divides_updates else 1
        reports = tuple(
            rank.share(plan.shares[number], self.now_s, parts) if number in present else NOTHING
            for number, rank in enumerate(self._ranks)
        )
        micro_batch_s = min(
            self._ranks[rank].last_micro_batch_s(plan.shares[rank]) for rank in present
        )
        exchange_s = self._link.exposed_s(len(present), micro_batch_s)
        meeting_s = self._link.wait_s(len(present))
        last_s = max(reports[rank].busy_s for rank in present)
        length_s = last_s + meeting_s + exchange_s
        self.now_s += length_s
        self.windows += 1
        timed = [
            report._replace(elapsed_s=length_s if number in present else 0.0)
            for number, report in enumerate(reports)
        ]
        self._unlearnt.append((timed, plan, meeting_s + exchange_s))
        here = [number in present for number in range(len(self._ranks))]
        return SimulatedWindow(
            present=present,
            reports=reports,
            elapsed_s=tuple(length_s * is_here for is_here in here),
            waits_s=tuple(
                (last_s - report.busy_s + meeting_s) * is_here
                for report, is_here in zip(reports, here, strict=True)
            ),
            exchanges_s=tuple(exchange_s * is_here for is_here in here),
        )

    def _change(self, parked: frozenset[int], *, work_for_all: float = 0.0) -> None:
        """Form the next generation: plans are dropped, and made again for the present ranks."""
        self.observe()
        self.parked = parked
        self.policy.set_parked(parked)
        self._planned.clear()
        for _ in range(_AHEAD):
            self.decide(work_for_all=work_for_all)
