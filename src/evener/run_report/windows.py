"""The windows of a run in bounded memory: the newest ones singly, older ones merged. Pure."""

from array import array
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from evener.run_report.sampling import Floats, ratio
from evener.run_report.waiting import attribute_waits

TEAM_NUMBERS: Final = ("window", "begin_s", "end_s", "loss", "anchor", "windows")
"""What is known of a window of the team; NaN where nothing is. It may stand for several."""

LANE_NUMBERS: Final = (
    *("samples", "weight", "compute_s", "wait_s", "sync_s", "data_s", "sent_bytes"),
)
"""What is known of a lane's part in it; 0 where the member took no part, or nothing is said."""

MOST_KEPT: Final = 2**19
"""Cells of merged windows times lanes: they take 80 MB. A page has room for fewer."""

_MOST_NEW: Final = 2**17
_LEAST_CELLS: Final = 64

Cells = dict[str, Floats]
"""Neighbouring windows by name, merged: one number for each cell, or by lane (row) and cell.

There are the sums of ``LANE_NUMBERS``, of ``windows`` and ``length_s``, the ``first`` and ``last``
window, ``begin_s`` and ``end_s``, what ``attribute_waits`` returns, and ratios such as ``loss``:
``loss_over`` and ``loss_under`` are the sums of both sides, ``loss_low`` and ``loss_high`` the
extremes of single windows.
"""


