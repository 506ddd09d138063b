"""Which rank the others wait for, from the waits of committed windows. Pure."""

from dataclasses import dataclass
from typing import Final, Self

import numpy as np

from evener.observe.table import Floats, RunTable, add_up

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
    def of(cls, table: RunTable) -> Self:
        """Tell who was last in each window, and what that cost."""
        rows, parts = table.rows(), table.parts()
        team_s = sum(float(parts[name].sum()) for name in ("compute_s", "wait_s", "sync_s"))
        order = np.lexsort((parts["wait_s"], parts["row"]))
        order = order[parts["compute_s"][order] > 0]
        row, wait_s = parts["row"][order].astype(np.intp), parts["wait_s"][order]
        lane = parts["lane"][order].astype(np.intp)
        # Of each window the rank that waited least comes first, then the one after it.
        _, first, count = np.unique(row, return_index=True, return_counts=True)
        first, count = first[count >= 2], count[count >= 2]
        last = lane[first]
        waits = np.concatenate([[0.0], np.cumsum(wait_s)])
        waited_s = waits[first + count] - waits[first] - count * wait_s[first]
        windows, lanes = rows["windows"][row[first]], len(table.members)
        return cls(
            windows_last=add_up(last, windows, lanes),
            waited_s=add_up(last, waited_s, lanes),
            delay_s=add_up(last, wait_s[first + 1] - wait_s[first], lanes),
            shared_windows=int(windows.sum()),
            team_s=team_s,
        )

    @property
    def straggler(self) -> int | None:
        """Return the lane for which the others waited most; ``None`` if that is hardly anything."""
        if not len(self.waited_s) or self.team_s <= 0:
            return None
        lane = int(np.argmax(self.waited_s))
        return lane if self.waited_s[lane] >= NOTEWORTHY * self.team_s else None
