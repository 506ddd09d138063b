"""Who waits for whom, from the waits of committed windows. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

import numpy as np

from evener.observe.events import SPANS
from evener.observe.numbers import human_duration
from evener.observe.table import Floats, RunTable, add_up

NOTEWORTHY: Final = 0.02
"""Below this fraction of the team's time, waiting is caused by differences between windows."""

_STANDS_OUT: Final = 2.0
"""A rank is named only if others wait for it this many times as long as for any other."""


_LEAST_WINDOWS: Final = 5
"""Fewer windows do not distinguish a rank that delays others from noise."""


@dataclass(frozen=True, slots=True)
class Waits:
    """How much the ranks waited for each of them, by lane.

    The rank that waits least in a window arrives last. The others wait for it for the time by
    which their wait exceeds its own.

    Attributes:
        pairs_s: Seconds by who waited (row) and for whom (column).
        windows_last: Windows in which it was the last of at least two.
        delay_s: Seconds by which windows would have ended sooner if it had arrived with the last of
            the others.
        shared_windows: Windows with at least two ranks at work.
        team_s: Seconds of all ranks together: for data, at work, waiting and exchanging.
    """

    pairs_s: Floats
    windows_last: Floats
    delay_s: Floats
    shared_windows: int
    team_s: float

    @classmethod
    def of(cls, table: RunTable) -> Self:
        """Find the last rank of each window, and the delay that it caused."""
        rows, parts = table.rows(), table.parts()
        team_s = sum(float(parts[name].sum()) for name in map("{}_s".format, SPANS))
        order = np.lexsort((parts["wait_s"], parts["row"]))
        order = order[parts["compute_s"][order] > 0]
        row, wait_s = parts["row"][order].astype(np.intp), parts["wait_s"][order]
        lane = parts["lane"][order].astype(np.intp)
        # In each window the rank that waited least comes first, then the next one.
        _, first, place, count = np.unique(
            row, return_index=True, return_inverse=True, return_counts=True
        )
        lanes, latest = len(table.members), first[place]
        pairs = lane * lanes + lane[latest]
        shared = first[count >= 2]
        last, windows = lane[shared], rows["windows"][row[shared]]
        return cls(
            pairs_s=add_up(pairs, wait_s - wait_s[latest], lanes * lanes).reshape(lanes, lanes),
            windows_last=add_up(last, windows, lanes),
            delay_s=add_up(last, wait_s[shared + 1] - wait_s[shared], lanes),
            shared_windows=int(windows.sum()),
            team_s=team_s,
        )

    @property
    def waited_for_s(self) -> Floats:
        """Return by lane the seconds that all other ranks together waited for it."""
        return np.asarray(self.pairs_s.sum(axis=0))

    @property
    def culprit(self) -> int | None:
        """Return the lane that stands out as the one for which others wait; ``None`` for none."""
        waited_s = np.sort(self.waited_for_s)
        if self.shared_windows < _LEAST_WINDOWS or not waited_s[-1] >= NOTEWORTHY * self.team_s > 0:
            return None
        stands_out = waited_s[-1] >= _STANDS_OUT * waited_s[-2]
        return int(np.argmax(self.waited_for_s)) if stands_out else None


def describe_waits(waits: Waits, names: Sequence[str], whole_s: float, *, waiting: float) -> str:
    """Return who waits for whom, as text.

    Args:
        waits: By lane.
        names: Of the ranks, by lane.
        whole_s: Seconds of all windows.
        waiting: Part of the ranks' time in which they waited, also for what none of them causes.
    """
    lost_s = float(waits.waited_for_s.sum())
    if len(names) == 1:
        return "One rank waits for no other."
    if not waits.shared_windows:
        return "No two ranks worked in the same window."
    if lost_s < NOTEWORTHY * waits.team_s:
        return "No rank keeps another one waiting for a noteworthy part of the time."
    lane = waits.culprit
    if lane is None:
        return f"Ranks wait {waiting:.1%} of their time for one another; none of them stands out."
    others = [name for name, s in zip(names, waits.pairs_s[:, lane], strict=True) if s > 0]
    who = f"{others[0]} waits" if len(others) == 1 else "The others wait"
    waited_s, delay_s = float(waits.waited_for_s[lane]), float(waits.delay_s[lane])
    text = (
        f"{who[0].upper()}{who[1:]} for {names[lane]}: {human_duration(waited_s)}, "
        f"{waited_s / waits.team_s:.1%} of the ranks' time. It came last in "
        f"{waits.windows_last[lane]:,.0f} of {waits.shared_windows:,} windows"
    )
    if len(others) > 1 and whole_s > 0:
        text += (
            f"; had it come with the next one, the run would have ended {human_duration(delay_s)} "
            f"sooner ({delay_s / whole_s:.1%})"
        )
    return f"{text}."
