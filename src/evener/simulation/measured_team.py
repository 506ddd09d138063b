"""A team as measured by a run: costs, disturbances and exchanges, from the table of windows."""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from evener.config.folders import find_events
from evener.errors import ConfigError
from evener.observe.events import Event
from evener.observe.following import each_event
from evener.observe.measuring import measure, parts_of_time
from evener.observe.table import RunTable, ratio
from evener.planning.elche import ANCHOR
from evener.planning.policies import ApplyPolicy
from evener.planning.speed import CostModel, SpeedModel
from evener.simulation.prediction import MeasuredRun, TeamSpec
from evener.simulation.simulated_rank import BYTES_PER_PARAMETER, Link, Noise, SimulatedRank

LEAST_WINDOWS: Final = 5
"""Least windows after the warm-up."""

_MOST_WINDOWS: Final = 20_000
"""Most rows of a run that are used, the newest: a run may take weeks."""

_MOST_TIMES: Final = 100
"""Windows that took this many times the usual time do not count: the run was suspended."""

_STRETCH: Final = 40
"""Windows after which a disturbance of a rank counts as its usual speed."""

_USUAL_FIXED: Final = 0.1
"""Fraction of a micro-batch's time that is usually fixed."""

_USUAL_BACKWARD: Final = 2 / 3
"""Fraction of a micro-batch's time that is usually backward."""

_FIELDS: Final = (
    *("samples", "micro_batches", "steps"),
    *("compute_s", "update_s", "wait_s", "sync_s", "hidden_s"),
)

Table = NDArray[np.float64]
Rows = Mapping[str, Table]
"""The windows that count, by field: ``(windows, ranks)``, in the newest order of ranks."""


def read_team(run: Path) -> TeamSpec:
    """Return the team that a run has measured.

    Args:
        run: The folder, or its ``events.jsonl``.

    Raises:
        ConfigError: It is not a run, cannot be read, or has too few windows.
    """
    return measured_team(each_event(find_events(run)), str(run))


def measured_team(events: Iterable[Event], run: str) -> TeamSpec:
    """Return what a run has measured of the team that it had at its end.

    Args:
        events: Those of the run, in the order in which they were written.
        run: Its name.

    Raises:
        ConfigError: There are too few windows, or no rank has computed anything in them.
    """
    table = RunTable()
    start: Event = {}
    for event in events:
        table.add(event)
        if event["type"] == "run_started":
            start = event
    return team_of(table, start, run)


