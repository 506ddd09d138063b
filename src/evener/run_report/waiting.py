"""Who waits for whom, from the waits of committed windows. Pure."""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from evener.run_report.sampling import Floats

NOTEWORTHY: Final = 0.02
"""Below this part of the team's time, waiting is what differences between two windows make."""


@dataclass(frozen=True, slots=True)
class Waits:
    """How much the ranks waited for each of them, by lane.

    The rank that waits least in a window is the last one to arrive there. What the others wait
    longer than that rank does, they wait for it.

    Attributes:
        windows_last: Windows in which it was the last of at least two.
        waited_s: Seconds that all the others together waited for it.
        delay_s: Seconds by which windows would have ended sooner, had it arrived together with
            the last of the others.
        shared_windows: Windows with at least two ranks at work.
        team_s: Seconds of all ranks together, at work, waiting and exchanging.
    """

    windows_last: NDArray[np.intp]
    waited_s: Floats
    delay_s: Floats
    shared_windows: int
    team_s: float

    @property
    def straggler(self) -> int | None:
        """The lane for which the others waited most; ``None`` where that is hardly anything."""
        if not len(self.waited_s) or self.team_s <= 0:
            return None
        lane = int(np.argmax(self.waited_s))
        return lane if self.waited_s[lane] >= NOTEWORTHY * self.team_s else None


def count_waits(compute_s: Floats, wait_s: Floats, sync_s: Floats) -> Waits:
    """Count who was last and what that cost.

    Args:
        compute_s: Seconds of compute by lane (row) and window (column).
        wait_s: Seconds of waiting for others.
        sync_s: Seconds of exchange.
    """
    lanes = len(compute_s)
    team_s = float((compute_s + wait_s + sync_s).sum())
    working = compute_s > 0
    shared = working.sum(axis=0) >= 2
    if not shared.any():
        zeros = np.zeros(lanes)
        return Waits(zeros.astype(np.intp), zeros, zeros, 0, team_s)
    waits = np.where(working, wait_s, np.inf)[:, shared]
    last = np.argmin(waits, axis=0)
    least, second = np.partition(waits, 1, axis=0)[:2]
    for_last = np.where(np.isfinite(waits), waits - least, 0.0).sum(axis=0)
    return Waits(
        windows_last=np.bincount(last, minlength=lanes),
        waited_s=np.bincount(last, weights=for_last, minlength=lanes).astype(np.float64),
        delay_s=np.bincount(last, weights=second - least, minlength=lanes).astype(np.float64),
        shared_windows=int(shared.sum()),
        team_s=team_s,
    )
