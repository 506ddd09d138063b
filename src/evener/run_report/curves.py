"""Curves and the timeline of a run: neighbouring rows of its table, merged into points. Pure."""

import math
from collections.abc import Collection
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from evener.observe.events import SPANS
from evener.observe.table import Floats, RunTable, add_up, ratio

_DIGITS: Final = 6


class Points:
    """The rows of a table, merged into points of about the same number of windows.

    Args:
        table: The windows.
        lanes: Its lanes, in the order in which they are shown.
        most: Points, 1 or more.
    """

    def __init__(self, table: RunTable, lanes: "NDArray[np.intp]", most: int) -> None:
        self.rows, self.parts = table.rows(), table.parts()
        before = np.concatenate([[0.0], np.cumsum(self.rows["windows"])])
        bounds = np.arange(min(len(table), most)) * before[-1] / max(1, min(len(table), most))
        self.starts = np.unique(np.searchsorted(before[:-1], bounds, side="right") - 1)
        self.ends = np.append(self.starts[1:], len(table))[: len(self.starts)] - 1
        self.num_lanes = len(lanes)
        self._of_row = np.searchsorted(self.starts, np.arange(len(table)), side="right") - 1
        self.row = self.parts["row"].astype(np.intp)
        place = np.argsort(lanes)[self.parts["lane"].astype(np.intp)]
        self._of_part = place * len(self) + self._of_row[self.row]

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def are_merged(self) -> bool:
        """Whether some points contain several windows."""
        return bool((self.rows["windows"] > 1).any()) or len(self) < len(self.rows["windows"])

    def sums(self, of_rows: Floats) -> Floats:
        """Return sums by point of numbers by row."""
        return add_up(self._of_row, of_rows, len(self))

    def lane_sums(self, of_parts: Floats) -> Floats:
        """Return sums by lane (row) and point (column) of numbers by part."""
        found = add_up(self._of_part, of_parts, self.num_lanes * len(self))
        return found.reshape(self.num_lanes, len(self))

    def lane_extremes(self, of_parts: Floats) -> tuple[Floats, Floats]:
        """Return the least and the largest number by lane and point."""
        low, high = (np.full(self.num_lanes * len(self), np.nan) for _ in range(2))
        np.fmin.at(low, self._of_part, of_parts)
        np.fmax.at(high, self._of_part, of_parts)
        return low.reshape(self.num_lanes, -1), high.reshape(self.num_lanes, -1)

    def curve(self, over: Floats, under: Floats) -> dict[str, Any]:
        """Return the curve of ``over / under``, both by row, as JSON.

        A point's ``mean`` is the ratio of the sums. If points are merged, ``low`` and ``high`` are
        the extremes of single rows.
        """
        known = np.isfinite(over)
        over, under = np.where(known, over, 0.0), np.where(known, under, 0.0)
        curve = {"mean": numbers(ratio(self.sums(over), self.sums(under)))}
        if self.are_merged and len(self):
            single = ratio(over, under)
            curve["low"] = numbers(np.fmin.reduceat(single, self.starts))
            curve["high"] = numbers(np.fmax.reduceat(single, self.starts))
        return curve


def series(
    table: RunTable, lanes: "NDArray[np.intp]", parked: Collection[int], most: int
) -> dict[str, Any]:
    """Return the curves as JSON, of at most ``most`` points.

    Args:
        table: The windows.
        lanes: Its lanes, in the order in which they are shown.
        parked: The lanes that are parked now.
        most: Points.
    """
    points = Points(table, lanes, most)
    rows, parts, row = points.rows, points.parts, points.row
    weight, sent = rows["weight"], rows["sent_bytes"]
    num_windows = float(rows["windows"].sum())
    spent_s = parts["compute_s"] + parts["wait_s"] + parts["sync_s"]
    own = points.lane_sums(parts["weight"])
    # Outside of its time in the team a member has no share; a share of 0 would be wrong.
    there = np.maximum.accumulate(own > 0, axis=1)
    back = np.maximum.accumulate((own > 0)[:, ::-1], axis=1)[:, ::-1]
    there &= back | np.isin(lanes, list(parked))[:, None]
    has_sent, has_anchor = sent.any(), np.isfinite(rows["anchor"]).any()
    return {
        "windows_per_point": number(num_windows / len(points)) if len(points) else 0,
        "end_s": numbers(rows["end_s"][points.ends]),
        "samples": numbers(np.cumsum(points.sums(rows["samples"]))),
        "window": numbers(rows["window"][points.ends]),
        "loss": points.curve(rows["loss"] * weight, weight),
        "speed": points.curve(weight, rows["length_s"]),
        "anchor": points.curve(rows["anchor"] * rows["windows"], rows["windows"])
        if has_anchor
        else None,
        "sent_bytes": points.curve(sent, rows["windows"]) if has_sent else None,
        "shares": _lane_curves(
            points, ratio(own, points.sums(weight)), ratio(parts["weight"], weight[row]), there
        ),
        "waits": _lane_curves(
            points,
            ratio(points.lane_sums(parts["wait_s"]), points.lane_sums(spent_s)),
            ratio(parts["wait_s"], spent_s),
            np.ones(own.shape, dtype=bool),
        ),
    }