class Windows:
    """Takes windows one by one.

    Args:
        most_kept: See ``MOST_KEPT``.
    """

    def __init__(self, most_kept: int = MOST_KEPT) -> None:
        self._most_kept = most_kept
        self._team = array("d")
        self._lanes: list[array[float]] = []
        self._old = _cells(np.zeros((0, len(TEAM_NUMBERS))), np.zeros((0, 0, len(LANE_NUMBERS))))
        self._merged = 1  # windows in an old cell

    @property
    def num_new(self) -> int:
        """Return how many of the newest windows are not merged yet."""
        return len(self._team) // len(TEAM_NUMBERS)

    def __len__(self) -> int:
        return int(self._old["windows"].sum() + self._new()[0][:, -1].sum())

    def add_lane(self) -> None:
        """Add a lane, which took no part in any window so far."""
        self._lanes.append(array("d", bytes(8 * len(LANE_NUMBERS) * self.num_new)))
        for name, values in self._old.items():
            if values.ndim == 2:
                fill = np.full((1, values.shape[1]), _ABSENT.get(name, 0.0))
                self._old[name] = np.concatenate([values, fill])

    def add(self, team: Iterable[float], lanes: Iterable[Sequence[float]]) -> None:
        """Add a window: its ``TEAM_NUMBERS``, and the ``LANE_NUMBERS`` of each lane."""
        self._team.extend(team)
        for lane, numbers in zip(self._lanes, lanes, strict=True):
            lane.extend(numbers)
        keep = max(_LEAST_CELLS, _MOST_NEW // (1 + len(self._lanes)))
        if self.num_new >= 2 * keep:
            self._settle(keep)

    def drop(self, first: int) -> tuple[int, bool]:
        """Drop the windows from number ``first`` on.

        Returns:
            How many, and whether what remains is exact. It is an estimate if windows before
            ``first`` had been merged with later ones: then a part of their sums is kept.
        """
        before = len(self)
        new, lanes = self._new()
        window, count = new[:, 0], new[:, -1]
        part = np.clip((first - 1 - window) / count + 1, 0, 1)
        kept = part > 0
        new[:, 0], new[:, -1] = np.minimum(window, first - 1), np.round(part * count)
        self._team = array("d", new[kept].tobytes())
        self._lanes = [array("d", (lane * part[:, None])[kept].tobytes()) for lane in lanes]
        begin, last = self._old["first"], self._old["last"]
        part = np.clip((first - begin) / (last - begin + 1), 0, 1)
        kept = part > 0
        is_exact = bool((part[kept] == 1).all())
        for name, values in self._old.items():
            is_sum = name not in _PLACES and name.rpartition("_")[2] not in _MERGES
            self._old[name] = (values * part if is_sum else values)[..., kept]
        np.minimum(self._old["last"], first - 1, out=self._old["last"])
        np.round(self._old["windows"], out=self._old["windows"])
        return before - len(self), is_exact

    def cells(self) -> Cells:
        """Return all windows."""
        new = _cells(*self._new())
        return {name: np.concatenate([old, new[name]], axis=-1) for name, old in self._old.items()}

    def _new(self) -> tuple[Floats, Floats]:
        """Return what is not merged: numbers of the team by window, of lanes by lane and window."""
        team = np.array(self._team).reshape(-1, len(TEAM_NUMBERS))
        lanes = np.array([np.array(lane) for lane in self._lanes])
        return team, lanes.reshape(len(self._lanes), len(team), len(LANE_NUMBERS))

    def _settle(self, keep: int) -> None:
        team, lanes = self._new()
        old = merge(_cells(team[:-keep], lanes[:, :-keep]), self._merged)
        self._old = {
            name: np.concatenate([values, old[name]], axis=-1) for name, values in self._old.items()
        }
        self._team = array("d", team[-keep:].tobytes())
        self._lanes = [array("d", lane[-keep:].tobytes()) for lane in lanes]
        most = max(_LEAST_CELLS, self._most_kept // (1 + len(self._lanes)))
        while len(self._old["windows"]) > most:
            self._merged *= 2
            self._old = merge(self._old, 2)


def merge(cells: Cells, count: int) -> Cells:
    """Merge so many neighbouring cells each; the last ones may be fewer."""
    return merge_at(cells, np.arange(0, len(cells["windows"]), count))


def merge_at(cells: Cells, starts: "np.ndarray[tuple[int], np.dtype[np.intp]]") -> Cells:
    """Merge the cells from each start to the next."""
    if not len(starts):
        return cells
    ends = np.append(starts[1:], len(cells["windows"])) - 1
    merged = {}
    for name, values in cells.items():
        if name in ("first", "begin_s"):
            merged[name] = values[starts]
        elif name in ("last", "end_s"):
            merged[name] = values[ends]
        else:
            kind = name.rpartition("_")[2]
            merged[name] = _MERGES.get(kind, np.add).reduceat(values, starts, axis=-1)
    return merged


_PLACES: Final = ("first", "last", "begin_s", "end_s")
_MERGES: Final = {"low": np.fmin, "high": np.fmax}
#: A lane's values of windows before its first one, where they are not 0.
_ABSENT: Final = dict.fromkeys(("waits_low", "waits_high"), np.nan)


# Sums of absurd values become infinite.
@np.errstate(over="ignore", invalid="ignore")
def _cells(team: Floats, lanes: Floats) -> Cells:
    """Return a cell for each window."""
    window, begin_s, end_s, loss, anchor, count = team.T
    own = {name: lanes[:, :, i] for i, name in enumerate(LANE_NUMBERS)}
    weight = own["weight"].sum(axis=0)
    times = own["compute_s"], own["wait_s"], own["sync_s"]
    waits = attribute_waits(*times[:2])
    for name in ("windows_last", "shared_windows"):
        waits[name] *= count
    return {
        "first": window - count + 1,
        "last": window,
        "windows": count,
        "begin_s": begin_s,
        "end_s": end_s,
        "length_s": end_s - begin_s,
        **own,
        **waits,
        **_ratio("loss", loss * weight, weight),
        **_ratio("speed", weight, end_s - begin_s),
        **_ratio("anchor", anchor * count, count),
        **_ratio("sent", own["sent_bytes"].sum(axis=0), count),
        **_ratio("shares", own["weight"], np.broadcast_to(weight, own["weight"].shape)),
        **_ratio("waits", own["wait_s"], np.sum(times, axis=0)),
    }


def _ratio(name: str, over: Floats, under: Floats) -> Cells:
    # A window of no length counts, too: its work falls into the time of its neighbours.
    counts = np.isfinite(over)
    over, under = np.where(counts, over, 0.0), np.where(counts, under, 0.0)
    single = ratio(over, under)
    return {
        f"{name}_over": over,
        f"{name}_under": under,
        f"{name}_low": single,
        f"{name}_high": single,
    }
