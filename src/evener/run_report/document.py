"""The figures of a run as one JSON document, for the page and for programs. Pure."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from evener.observe.events import SPANS
from evener.observe.multiples import SPEEDS_CHANGED, multiples
from evener.observe.numbers import human_duration
from evener.observe.tally import WARM_UP_WINDOWS
from evener.run_report.history import Lane, RunHistory, SavedCheckpoint
from evener.run_report.sampling import Floats, band, bucket_starts, number, numbers, ratio
from evener.run_report.summary_facts import SummaryFacts
from evener.run_report.timeline import timeline
from evener.run_report.waiting import Waits
from evener.run_report.windows import LANE_NUMBERS, Cells, merge_at

MOST_POINTS: Final = 1500
"""The most points of a curve: as many as a wide screen has columns of pixels for it."""

MOST_NUMBERS: Final = 250_000
"""The most numbers in all curves of a page; each takes about 7 bytes of it."""

MOST_TIMELINE_BYTES: Final = 6_000_000
"""The most bytes of all timelines of a page; windows are merged where they would take more."""


# Sums of absurd values become infinite, and null in the document.
@np.errstate(over="ignore", invalid="ignore")
def figures(
    name: str,
    history: RunHistory,
    facts: SummaryFacts,
    notes: Sequence[str],
    *,
    runs: int = 1,
    most_numbers: int = MOST_NUMBERS,
    has_timeline: bool = True,
) -> dict[str, Any]:
    """Return the document of a run.

    Args:
        name: What the run is called.
        history: Its events.
        facts: What its summary says.
        notes: What was left out while reading.
        runs: Runs in the same report, which share the room.
        most_numbers: The most numbers in all curves of that report.
        has_timeline: Whether the timeline is wanted, by far the largest part.
    """
    lanes, cells = in_order(history)
    parked = [lane.member in history.parked for lane in lanes]
    speed, solo = _speeds(lanes, cells, facts, history.team_since)
    waits = Waits.of(cells)
    ranks = _ranks(history, lanes, cells, solo, waits)
    if history.num_omitted:
        notes = [*notes, f"{history.num_omitted:,} rows of further members are left out"]
    return {
        "name": name,
        "notes": list(notes),
        "run": _run(history, facts),
        "team": _team(history, cells, facts, speed, solo),
        "ranks": ranks,
        "straggler": _straggler(ranks, waits, history, float(cells["length_s"].sum())),
        "series": _series(cells, parked, most_numbers // runs),
        **_lists(history, cells),
        "num_events": history.incidents.count,
        "num_checkpoints": history.checkpoints.count,
        "timeline": timeline(cells, MOST_TIMELINE_BYTES // runs) if has_timeline else None,
        "confusion": None
        if facts.confusion is None
        else {
            "labels": list(facts.confusion.labels),
            "counts": [list(row) for row in facts.confusion.counts],
        },
        "machine": facts.machine,
        "versions": facts.versions,
    }


def in_order(history: RunHistory) -> tuple[list[Lane], Cells]:
    """Return the lanes by rank, and the windows with their rows in that order."""
    lanes = list(history.lanes.values())
    order = sorted(range(len(lanes)), key=lambda i: (lanes[i].rank, lanes[i].member))
    cells = history.windows.cells().items()
    by_rank = {name: values[order] if values.ndim == 2 else values for name, values in cells}
    return [lanes[i] for i in order], by_rank


def _lists(history: RunHistory, cells: Cells) -> dict[str, Any]:
    samples = _samples_before(cells, [one.window for one in history.evals])
    return {
        "evals": [
            {
                "name": one.name,
                "window": one.window,
                "loss": number(one.loss),
                "t_s": number(one.end_s),
                "samples": number(before),
            }
            for one, before in zip(history.evals, samples, strict=True)
        ],
        "events": [
            {"t_s": number(one.t_s), "window": one.window, "type": one.kind, "text": one.text}
            for one in history.incidents
        ],
        "checkpoints": [_checkpoint(one) for one in history.checkpoints],
        "reasons": [
            {"t_s": number(one.t_s), "window": one.window, "text": one.text}
            for one in history.reasons
        ],
    }


def _checkpoint(one: SavedCheckpoint) -> dict[str, Any]:
    return {
        "window": one.window,
        "path": one.path,
        "num_bytes": number(one.num_bytes),
        "rank": one.rank if one.rank >= 0 else None,
        "copy_s": number(one.copy_s),
        "write_s": number(one.write_s),
        "t_s": number(one.t_s),
    }


def _run(history: RunHistory, facts: SummaryFacts) -> dict[str, Any]:
    known, ending = history.facts, history.ending
    return {
        **{
            key: known.get(key)
            for key in ("run", "policy", "backend", "backend_reason", "num_samples")
        },
        "total_windows": known.get("total_windows"),
        "unit": _unit(history),
        "state": ending["reason"] if ending else "no end recorded",
        "message": ending.get("message") if ending else None,
        "sessions": history.sessions,
        "windows": len(history.windows),
        "void_windows": history.void_windows,
        "steps": facts.steps,
        "plans": history.plans,
        "elapsed_s": number(history.elapsed_s if facts.elapsed_s is None else facts.elapsed_s),
    }


def _unit(history: RunHistory) -> str:
    return str(history.facts.get("unit") or "samples")


def _speeds(
    lanes: Sequence[Lane], cells: Cells, facts: SummaryFacts, since: int
) -> tuple[float | None, tuple[Floats, str]]:
    """Return the team's units per second, those of each rank alone, and where these come from.

    The team's are those of the windows, or the rounds, from which the others come; ``None`` where
    it was not measured there. Ranks without work there have NaN.

    Args:
        lanes: The ranks.
        cells: Their windows.
        facts: What the summary says.
        since: The window in which the present team began; earlier ones do not count.
    """
    if facts.solo:  # of the members at the end
        solo = np.array([facts.solo.get(lane.member, np.nan) for lane in lanes])
        return facts.beside_solo, (solo, facts.solo_source)
    counts = _counted(cells, since)
    weight = cells["weight"][:, counts].sum(axis=1)
    solo = ratio(weight, cells["compute_s"][:, counts].sum(axis=1))
    return _speed(cells, since), (np.where(weight > 0, solo, np.nan), "compute time")


def _team(
    history: RunHistory,
    cells: Cells,
    facts: SummaryFacts,
    beside: float | None,
    solo: tuple[Floats, str],
) -> dict[str, Any]:
    speed = facts.speed
    if speed is None:
        speed = _speed(cells, history.team_since)
    known_solos = [float(one) for one in solo[0] if one > 0]
    times = multiples(beside, known_solos)
    spent = {f"{span}_s": float(cells[f"{span}_s"].sum()) for span in SPANS}
    sent = float(cells["sent_bytes"].sum())
    total_s = sum(spent.values())
    losses = ratio(cells["loss_over"], cells["loss_under"])
    known = losses[np.isfinite(losses)]
    evals = [one.loss for one in history.evals if np.isfinite(one.loss)]
    heldout = facts.heldout_loss
    if heldout is None and evals:
        heldout = evals[-1]
    return {
        "samples": number(float(cells["samples"].sum())),
        "weight": number(float(cells["weight"].sum())),
        "speed": number(speed),
        "solo_source": solo[1],
        "best_alone": number(max(known_solos)) if known_solos else None,
        "ideal": number(times.ideal),
        "of_best_alone": number(times.of_best),
        "of_ideal": number(times.of_ideal),
        "no_multiple": SPEEDS_CHANGED if times.speeds_changed else None,
        "equal_split": number(facts.equal_split),
        "last_loss": number(float(known[-1])) if len(known) else None,
        "heldout_loss": number(heldout),
        **{
            f"{key.removesuffix('_s')}_fraction": number(value / total_s) if total_s > 0 else None
            for key, value in spent.items()
        },
        "sent_bytes": number(sent) if sent else None,
    }


def _speed(cells: Cells, since: int) -> float | None:
    """Return units per second after the warm-up from a window on, without evaluations."""
    counts = _counted(cells, since)
    length_s = float(cells["length_s"][counts].sum())
    return float(cells["weight"][:, counts].sum() / length_s) if length_s > 0 else None


def _counted(cells: Cells, since: int) -> Any:
    """Return which cells count as speed: those after the warm-up from a window on."""
    done = np.cumsum(np.where(cells["first"] >= since, cells["windows"], 0.0))
    first = min(WARM_UP_WINDOWS, (int(done[-1]) - 1) // 2) + 1 if len(done) else 0
    return done > first


def _ranks(
    history: RunHistory,
    lanes: Sequence[Lane],
    cells: Cells,
    solo: tuple[Floats, str],
    waits: Waits,
) -> list[dict[str, Any]]:
    slowed = history.facts.get("emulated", {})
    weight = float(cells["weight"].sum())
    rows = []
    for i, lane in enumerate(lanes):
        own = {key: float(cells[key][i].sum()) for key in LANE_NUMBERS}
        spent_s = own["compute_s"] + own["wait_s"] + own["sync_s"]
        rows.append(
            {
                "rank": lane.rank,
                "member": lane.member,
                "host": lane.host,
                "device": lane.device,
                "emulated": slowed.get(str(lane.rank)),
                "parked": lane.member in history.parked,
                **{key: number(value) for key, value in own.items()},
                "sent_bytes": number(own["sent_bytes"]) if own["sent_bytes"] else None,
                "share": number(own["weight"] / weight) if weight > 0 else None,
                "wait_fraction": number(own["wait_s"] / spent_s) if spent_s > 0 else None,
                "alone": number(float(solo[0][i])),
                "windows_last": int(waits.windows_last[i]),
                "waited_for_s": number(float(waits.waited_s[i])),
                "delay_s": number(float(waits.delay_s[i])),
            }
        )
    return rows


def _straggler(
    ranks: Sequence[dict[str, Any]], waits: Waits, history: RunHistory, whole_s: float
) -> dict[str, Any]:
    """Return the rank that the others waited for most, and a sentence about it."""
    named = [one.text for one in history.incidents if one.kind.startswith("straggler")]
    told = f" Named during the run: {'; '.join(named[:3])}." if named else ""
    if waits.straggler is None:
        text = "No rank keeps the others waiting for a noteworthy part of the time."
        if waits.shared_windows == 0:
            text = "There is no window in which two ranks worked together."
        return {"rank": None, "text": text + told}
    row = ranks[waits.straggler]
    waited_s, delay_s = waits.waited_s[waits.straggler], waits.delay_s[waits.straggler]
    part = float(waited_s / waits.team_s)
    device = f", {row['device']}" if row["device"] else ""
    text = (
        f"The others wait most for rank {row['rank']} ({row['member']}{device}): it was the last "
        f"in {row['windows_last']:,} of {waits.shared_windows:,} windows, and they waited "
        f"{human_duration(waited_s)} for it, {part:.1%} of the team's time. Had it arrived with "
        f"the next one, windows would have ended {human_duration(delay_s)} sooner"
    )
    text += f" ({delay_s / whole_s:.1%} of the run)." if whole_s > 0 else "."
    return {
        "rank": row["rank"],
        "member": row["member"],
        "waited_for_s": number(float(waited_s)),
        "of_team_time": number(part),
        "delay_s": number(float(delay_s)),
        "text": text + told,
    }


def _series(cells: Cells, parked: Sequence[bool], most_numbers: int) -> dict[str, Any]:
    each = 3 * (4 + 2 * len(cells["weight"]))
    most = max(20, min(MOST_POINTS, most_numbers // each))
    points = merge_at(cells, bucket_starts(cells["windows"], most))
    count, num_points = int(cells["windows"].sum()), len(points["windows"])

    def curve(name: str, lane: Any = ...) -> dict[str, Any]:
        parts = [points[f"{name}_{part}"][lane] for part in ("over", "under", "low", "high")]
        return band(*parts, is_single=num_points == count)

    lanes = range(len(cells["weight"]))
    for lane, worked in enumerate(points["weight"] > 0):
        # Outside of its time in the team a member has no share; a share of 0 would be wrong.
        is_there = np.maximum.accumulate(worked)
        if not parked[lane]:
            is_there &= np.maximum.accumulate(worked[::-1])[::-1]
        points["shares_under"][lane, ~is_there] = np.nan
        points["shares_low"][lane, ~is_there] = points["shares_high"][lane, ~is_there] = np.nan
    return {
        "windows_per_point": number(count / num_points) if count else 0,
        "end_s": numbers(points["end_s"]),
        "samples": numbers(np.cumsum(points["samples"].sum(axis=0))),
        "window": numbers(points["last"]),
        "loss": curve("loss"),
        "speed": curve("speed"),
        "anchor": curve("anchor") if points["anchor_under"].any() else None,
        "sent_bytes": curve("sent") if points["sent_over"].any() else None,
        "shares": [curve("shares", lane) for lane in lanes],
        "waits": [curve("waits", lane) for lane in lanes],
    }


def _samples_before(cells: Cells, windows: Sequence[int]) -> list[float]:
    """Return the samples before each of these windows; in a merged cell all have as many."""
    if not len(cells["windows"]):
        return [0.0] * len(windows)
    done = np.cumsum(cells["samples"].sum(axis=0))
    begins, ends = (cells["first"], np.append(0, done)[:-1]), (cells["last"] + 1, done)
    at, samples = (np.stack(pair, axis=1).ravel() for pair in zip(begins, ends, strict=True))
    found: list[float] = np.interp(windows, at, samples).tolist()
    return found
