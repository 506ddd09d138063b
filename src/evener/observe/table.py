"""The windows of a run as columns of numbers, from which its figures are computed. Pure."""

from array import array
from collections.abc import Iterable
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from evener.observe.events import SPANS, Event, mean_loss

VOIDING: Final = ("run_started", "run_resumed", "reformed")
"""Types of events that make earlier ``window`` events void, from their own ``window`` on."""

WARM_UP_WINDOWS: Final = 3
"""Windows that do not count in speeds: caches are cold and shares not settled yet."""

Floats = NDArray[np.float64]
Columns = dict[str, Floats]

ROW_NUMBERS: Final = (
    *("window", "windows", "begin_s", "end_s", "loss", "anchor", "update_parts", "session"),
    "optimizer_steps",
)
"""The numbers of a row: its last window, the number of windows, and the optimizer steps up to its
end; NaN if unknown."""

SUMS: Final = (
    *("samples", "weight", "compute_s", "wait_s", "sync_s", "data_s", "sent_bytes", "update_s"),
    *("hidden_s", "micro_batches", "steps"),
)
PART_NUMBERS: Final = ("row", "lane", *SUMS, "work_ago_s", "wait_ago_s", "sync_ago_s")
"""The numbers of a member's part in a row; sums are 0 if unknown."""

_PAUSES: Final = ("eval", "checkpoint", "checkpoint_missed")
_SESSION_STARTS: Final = ("run_started", "run_resumed", "reformed")


