"""What each rank did when: compute, wait and exchange, window by window. Pure."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from evener.observe.events import SPANS
from evener.run_report.history import RunHistory
from evener.run_report.sampling import Floats, bucket_ends, ratio, sums


def timeline(history: RunHistory, lanes: Sequence[str], most_bytes: int) -> dict[str, Any]:
    """Return the timeline as JSON, in whole microseconds.

    Neighbouring windows are merged, twice as many each time, until the text is short enough.

    Args:
        history: The run.
        lanes: Members, in the order in which they are shown.
        most_bytes: The text of its JSON is not longer, unless a single cell for each lane is.

    Returns:
        ``merged``: windows in a cell. For each cell its first ``window``, ``gap_us`` since the end
        of the cell before, ``length_us``. For each lane and cell ``data_us`` (of a rank that has
        waited for data), ``compute_us``, ``wait_us`` and ``sync_us``; with merged windows also
        ``most_wait``, the largest part of its time that the rank waited in one of them, in
        thousandths.
    """
    merged = 1
    while True:
        cells = _cells(history, lanes, merged)
        if merged >= len(history) or len(json.dumps(cells, separators=(",", ":"))) <= most_bytes:
            return cells
        merged *= 2


def _cells(history: RunHistory, lanes: Sequence[str], merged: int) -> dict[str, Any]:
    count = len(history)
    columns = {name: np.asarray(column) for name, column in history.columns.items()}
    starts = np.arange(0, count, merged)
    begin_us = _microseconds(columns["begin_s"][starts])
    end_us = _microseconds(columns["end_s"][bucket_ends(starts, count)])
    before_us = np.concatenate([[0], end_us[:-1]]) if count else end_us
    ranks = []
    for member in lanes:
        spent = {name: np.asarray(history.lanes[member].columns[f"{name}_s"]) for name in SPANS}
        if not spent["data"].any():
            del spent["data"]
        row = {
            f"{name}_us": _microseconds(sums(values, starts)).tolist()
            for name, values in spent.items()
        }
        if merged > 1:
            part = ratio(spent["wait"], np.sum([*spent.values()], axis=0))
            largest = np.maximum.reduceat(np.nan_to_num(part), starts)
            row["most_wait"] = np.rint(1000 * largest).astype(np.int64).tolist()
        ranks.append(row)
    return {
        "merged": merged,
        "window": columns["window"][starts].astype(np.int64).tolist(),
        "gap_us": (begin_us - before_us).tolist(),
        "length_us": (end_us - begin_us).tolist(),
        "ranks": ranks,
    }


def _microseconds(seconds: Floats) -> "np.ndarray[Any, np.dtype[np.int64]]":
    return np.rint(np.minimum(seconds, 1e11) * 1e6).astype(np.int64)
