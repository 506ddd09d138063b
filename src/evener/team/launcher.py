"""The base of launchers: supervisors that a terminal or a script has started."""

import signal
from abc import abstractmethod
from typing import ClassVar

from evener.team.signals import SignalQueue
from evener.team.supervisor import Supervisor
from evener.team.terminal import say


class TerminalSupervisor(Supervisor):
    """A supervisor that is started from a terminal or a script: it passes signals on.

    Args:
        signals: Those that this process receives.
        grace_s: Seconds that ranks get to end by themselves.
    """

    #: What is said where a second Ctrl-C kills the ranks.
    _interrupted_again: ClassVar[str] = "interrupted again"

    def __init__(self, signals: SignalQueue, grace_s: float) -> None:
        super().__init__()
        self._grace_s = grace_s
        self._signals = signals
        self._stop_signal: signal.Signals | None = None

    @abstractmethod
    def _before_stop(self, signum: signal.Signals) -> None:
        """Tell others, before the ranks are told to stop."""

    def _passed_on(self, signum: signal.Signals) -> signal.Signals:
        """Return the signal that ranks are sent for one that was received."""
        # The terminal has gone: to the ranks that is a request like any other.
        return signal.SIGTERM if signum == signal.SIGHUP else signum

    def _heed_signals(self) -> None:
        for signum in self._signals.take():
            if self._deadline is None:
                self._before_stop(signum)
                self._stop(signum)
            elif signum == signal.SIGINT and not self._killed:
                self._stop_signal = self._stop_signal or signum
                self._kill(self._interrupted_again)

    def _stop(self, signum: signal.Signals, why: str = "") -> None:
        self._stop_signal = signum
        alive = len(self._alive)
        asked = (
            f": asked the rank{'s' if alive > 1 else ''} to stop, which may take "
            f"{self._grace_s:g} s; press Ctrl-C to kill them at once"
        )
        say(f"evener: {why or signum.name}{asked if alive else ''}")
        self._ask_to_stop(self._passed_on(signum))

    def _ask_to_stop(self, signum: signal.Signals) -> None:
        self._set_deadline(self._grace_s, f"had not ended {self._grace_s:g} s after being asked to")
        for child in self._alive:
            if child.report is None:  # otherwise it is on its way out already
                child.send_signal(signum)

    def _kill(self, why: str) -> None:
        if why:
            say(f"evener: {why}: killed {', '.join(child.who for child in self._alive)}")
        super()._kill(why)

    def _is_hurried(self) -> bool:
        return bool(self._signals.take())