def team_of(table: RunTable, start: Event, run: str) -> TeamSpec:
    """Return what a run has measured of the team that it had at its end.

    Args:
        table: Its windows.
        start: Its newest ``run_started``.
        run: Its name, for messages.

    Raises:
        ConfigError: As ``measured_team``.
    """
    policy = ApplyPolicy(start.get("policy", ApplyPolicy.SYNC))
    counted = _windows_that_count(table, policy)
    team = {name: values[counted] for name, values in table.rows().items()}
    num_windows = int(team["windows"].sum())
    if num_windows < LEAST_WINDOWS:
        raise ConfigError(
            f"{run} has {num_windows} windows with the work of each rank after its warm-up, and at "
            f"least {LEAST_WINDOWS} are needed to measure its ranks; let it run for longer, name "
            "another run, or give speeds by hand with --speeds"
        )
    rows = _rows(table, counted)
    computed: NDArray[np.bool_] = np.logical_or.reduce(_computed(rows))
    if not computed.any():
        raise ConfigError(
            f"no rank has computed anything in {run}, so no speed is known; name another run, or "
            "give speeds by hand with --speeds"
        )
    numbers = [table.ranks[lane] for lane in table.present]
    names = [f"rank {table.ranks[lane]} ({table.members[lane]})" for lane in table.present]
    notes = [
        f"{name} has computed nothing in these windows, so it is left out: give its speed with "
        "--add"
        for rank, name in enumerate(names)
        if not computed[rank]
    ]
    parts = max(1, int(team["update_parts"][-1]))
    ranks = {
        rank: _rank(rows, rank, name, parts) for rank, name in enumerate(names) if computed[rank]
    }
    sizes, anchor = rows["samples"].sum(axis=1), ANCHOR
    if policy is not ApplyPolicy.SYNC:
        steps = rows["steps"]
        sizes = np.ceil(rows["samples"][steps > 0] / steps[steps > 0])
        anchor = int(np.nan_to_num(team["anchor"], nan=ANCHOR).min())
        notes.append(
            "the run made local steps, in which updates are not timed separately: sync is "
            "predicted with an update for each step's samples, so its speed is underestimated"
        )
    if "params" not in start:
        notes.append("the number of parameters is not in the run's events: give --params")
    link = Link(BYTES_PER_PARAMETER * start.get("params", 0))
    if policy.in_background or (rows["samples"] > 0).sum(axis=1).max() < 2:
        why = "averaged in the background" if policy.in_background else "had one rank at work"
        notes.append(f"the run {why}, so the time of an exchange is not known: give --bandwidth")
    else:
        link = _link(rows, ranks, link.num_bytes)
    # Windows at the end of an epoch have fewer samples.
    batch_size = int(np.quantile(sizes, 0.5, method="higher"))
    estimate = measure(table, "samples")
    measured = MeasuredRun(
        policy=policy,
        estimate=estimate,
        parts=parts_of_time(table),
        window_s=float(np.median(team["length_s"] / team["windows"])),
    )
    for rank, spec in ranks.items():
        if (alone := estimate.alone.get(numbers[rank])) is not None:
            spec.alone_factor = alone / spec.alone(batch_size)
    return TeamSpec(
        ranks=tuple(ranks.values()),
        link=link,
        batch_size=batch_size,
        local_batch_size=None if policy is ApplyPolicy.SYNC else batch_size,
        anchor=anchor,
        divides_updates=parts > 1,
        source=f"{run}: {num_windows:,} windows of policy {policy}",
        notes=tuple(notes),
        measured=measured,
    )


def _windows_that_count(table: RunTable, policy: ApplyPolicy) -> NDArray[np.bool_]:
    """Return which measured rows have each rank's work, and no pause of the run."""
    counted = table.measured()
    counted[:-_MOST_WINDOWS] = False
    is_idle = table.cells("samples") == 0
    for name in ("micro_batches",) if policy is ApplyPolicy.SYNC else ("micro_batches", "steps"):
        counted &= (is_idle | (table.cells(name) > 0)).all(axis=1)
    rows = table.rows()
    counted &= ~np.isin(rows["window"] - rows["windows"] + 1, list(table.paused))
    lengths_s = rows["length_s"] / rows["windows"]
    counted &= lengths_s > 0.0  # otherwise the clock was set back in it
    if counted.any():
        counted &= lengths_s <= _MOST_TIMES * np.median(lengths_s[counted])
    return counted


def _rows(table: RunTable, counted: NDArray[np.bool_]) -> Rows:
    """Return the rows that count; the mean if a row has several windows."""
    team = table.rows()
    windows = team["windows"][counted, None]
    lanes = table.present
    rows = {name: table.cells(name)[counted][:, lanes] / windows for name in _FIELDS}
    length_s = team["length_s"][counted, None] / windows
    return {**rows, "elapsed_s": np.repeat(length_s, len(lanes), axis=1)}


def _computed(rows: Rows) -> NDArray[np.bool_]:
    """Return the windows in which a rank has computed more than its update."""
    return (rows["samples"] > 0) & (rows["compute_s"] > rows["update_s"])


