"""A team in CADENCE or ASYNC in virtual time, in the middle of an epoch. Pure."""

import math
from collections.abc import Sequence
from operator import add
from typing import Final

from evener.planning.cadence import CadencePolicy
from evener.planning.clock import WindowClock
from evener.planning.plans import LocalPlan
from evener.planning.report import NOTHING, Report
from evener.simulation.simulated_rank import Link, SimulatedRank, SimulatedWindow

_ENDLESS: Final = 2**50
"""Remaining batches of the epoch."""


class SimulatedLocal:
    """Windows of local steps, closed by each rank's clock and exchanged as in the engine.

    The policy's plans say whether ranks wait for an exchange: always in CADENCE; in ASYNC only if a
    rank has no step left before the average has been applied.

    Args:
        ranks: The ranks.
        link: The link between them.
        policy: Plans the windows.
        batch_size: Samples of a local step.

    Attributes:
        windows: Windows so far.
    """

    def __init__(
        self,
        ranks: Sequence[SimulatedRank],
        link: Link,
        policy: CadencePolicy,
        *,
        batch_size: int,
    ) -> None:
        self.policy = policy
        self.windows = 0
        self._link = link
        self._ranks = [_LocalRank(rank, batch_size) for rank in ranks]
        #: The newest exchange, which the planner learns with the window after it.
        self._sync_s = 0.0
        self._plan = self._plan_next()
        self._follow()

    def run(self, num_windows: int) -> list[SimulatedWindow]:
        """Simulate some windows."""
        return [self.window() for _ in range(num_windows)]

    def window(self) -> SimulatedWindow:
        """Simulate a window until its average has been applied on every rank."""
        plan = self._plan
        for rank in self._ranks:
            rank.go_on(math.inf)
        reports = tuple(
            rank.end_window(most) for rank, most in zip(self._ranks, plan.most, strict=True)
        )
        arrived_s = max(rank.now_s for rank in self._ranks)
        meeting_s = self._link.wait_s(len(self._ranks))
        exchange_s = self._link.exchange_s(len(self._ranks))
        landed_s = arrived_s + meeting_s + exchange_s
        self.policy.observe(reports, self._sync_s)
        self.windows += 1
        self._plan = self._plan_next()
        waits_s, exchanges_s, elapsed_s = [], [], []
        for rank in self._ranks:
            if not plan.blocking:
                rank.go_on(landed_s)
            waited_s = max(0.0, landed_s - rank.now_s)
            exchanges_s.append(exchange_s if plan.blocking else 0.0)
            waits_s.append(waited_s - exchanges_s[-1])
            elapsed_s.append(rank.land(landed_s))
        self._sync_s = min(waits_s) + max(exchanges_s)
        self._follow()
        return SimulatedWindow(
            present=tuple(range(len(self._ranks))),
            reports=reports,
            elapsed_s=tuple(elapsed_s),
            waits_s=tuple(waits_s),
            exchanges_s=tuple(exchanges_s),
        )

    def _plan_next(self) -> LocalPlan:
        return self.policy.plan(self.windows, 0, left=_ENDLESS, limit=None)

    def _follow(self) -> None:
        for number, rank in enumerate(self._ranks):
            rank.follow(self._plan, number)


class _LocalRank:
    """A rank and its clock; ``now_s`` is its own time."""

    def __init__(self, rank: SimulatedRank, batch_size: int) -> None:
        self.now_s = 0.0
        self._rank = rank
        self._batch_size = batch_size
        self._clock = WindowClock()
        self._work = NOTHING
        #: Batches in its queue.
        self._left = 0
        self._landed_s = 0.0

    def follow(self, plan: LocalPlan, rank: int) -> None:
        """Continue with a plan, whose time begins now; steps made before count."""
        self._left = max(self._left, plan.queues[rank] - self._work.steps)
        self._clock.limit(plan.most[rank], self.now_s + plan.window_s, least=plan.least)

    def go_on(self, until_s: float) -> None:
        """Make local steps until the window's time is over, the queue is empty, or ``until_s``."""
        while self._left and self.now_s < until_s and self._clock.wants_another(self.now_s):
            step = self._rank.step(self._batch_size, self.now_s)
            self._left -= 1
            self._work = Report(*map(add, self._work, step))
            self.now_s += step.busy_s
            self._clock.count_step(step.busy_s)

    def end_window(self, most: int) -> Report:
        """Begin the next window; return the work of the previous one."""
        done, self._work = self._work, NOTHING
        self._clock.open(most)
        return done

    def land(self, landed_s: float) -> float:
        """Apply an average; return the seconds since the previous one."""
        self.now_s = max(self.now_s, landed_s)
        elapsed_s, self._landed_s = self.now_s - self._landed_s, self.now_s
        return elapsed_s
