"""Where ranks' time goes, from the ``window`` events of a run.

Each event has, for each rank, the seconds that it took from one window to the next
(``elapsed_s``), and of these the seconds of compute, of waiting for others and of exchange. The
rest is bookkeeping: fetching data, copying and checking gradients, planning, events, the loop. What
is not compute is lost.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ways import Window

#: How much of a turn's time, by a clock of its own around the loop, its windows may fail to name.
TOLERANCE = 0.03


@dataclass(frozen=True)
class Lost:
    """Parts of a rank's time, from 0 to 1.

    Attributes:
        wait: Waiting for other ranks.
        exchange: Exchanging gradients, or averaging.
        bookkeeping: The rest that is not compute.
    """

    wait: float
    exchange: float
    bookkeeping: float

    @property
    def total(self) -> float:
        """All that is not compute."""
        return self.wait + self.exchange + self.bookkeeping


def lost_time(windows: Sequence[Window]) -> dict[int, Lost]:
    """Parts of each rank's time in these windows; ranks that were parked throughout are left out.

    Args:
        windows: Events; their times count from the end of the window before.
    """
    sums: dict[int, list[float]] = {}
    for window in windows:
        for row in window["ranks"]:
            times = [row["elapsed_s"], row["compute_s"], row["wait_s"], row["sync_s"]]
            known = sums.get(row["rank"], [0.0] * len(times))
            sums[row["rank"]] = [a + b for a, b in zip(known, times, strict=True)]
    return {
        rank: Lost(wait_s / all_s, sync_s / all_s, (all_s - compute_s - wait_s - sync_s) / all_s)
        for rank, (all_s, compute_s, wait_s, sync_s) in sums.items()
        if all_s
    }


def over_ranks(lost: Mapping[int, Lost]) -> Lost:
    """The mean over ranks, which all take the same time."""
    ranks = len(lost)
    return Lost(
        wait=sum(part.wait for part in lost.values()) / ranks,
        exchange=sum(part.exchange for part in lost.values()) / ranks,
        bookkeeping=sum(part.bookkeeping for part in lost.values()) / ranks,
    )


def unnamed(windows: Sequence[Window], walls_s: Sequence[float]) -> float:
    """The largest part of a rank's turn that is in none of its windows; may be negative.

    Args:
        windows: All events of the turn.
        walls_s: What it took each rank, measured around the loop.
    """
    parts = []
    for rank, wall_s in enumerate(walls_s):
        rows = [row for window in windows for row in window["ranks"] if row["rank"] == rank]
        if any(row["elapsed_s"] for row in rows):
            parts.append(1.0 - sum(row["elapsed_s"] for row in rows) / wall_s)
    return max(parts, key=abs)