def _lane_curves(
    points: Points, mean: Floats, single: Floats, there: "NDArray[np.bool_]"
) -> list[dict[str, Any]]:
    curves = {"mean": mean}
    if points.are_merged:
        curves["low"], curves["high"] = points.lane_extremes(single)
    return [
        {name: numbers(np.where(there, values, np.nan)[lane]) for name, values in curves.items()}
        for lane in range(points.num_lanes)
    ]


def timeline(table: RunTable, lanes: "NDArray[np.intp]", most_numbers: int) -> dict[str, Any]:
    """Return the timeline as JSON, in whole microseconds.

    Args:
        table: The windows.
        lanes: Its lanes, in the order in which they are shown.
        most_numbers: Most numbers of a curve: neighbouring rows are merged until they fit.

    Returns:
        ``merged``: the most windows in a cell. For each cell its first ``window``, ``gap_us`` since
        the end of the cell before, ``length_us``. For each lane and cell ``data_us`` (of a rank
        that has waited for data), ``compute_us``, ``wait_us`` and ``sync_us``; with merged windows
        also ``most_wait``, the largest fraction of its time that the rank waited in one of them,
        in thousandths.
    """
    each = 3 + (len(SPANS) + 1) * len(lanes)
    cells = Points(table, lanes, max(1, most_numbers // each))
    rows, parts = cells.rows, cells.parts
    begin_us, end_us = (
        _microseconds(rows[name][at])
        for name, at in (("begin_s", cells.starts), ("end_s", cells.ends))
    )
    spent = {f"{name}_us": _microseconds(cells.lane_sums(parts[f"{name}_s"])) for name in SPANS}
    ranks = [
        {name: values[lane].tolist() for name, values in spent.items() if values[lane].any()}
        for lane in range(len(lanes))
    ]
    if cells.are_merged:
        spent_s = parts["compute_s"] + parts["wait_s"] + parts["sync_s"]
        _, largest = cells.lane_extremes(ratio(parts["wait_s"], spent_s))
        for rank, values in zip(ranks, 1000 * np.nan_to_num(largest), strict=True):
            rank["most_wait"] = np.rint(values).astype(np.int64).tolist()
    return {
        "merged": int(cells.sums(rows["windows"]).max(initial=1)),
        "window": (rows["window"] - rows["windows"] + 1)[cells.starts].astype(np.int64).tolist(),
        "gap_us": (begin_us - np.append(0, end_us)[:-1]).tolist(),
        "length_us": (end_us - begin_us).tolist(),
        "ranks": ranks,
    }


def numbers(values: Floats) -> list[float | None]:
    """Return an array as JSON: six digits, null for what is not finite."""
    return [number(value) for value in values.tolist()]


def number(value: float | None) -> float | None:
    """Return a number as JSON: six digits, whole where it is whole, null if it is not finite."""
    if value is None or not math.isfinite(value):
        return None
    if value == int(value) and abs(value) < 2**53:
        return int(value)
    return float(f"{value:.{_DIGITS}g}")


def _microseconds(seconds: Floats) -> "NDArray[np.int64]":
    return np.rint(np.minimum(seconds, 1e11) * 1e6).astype(np.int64)
