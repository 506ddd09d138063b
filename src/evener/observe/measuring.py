"""Measure the speeds of a team and of its ranks alone, in the same windows of a run. Pure."""

from typing import Literal

import numpy as np

from evener.observe.estimate import Estimate
from evener.observe.events import SPANS
from evener.observe.table import RunTable, ratio


def measure(table: RunTable, amount: Literal["weight", "samples"] = "weight") -> Estimate:
    """Return the speeds in the ``measured`` rows of a run; evaluations do not count as time.

    Alone, a rank would have computed all of these windows at the speed of its part, with the whole
    update in each of them.

    Args:
        table: The windows of the run.
        amount: The unit of speeds.
    """
    counted, rows = table.measured(), table.rows()
    windows = float(rows["windows"][counted].sum())
    length_s = float(rows["length_s"][counted].sum())
    sums = table.lane_sums(counted)
    total, own = float(rows[amount][counted].sum()), sums[amount]
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        alone_s = (sums["compute_s"] - sums["own_update_s"]) * total / own
        alone_s += sums["whole_update_s"] * windows / sums["windows"]
    speeds = ratio(np.full(len(own), total), alone_s)
    present = {table.ranks[lane]: lane for lane in table.present}
    alone = {
        rank: float(speeds[lane])
        for rank, lane in present.items()
        if own[lane] > 0 and np.isfinite(speeds[lane])
    }
    parked = frozenset((table.newest or {}).get("parked", ()))
    return Estimate(
        speed=total / length_s if length_s > 0 else None,
        alone=alone,
        parked=parked,
        unknown=present.keys() - alone.keys() - parked,
    )


def parts_of_time(table: RunTable) -> dict[str, float]:
    """Return the fraction of all ranks' time that each of ``SPANS`` took; empty for none."""
    rows = table.rows()
    spent_s = {span: float(rows[f"{span}_s"].sum()) for span in SPANS}
    total_s = sum(spent_s.values())
    return {span: own_s / total_s for span, own_s in spent_s.items()} if total_s > 0 else {}
