"""The timeline: compute, wait and exchange of each rank, window by window. Pure."""

import json
from typing import Any

import numpy as np

from evener.observe.events import SPANS
from evener.run_report.sampling import Floats, bucket_starts
from evener.run_report.windows import Cells, merge_at


def timeline(cells: Cells, most_bytes: int) -> dict[str, Any]:
    """Return the timeline as JSON, in whole microseconds.

    Neighbouring windows are merged, twice as many each time, until the text is short enough.

    Args:
        cells: The windows, with lanes in the order in which they are shown.
        most_bytes: The text of its JSON is not longer, unless a single cell for each lane is.

    Returns:
        ``merged``: the most windows in a cell. For each cell its first ``window``, ``gap_us`` since
        the end of the cell before, ``length_us``. For each lane and cell ``data_us`` (of a rank
        that has waited for data), ``compute_us``, ``wait_us`` and ``sync_us``; with merged windows
        also ``most_wait``, the largest part of its time that the rank waited in one of them, in
        thousandths.
    """
    num_cells = int(cells["windows"].sum())
    while True:
        found = _drawn(merge_at(cells, bucket_starts(cells["windows"], max(1, num_cells))))
        if num_cells <= 1 or len(json.dumps(found, separators=(",", ":"))) <= most_bytes:
            return found
        num_cells = -(-num_cells // 2)


def _drawn(cells: Cells) -> dict[str, Any]:
    merged = int(cells["windows"].max(initial=1))
    begin_us, end_us = _microseconds(cells["begin_s"]), _microseconds(cells["end_s"])
    ranks = []
    for lane in range(len(cells["weight"])):
        names = SPANS if cells["data_s"][lane].any() else SPANS[1:]
        row = {f"{name}_us": _microseconds(cells[f"{name}_s"][lane]).tolist() for name in names}
        if merged > 1:
            largest = 1000 * np.nan_to_num(cells["waits_high"][lane])
            row["most_wait"] = np.rint(largest).astype(np.int64).tolist()
        ranks.append(row)
    return {
        "merged": merged,
        "window": cells["first"].astype(np.int64).tolist(),
        "gap_us": (begin_us - np.append(0, end_us)[:-1]).tolist(),
        "length_us": (end_us - begin_us).tolist(),
        "ranks": ranks,
    }


def _microseconds(seconds: Floats) -> "np.ndarray[Any, np.dtype[np.int64]]":
    return np.rint(np.minimum(seconds, 1e11) * 1e6).astype(np.int64)
