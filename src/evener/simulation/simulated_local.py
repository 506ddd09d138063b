"""A team in CADENCE or ASYNC in virtual time: planner, deadlines and queues of a run. Pure."""

import math
from collections import deque
from collections.abc import Sequence
from operator import add

from evener.data.cursor import Cursor, Slice
from evener.data.leases import LeaseBook
from evener.planning.cadence import CadencePolicy
from evener.planning.clock import WindowClock
from evener.planning.plans import LocalPlan
from evener.planning.report import NOTHING, Report
from evener.simulation.simulated_rank import Link, SimulatedRank, SimulatedWindow


class SimulatedLocal:
    """Windows of local steps, closed by each rank's clock and exchanged as the engine does it.

    Whether ranks wait for an exchange is in the policy's plans: always in CADENCE; in ASYNC only if
    a rank has no step left before the average has landed.

    Args:
        ranks: The ranks.
        link: The link between them.
        policy: Plans.
        batch_size: Samples of a local step.
        num_samples: Samples of an epoch.

    Attributes:
        windows: Windows so far.
        plan: The newest plan; ``None`` between two epochs.
    """

    def __init__(
        self,
        ranks: Sequence[SimulatedRank],
        link: Link,
        policy: CadencePolicy,
        *,
        batch_size: int,
        num_samples: int,
    ) -> None:
        self.policy = policy
        self.cursor = Cursor(num_samples, seed=0)
        self.windows = 0
        self.plan: LocalPlan | None = None
        self._link = link
        self._batch_size = batch_size
        self._book = LeaseBook(self.cursor, batch_size, range(len(ranks)))
        self._ranks = [_LocalRank(rank) for rank in ranks]
        #: The newest exchange, which the planner learns with the window after it.
        self._sync_s = 0.0

    def run(self, num_windows: int) -> list[SimulatedWindow]:
        """Simulate some windows."""
        return [self.window() for _ in range(num_windows)]

    def window(self) -> SimulatedWindow:
        """Simulate a window until its average has landed on every rank."""
        plan = self.plan or self._begin()
        for rank in self._ranks:
            rank.go_on(math.inf)
        reports = tuple(
            rank.end_window(most) for rank, most in zip(self._ranks, plan.most, strict=True)
        )
        arrived_s = max(rank.now_s for rank in self._ranks)
        meeting_s = self._link.wait_s(len(self._ranks))
        exchange_s = self._link.exchange_s(len(self._ranks))
        landed_s = arrived_s + meeting_s + exchange_s
        self._commit(reports)
        self._plan_next(reports)
        waits_s, exchanges_s, elapsed_s = [], [], []
        for rank in self._ranks:
            if not plan.blocking:
                rank.go_on(landed_s)
            waited_s = max(0.0, landed_s - rank.now_s)
            exchanges_s.append(exchange_s if plan.blocking else 0.0)
            waits_s.append(waited_s - exchanges_s[-1])
            elapsed_s.append(rank.land(landed_s))
        self._sync_s = min(waits_s) + max(exchanges_s)
        self.windows += 1
        self._follow(hands_on=plan.blocking)
        return SimulatedWindow(
            present=tuple(range(len(self._ranks))),
            reports=reports,
            elapsed_s=tuple(elapsed_s),
            waits_s=tuple(waits_s),
            exchanges_s=tuple(exchanges_s),
        )

    def _begin(self) -> LocalPlan:
        """Plan the first window of an epoch."""
        self.cursor.begin(self.cursor.epoch)
        self._book = LeaseBook(self.cursor, self._batch_size, range(len(self._ranks)))
        self.plan = plan = self._planned()
        self._follow(hands_on=False)
        return plan

    def _planned(self) -> LocalPlan:
        return self.policy.plan(
            self.windows, self.cursor.epoch, left=self._book.num_left, limit=None
        )

    def _commit(self, reports: Sequence[Report]) -> None:
        for number, report in enumerate(reports):
            for piece in self._book.retire(number, report.steps, report.samples):
                self.cursor.commit(piece)

    def _plan_next(self, reports: Sequence[Report]) -> None:
        self.policy.observe(reports, self._sync_s)
        self.plan = self._planned() if self._book.num_left else None

    def _follow(self, *, hands_on: bool) -> None:
        if self.plan is None:
            return
        self._book.fill(self.plan.queues, hand_on=hands_on and self._book.num_free == 0)
        for number, rank in enumerate(self._ranks):
            rank.follow(self.plan, self._book.queue(number), self.plan.most[number])


class _LocalRank:
    """A rank and its clock; ``now_s`` is its own time."""

    def __init__(self, rank: SimulatedRank) -> None:
        self.now_s = 0.0
        self._rank = rank
        self._clock = WindowClock()
        self._work = NOTHING
        self._own: deque[Slice] = deque()
        self._landed_s = 0.0

    def follow(self, plan: LocalPlan, queue: Sequence[Slice], most: int) -> None:
        """Go on by a plan, whose time runs from now; steps made before count."""
        self._own = deque(queue[self._work.steps :])
        self._clock.limit(most, self.now_s + plan.window_s, least=plan.least)

    def go_on(self, until_s: float) -> None:
        """Make local steps until the clock says stop, the queue is empty, or a moment is over."""
        while self._own and self.now_s < until_s and self._clock.wants_another(self.now_s):
            step = self._rank.step(self._own.popleft().size, self.now_s)
            self._work = Report(*map(add, self._work, step))
            self.now_s += step.busy_s
            self._clock.count_step(step.busy_s)

    def end_window(self, most: int) -> Report:
        """Begin with the next window; return the work of the one before."""
        done, self._work = self._work, NOTHING
        self._clock.open(most)
        return done

    def land(self, landed_s: float) -> float:
        """Apply an average that has landed; return the seconds since the one before."""
        self.now_s = max(self.now_s, landed_s)
        elapsed_s, self._landed_s = self.now_s - self._landed_s, self.now_s
        return elapsed_s
