"""Time that passes as a test says, so that what rests on measured speeds does not rest on luck.

Ranks on threads measure with ``time.perf_counter``. Under ``RankClocks`` each of them has a clock
of its own, which stands still but for ``spend``: to the planner the machine is as fast as the test
wants, whatever else it does.
"""

import threading
import time
from concurrent.futures import wait
from typing import Any

import pytest

from evener.comm.background import BackgroundJob
from helpers.limits import PATIENCE_S


class RankClocks:
    """A clock for each thread that calls ``start``; all others see the real one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._own = threading.local()
        self._real = time.perf_counter
        self._monkeypatch = monkeypatch
        monkeypatch.setattr(time, "perf_counter", self._now_s)

    def start(self) -> None:
        """Stops the clock of this thread, before anything is measured."""
        self._own.now_s = 0.0

    def spend(self, seconds: float) -> None:
        """Lets time pass for the rank of this thread, and stops its clock if that still runs."""
        self._own.now_s = self._now_s() + seconds

    def land_after(self, steps: int) -> None:
        """From now on an ASYNC average lands when its rank has made so many steps meanwhile.

        For both ranks of a team, however long the exchange takes; the plan may let them make fewer.
        """
        original = BackgroundJob.start

        def start(exchanger: Any, job: Any) -> None:
            exchanger.looks = 0
            original(exchanger, job)

        def ready(exchanger: Any) -> bool:
            exchanger.looks += 1  # once when it begins, and after each step
            return exchanger.looks > steps and bool(wait([exchanger._future], PATIENCE_S).done)

        self._monkeypatch.setattr(BackgroundJob, "start", start)
        self._monkeypatch.setattr(BackgroundJob, "ready", property(ready))

    def _now_s(self) -> float:
        own: float | None = getattr(self._own, "now_s", None)
        return self._real() if own is None else own
