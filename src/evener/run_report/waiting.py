"""Which rank the others wait for, from the waits of committed windows. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Self

import numpy as np

from evener.run_report.sampling import Floats

NOTEWORTHY: Final = 0.02
"""Below this part of the team's time, waiting is what differences between two windows make."""


@dataclass(frozen=True, slots=True)
class Waits:
    """How much the ranks waited for each of them, by lane.

    The rank that waits least in a window arrives last. The others wait for it for the time by which
    they wait longer than it does.

    Attributes:
        windows_last: Windows in which it was the last of at least two.
        waited_s: Seconds that all the others together waited for it.
        delay_s: Seconds by which windows would have ended sooner if it had arrived with the last of
            the others.
        shared_windows: Windows with at least two ranks at work.
        team_s: Seconds of all ranks together, at work, waiting and exchanging.
    """

    windows_last: Floats
    waited_s: Floats
    delay_s: Floats
    shared_windows: int
    team_s: float

    @classmethod
    def of(cls, cells: Mapping[str, Floats]) -> Self:
        """Sum up the cells of windows."""
        return cls(
            windows_last=cells["windows_last"].sum(axis=1),
            waited_s=cells["waited_s"].sum(axis=1),
            delay_s=cells["delay_s"].sum(axis=1),
            shared_windows=int(cells["shared_windows"].sum()),
            team_s=sum(float(cells[name].sum()) for name in ("compute_s", "wait_s", "sync_s")),
        )

    @property
    def straggler(self) -> int | None:
        """Return the lane for which the others waited most; ``None`` if that is hardly anything."""
        if not len(self.waited_s) or self.team_s <= 0:
            return None
        lane = int(np.argmax(self.waited_s))
        return lane if self.waited_s[lane] >= NOTEWORTHY * self.team_s else None


def attribute_waits(compute_s: Floats, wait_s: Floats) -> dict[str, Floats]:
    """Tell who was last in each window and what that cost.

    Args:
        compute_s: Seconds of compute by lane (row) and window (column).
        wait_s: Seconds of waiting for others.

    Returns:
        ``windows_last``, ``waited_s`` and ``delay_s`` of ``Waits`` by lane and window, and
        ``shared_windows`` by window.
    """
    names = ("windows_last", "waited_s", "delay_s")
    last, waited_s, delay_s = (np.zeros(compute_s.shape) for _ in names)
    working = compute_s > 0
    shared = working.sum(axis=0) >= 2
    if shared.any():
        (windows,) = np.nonzero(shared)
        waits = np.where(working, wait_s, np.inf)[:, shared]
        lanes = np.argmin(waits, axis=0)
        least, second = np.partition(waits, 1, axis=0)[:2]
        last[lanes, windows] = 1.0
        waited_s[lanes, windows] = np.where(np.isfinite(waits), waits - least, 0.0).sum(axis=0)
        delay_s[lanes, windows] = second - least
    found = dict(zip(names, (last, waited_s, delay_s), strict=True))
    return {**found, "shared_windows": shared.astype(np.float64)}
