"""The exchange that closes a window, from its start to its landing."""

import time
from functools import partial
from typing import final

from evener.data.leases import LeaseBook
from evener.engine.exchanging import BackgroundExchanger, Exchanger, InlineExchanger
from evener.engine.local_window import Outcome, WindowExchange
from evener.engine.membership import ActiveTeam
from evener.engine.replica import Replica, Snapshot
from evener.engine.schedule import Schedule
from evener.engine.team import Team
from evener.planning.cadence import CadencePolicy
from evener.planning.local import LocalPlan, LocalReport


@final
class Flight:
    """One exchange at a time: at once, or in the background while the rank goes on.

    Args:
        team: The ranks.
        background: For ASYNC: the same ranks once more, for the thread that exchanges.
        replica: Whose snapshots are exchanged.
        policy: Plans; rank 0's word counts.
        schedule: Knows the learning rates that ranks compare.

    Attributes:
        plan: That of the window whose exchange has begun and not landed, if there is one.
        before: Agrees on the first plan of an epoch, over the ranks themselves.
    """

    def __init__(
        self,
        team: ActiveTeam,
        background: Team | None,
        replica: Replica,
        policy: CadencePolicy,
        schedule: Schedule,
    ) -> None:
        self.plan: LocalPlan | None = None
        self.before = WindowExchange(team, replica, policy, schedule)
        self._background = background
        self._windows = self.before
        self._exchanger: Exchanger[Outcome] = InlineExchanger()
        if background is not None:
            self._windows = WindowExchange(background, replica, policy, schedule)
            self._exchanger = BackgroundExchanger(f"average-{background.rank}")

    @property
    def ready(self) -> bool:
        """Whether ``land`` would return at once."""
        return self._exchanger.ready

    def start(
        self,
        plan: LocalPlan,
        report: LocalReport,
        taken: Snapshot,
        book: LeaseBook,
        limit: int | None,
    ) -> None:
        """Begins the exchange of a window; see ``WindowExchange.run``."""
        self._exchanger.start(partial(self._windows.run, plan, report, taken.buffers, book, limit))
        self.plan = plan

    def land(self) -> tuple[Outcome, float, float]:
        """Takes over what the exchange came to; waits for it where it has not ended.

        Returns:
            The outcome; the seconds that this call took, and those for which others were waited.
        """
        started_s = time.perf_counter()
        self.plan = None  # whatever comes of it
        outcome = self._exchanger.wait()
        took_s = time.perf_counter() - started_s
        return outcome, took_s, outcome.wait_s if self._background is None else took_s

    def hurry(self, timeout_s: float) -> None:
        """Shortens the deadlines of the background, also of an exchange that is under way."""
        if self._background is not None:
            self._background.comm.hurry(timeout_s)

    def close(self) -> None:
        """Ends an exchange that is under way, without waiting for any rank; idempotent."""
        if self._background is not None:
            self._background.comm.close()
        self._exchanger.close()