class RunTable:
    """Takes the events of a run one by one, in the order in which they were written.

    A row holds a window, or several that share an event (``thinning``); a part is the work of one
    member in it. Windows that a resume or a re-formed team made void are dropped; their time
    remains.

    Time is *training time*: seconds from the first event on, without those between the end of a
    session and the resume. A row begins when the team could begin with it: after the previous row,
    and after evaluations in between.

    Attributes:
        elapsed_s: Training time of the newest event.
        members: Ids of the members, by lane.
        ranks: The newest rank of each member, by lane.
        newest: The newest window event that counts.
        void_windows: Windows that were dropped.
        eval_s: When the newest evaluation began and ended.
        paused: Windows before which the run evaluated or saved.
    """

    def __init__(self) -> None:
        self.elapsed_s = 0.0
        self.members: list[str] = []
        self.ranks: list[int] = []
        self.newest: Event | None = None
        self.void_windows = 0
        self.eval_s = (0.0, 0.0)
        self.paused: set[int] = set()
        self._lanes: dict[str, int] = {}
        self._rows = array("d")
        self._parts = array("d")
        self._found: tuple[Columns, Columns] | None = None  # both by name, until the next row
        self._teams: list[frozenset[str] | None] = [None]  # by session
        self._origin_t: float | None = None
        self._free_s = self._ended_s = 0.0

    @classmethod
    def of(cls, events: Iterable[Event]) -> Self:
        """Return the table of these events."""
        table = cls()
        for event in events:
            table.add(event)
        return table

    def add(self, event: Event) -> None:
        """Take one event."""
        kind, t = event["type"], event["t"]
        if self._origin_t is None:
            self._origin_t = t
        if kind in ("run_started", "run_resumed"):
            self._origin_t = t - self.elapsed_s
            self._free_s = self.elapsed_s
        self.elapsed_s = max(self.elapsed_s, t - self._origin_t)
        if kind in VOIDING:
            self._drop(event["window"])
        if kind in _PAUSES:
            self.paused.add(event["window"])
        if kind in _SESSION_STARTS:
            team = event.get("members")
            self._teams.append(self._teams[-1] if team is None else frozenset(team))
        elif kind == "window":
            self._add_row(event, t - self._origin_t)
        elif kind == "eval":
            # It follows the previous window directly; its event may come late.
            begin_s = self._free_s
            latest_s = max(begin_s, self.elapsed_s)
            self._free_s = min(begin_s + max(0.0, event["elapsed_s"]), latest_s)
            self.eval_s = begin_s, self._free_s

    def time_of(self, t: float) -> float:
        """Return the training time of unix seconds in this session."""
        return t - (self._origin_t or 0.0)

    def __len__(self) -> int:
        return len(self._rows) // len(ROW_NUMBERS)

    def rows(self) -> Columns:
        """Return the rows by name, with ``length_s`` and team ``SUMS``; do not change them."""
        return self._columns()[0]

    def parts(self) -> Columns:
        """Return the parts by name, in the order of their rows; do not change them."""
        return self._columns()[1]

    @property
    def present(self) -> list[int]:
        """Return the lanes of the newest row, in the order of its ranks."""
        parts = self.parts()
        lanes: list[int] = parts["lane"][parts["row"] == len(self) - 1].astype(np.intp).tolist()
        return lanes

    def cells(self, name: str) -> Floats:
        """Return a number of the parts by row and lane, 0 where a member had no part."""
        parts = self.parts()
        found = np.zeros((len(self), len(self.members)))
        found[parts["row"].astype(np.intp), parts["lane"].astype(np.intp)] = parts[name]
        return found

    def lane_sums(self, counted: NDArray[np.bool_] | None = None) -> Columns:
        """Return by lane the ``SUMS`` and the number of ``windows`` with work, of counted rows."""
        rows, parts = self.rows(), self.parts()
        at = parts["row"].astype(np.intp)
        weights = np.ones(len(at)) if counted is None else counted[at].astype(np.float64)
        lanes, count = parts["lane"], len(self.members)
        sums = {name: add_up(lanes, parts[name] * weights, count) for name in SUMS}
        works = weights * (parts["weight"] > 0)
        windows = add_up(lanes, rows["windows"][at] * works, count)
        updates_s = np.minimum(parts["update_s"], parts["compute_s"])
        whole = updates_s * np.maximum(rows["update_parts"][at], 1)
        return {
            **sums,
            "windows": windows,
            "own_update_s": add_up(lanes, updates_s * works, count),
            "whole_update_s": add_up(lanes, whole * works, count),
        }

    def member_sums(self, counted: NDArray[np.bool_] | None = None) -> dict[str, dict[str, float]]:
        """Return ``lane_sums`` by member."""
        sums = self.lane_sums(counted)
        return {
            member: {name: float(values[lane]) for name, values in sums.items()}
            for lane, member in enumerate(self.members)
        }

    def measured(self) -> NDArray[np.bool_]:
        """Return which rows count as speed.

        Those of the present team, in all of its sessions (from a start, a resume or a re-form on),
        after the first ``WARM_UP_WINDOWS`` + 1 windows, or the first half of a shorter session.
        """
        rows, team = self.rows(), self._teams[-1]
        counted = np.zeros(len(self), dtype=bool)
        foreign = np.zeros(len(self), dtype=bool)
        if team is not None:
            # The main process after a lost one may record windows of the former team once more.
            others = np.array([member not in team for member in self.members], dtype=bool)
            parts = self.parts()
            is_other = others[parts["lane"].astype(np.intp)]
            foreign[parts["row"].astype(np.intp)[is_other]] = True
        for session in np.unique(rows["session"]):
            if self._teams[int(session)] != team:
                continue
            (own,) = np.nonzero((rows["session"] == session) & ~foreign)
            done = np.cumsum(rows["windows"][own])
            if len(own):
                first = min(WARM_UP_WINDOWS, (int(done[-1]) - 1) // 2) + 1
                counted[own[done > first]] = True
        return counted

    def _columns(self) -> tuple[Columns, Columns]:
        if self._found is None:
            rows = _columns(self._rows, ROW_NUMBERS)
            parts = _columns(self._parts, PART_NUMBERS)
            rows |= {name: add_up(parts["row"], parts[name], len(self)) for name in SUMS}
            rows["length_s"] = rows["end_s"] - rows["begin_s"]
            self._found = rows, parts
        return self._found

    def _add_row(self, event: Event, t_s: float) -> None:
        self._found = None
        end_s = max(t_s, self._ended_s)
        begin_s = min(max(self._free_s, self._ended_s), end_s)
        self._free_s = self._ended_s = end_s
        self.newest = event
        loss, anchor = mean_loss(event), event.get("anchor")
        row = len(self)
        for rank in event["ranks"]:
            member = rank["member"]
            lane = self._lanes.setdefault(member, len(self.members))
            if lane == len(self.members):
                self.members.append(member)
                self.ranks.append(rank["rank"])
            self.ranks[lane] = rank["rank"]
            sums = (rank.get(name) or 0.0 for name in SUMS)
            began = (rank.get(name, np.nan) for name in PART_NUMBERS[-3:])
            self._parts.extend((row, lane, *sums, *began))
        self._rows.extend(
            (
                *(event["window"], event.get("windows", 1), begin_s, end_s),
                np.nan if loss is None else loss,
                np.nan if anchor is None else anchor,
                *(event.get("update_parts", 1), len(self._teams) - 1),
                event.get("optimizer_steps", event["window"] + 1),
            )
        )

    def _drop(self, first: int) -> None:
        """Drop the windows from number ``first`` on; a row that also holds earlier ones stays."""
        self._found = None
        width, wide = len(ROW_NUMBERS), len(PART_NUMBERS)
        before = len(self)
        while self._rows and self._rows[-width] - self._rows[1 - width] + 1 >= first:
            self.void_windows += int(self._rows[1 - width])
            del self._rows[-width:]
        while self._parts and self._parts[-wide] >= len(self):
            del self._parts[-wide:]
        if len(self) < before:
            self._free_s = self.elapsed_s


def add_up(places: NDArray[Any], numbers: Floats, count: int) -> Floats:
    """Return sums of numbers by place, of ``count`` places."""
    return np.bincount(places.astype(np.intp), numbers, count).astype(np.float64)


def wait_parts(sums: Columns) -> Floats:
    """Return by lane the fraction of its time that was spent waiting, NaN without time."""
    return ratio(sums["wait_s"], sum((sums[f"{span}_s"] for span in SPANS), np.zeros(1)))


def ratio(over: Floats, under: Floats) -> Floats:
    """Return ``over / under``, NaN where ``under`` is 0."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return np.where(under > 0, over / under, np.nan)


def _columns(numbers: "array[float]", names: tuple[str, ...]) -> Columns:
    table = np.array(numbers).reshape(-1, len(names))
    return dict(zip(names, table.T, strict=True))