def _link(rows: Rows, ranks: Mapping[int, SimulatedRank], num_bytes: int) -> Link:
    """Return the link as it was while most ranks were at work.

    How much of the exchange backward hid is measured on the rank that arrived last, as its
    exchanges did not wait for others. If backward was long enough to hide all of the exchange, the
    rest can never be hidden. Otherwise the exchange was hidden for all of backward, and the part
    that can never be hidden is unknown and counts as 0.
    """
    present = rows["samples"] > 0
    num_ranks = int(present.sum(axis=1).max())
    together = present.sum(axis=1) == num_ranks
    waits_s = np.where(present, rows["wait_s"], np.inf)[together]
    last = waits_s.argmin(axis=1)[:, np.newaxis]
    hidden_s = float(np.take_along_axis(rows["hidden_s"][together], last, axis=1).mean())
    meeting_s = float(waits_s.min(axis=1).mean())
    exposed_s = float(rows["sync_s"][together][present[together]].mean())
    ring = num_ranks / (2 * (num_ranks - 1))
    if not hidden_s:
        return Link(num_bytes, exposed_s * ring, meeting_s=meeting_s)
    # Rows wait behind gradients that are under way: a round of them is part of that time.
    exposed_s += meeting_s
    micro_batch_s = min(
        rank.last_micro_batch_s(max(1, round(rows["samples"][together, number].mean())))
        for number, rank in ranks.items()
    )
    exchange_s = exposed_s + hidden_s
    is_covered = exchange_s <= _USUAL_BACKWARD * micro_batch_s
    return Link(
        num_bytes,
        exchange_s * ring,
        hides=_USUAL_BACKWARD if is_covered else hidden_s / micro_batch_s,
        never_hidden=exposed_s / exchange_s if is_covered else 0.0,
    )


def _rank(rows: Rows, rank: int, name: str, parts: int) -> SimulatedRank:
    """Return a rank that has computed, as it was measured."""
    computed = _computed(rows)[:, rank]
    own = {field: table[:, rank] for field, table in rows.items()}
    worked = {field: column[computed] for field, column in own.items()}
    has_any = rows["micro_batches"] > 0
    sizes = rows["samples"][has_any] / rows["micro_batches"][has_any]
    micro_batch_size = math.ceil(sizes.max())
    cost = _cost(worked, parts, micro_batch_size)
    expected_s = cost.fixed_s * own["micro_batches"] + cost.per_sample_s * own["samples"]
    expected_s += cost.window_s / parts
    usual = float(worked["compute_s"].sum() / expected_s[computed].sum())
    beside_s = worked["elapsed_s"] - worked["compute_s"] - worked["wait_s"] - worked["sync_s"]
    return SimulatedRank(
        name=name,
        cost=cost.scaled(usual),
        micro_batch_size=micro_batch_size,
        overhead_s=max(0.0, float(beside_s.sum() / worked["micro_batches"].sum())),
        noise=Noise(
            tuple(_disturbances(own["compute_s"], expected_s, computed).tolist()),
            tuple(rows["elapsed_s"].max(axis=1).cumsum().tolist()),
        ),
    )


def _disturbances(compute_s: Table, expected_s: Table, computed: NDArray[np.bool_]) -> Table:
    """Return by window how many times the usual seconds of its stretch of the run a rank took.

    A simulation is shorter than most runs. If a lasting change of a speed were a disturbance, its
    figures would depend on which part of the run it repeats, and so would those with and without a
    rank differ.
    """
    factors = np.ones(len(compute_s))
    for stretch in np.array_split(np.arange(len(compute_s)), len(compute_s) // _STRETCH or 1):
        own = stretch[computed[stretch]]
        factors[own] = ratio(
            compute_s[own] * expected_s[own].sum(), expected_s[own] * compute_s[own].sum()
        )
    return factors


def _cost(rows: Rows, parts: int, micro_batch_size: int) -> CostModel:
    """Return the cost of a rank's windows, as the planner of a run learns it.

    If all windows have one size, the fixed part of a micro-batch's time cannot be measured. But the
    last micro-batch of a share, which may have a single sample, costs more than its samples. So the
    usual fraction of a full micro-batch is assumed fixed, which is the same cost for these windows.
    """
    speed = SpeedModel()
    fields = ("samples", "micro_batches", "compute_s", "update_s")
    columns = [rows[name].tolist() for name in fields]
    for samples, micro_batches, compute_s, update_s in zip(*columns, strict=True):
        speed.observe(samples, micro_batches, compute_s - update_s, update_s * parts)
    cost = speed.cost
    assert cost is not None
    if cost.fixed_s:
        return cost
    samples, micro_batches = sum(columns[0]), sum(columns[1])
    fixed_samples = min(micro_batch_size, max(columns[0])) * _USUAL_FIXED / (1.0 - _USUAL_FIXED)
    per_sample_s = cost.per_sample_s * samples / (samples + fixed_samples * micro_batches)
    return cost._replace(fixed_s=fixed_samples * per_sample_s, per_sample_s=per_sample_s)
