"""The figures of a run: what the page shows and what programs get, as one JSON document. Pure."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from evener.observe.events import SPANS
from evener.observe.numbers import human_duration
from evener.observe.tally import WARM_UP_WINDOWS
from evener.run_report.history import LANE_COLUMNS, Lane, RunHistory, SavedCheckpoint
from evener.run_report.sampling import (
    Floats,
    band,
    bucket_ends,
    bucket_starts,
    number,
    numbers,
    ratio,
)
from evener.run_report.summary_facts import SummaryFacts
from evener.run_report.timeline import timeline
from evener.run_report.waiting import Waits, count_waits

MOST_POINTS: Final = 1500
"""The most points of a curve: as many as a wide screen has columns of pixels for it."""

MOST_NUMBERS: Final = 250_000
"""The most numbers in all curves of a page; each takes about 7 bytes of it."""

MOST_TIMELINE_BYTES: Final = 6_000_000
"""The most bytes of all timelines of a page; windows are merged where they would take more."""

MOST_LISTED: Final = 500
"""The most lines of a list, such as that of the checkpoints; a longer one loses its middle."""


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
    lanes = sorted(history.lanes.values(), key=lambda lane: (lane.rank, lane.member))
    table = {
        key: np.array([lane.columns[key] for lane in lanes]).reshape(len(lanes), len(history))
        for key in LANE_COLUMNS
    }
    solo = _solo_speeds(lanes, table, facts)
    waits = count_waits(table["compute_s"], table["wait_s"], table["sync_s"])
    ranks = _ranks(history, lanes, table, solo, waits)
    if history.num_omitted:
        notes = [*notes, f"{history.num_omitted:,} rows of further members are left out"]
    return {
        "name": name,
        "notes": list(notes),
        "run": _run(history, facts),
        "team": _team(history, table, facts, solo),
        "ranks": ranks,
        "straggler": _straggler(ranks, waits, history),
        "series": _series(history, table, most_numbers // runs),
        **_lists(history, table),
        "num_evals": len(history.evals),
        "num_events": len(history.incidents),
        "num_checkpoints": len(history.checkpoints),
        "timeline": timeline(history, [lane.member for lane in lanes], MOST_TIMELINE_BYTES // runs)
        if has_timeline
        else None,
        "confusion": None
        if facts.confusion is None
        else {
            "labels": list(facts.confusion.labels),
            "counts": [list(row) for row in facts.confusion.counts],
        },
        "machine": facts.machine,
        "versions": facts.versions,
    }


def _lists(history: RunHistory, table: dict[str, Floats]) -> dict[str, Any]:
    return {
        "evals": [
            {
                "name": one.name,
                "window": one.window,
                "loss": number(one.loss),
                "t_s": number(one.end_s),
                "samples": number(_samples_before(history, table, one.window)),
            }
            for one in _shortened(history.evals)
        ],
        "events": [
            {"t_s": number(one.t_s), "window": one.window, "type": one.kind, "text": one.text}
            for one in _shortened(history.incidents)
        ],
        "checkpoints": [_checkpoint(one) for one in _shortened(history.checkpoints)],
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
        "windows": len(history),
        "void_windows": history.void_windows,
        "steps": facts.steps,
        "plans": history.plans,
        "elapsed_s": number(history.elapsed_s),
    }


def _unit(history: RunHistory) -> str:
    return str(history.facts.get("unit") or "samples")


def _solo_speeds(
    lanes: Sequence[Lane], table: dict[str, Floats], facts: SummaryFacts
) -> tuple[Floats, str]:
    """Return units per second of each rank alone, NaN where unknown, and where they come from."""
    if facts.solo:  # of the members at the end; those who had left are not part of the ideal
        return np.array([facts.solo.get(lane.member, np.nan) for lane in lanes]), facts.solo_source
    alone = ratio(table["weight"].sum(axis=1), table["compute_s"].sum(axis=1))
    recent = table["weight"][:, -max(1, table["weight"].shape[1] // 10) :]
    return np.where(recent.sum(axis=1) > 0, alone, np.nan), "compute time"


def _team(
    history: RunHistory, table: dict[str, Floats], facts: SummaryFacts, solo: tuple[Floats, str]
) -> dict[str, Any]:
    speed, ideal = facts.speed, float(np.nansum(solo[0]))
    if speed is None:
        speed = _speed(history, table)
    spent = {f"{span}_s": float(table[f"{span}_s"].sum()) for span in SPANS}
    sent = float(table["sent_bytes"].sum())
    total_s = sum(spent.values())
    losses = np.asarray(history.columns["loss"])
    known = losses[np.isfinite(losses)]
    evals = [one.loss for one in history.evals if np.isfinite(one.loss)]
    heldout = facts.heldout_loss
    if heldout is None and evals:
        heldout = evals[-1]
    best = float(np.fmax.reduce(solo[0], initial=0.0))
    return {
        "samples": number(float(table["samples"].sum())),
        "weight": number(float(table["weight"].sum())),
        "speed": number(speed),
        "solo_source": solo[1],
        "best_alone": number(best) if best > 0 else None,
        "ideal": number(ideal) if ideal > 0 else None,
        "of_best_alone": number(speed / best) if speed and best > 0 else None,
        "of_ideal": number(speed / ideal) if speed and ideal > 0 else None,
        "equal_split": number(facts.equal_split),
        "last_loss": number(float(known[-1])) if len(known) else None,
        "heldout_loss": number(heldout),
        **{
            f"{key.removesuffix('_s')}_fraction": number(value / total_s) if total_s > 0 else None
            for key, value in spent.items()
        },
        "sent_bytes": number(sent) if sent else None,
    }


def _speed(history: RunHistory, table: dict[str, Floats]) -> float | None:
    """Return units per second after the warm-up, without evaluations."""
    first = min(WARM_UP_WINDOWS, (len(history) - 1) // 2) + 1
    lengths = _lengths(history)[first:]
    if not len(lengths) or lengths.sum() <= 0:
        return None
    return float(table["weight"][:, first:].sum() / lengths.sum())


def _lengths(history: RunHistory) -> Floats:
    lengths: Floats = np.subtract(history.columns["end_s"], history.columns["begin_s"])
    return lengths


def _ranks(
    history: RunHistory,
    lanes: Sequence[Lane],
    table: dict[str, Floats],
    solo: tuple[Floats, str],
    waits: Waits,
) -> list[dict[str, Any]]:
    slowed = history.facts.get("emulated", {})
    weight = float(table["weight"].sum())
    rows = []
    for i, lane in enumerate(lanes):
        own = {key: float(table[key][i].sum()) for key in LANE_COLUMNS}
        spent_s = own["compute_s"] + own["wait_s"] + own["sync_s"]
        rows.append(
            {
                "rank": lane.rank,
                "member": lane.member,
                "host": lane.host,
                "device": lane.device,
                "emulated": slowed.get(str(lane.rank)),
                "parked": lane.rank in history.parked,
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
    ranks: Sequence[dict[str, Any]], waits: Waits, history: RunHistory
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
    whole_s = float(_lengths(history).sum())
    text += f" ({delay_s / whole_s:.1%} of the run)." if whole_s > 0 else "."
    return {
        "rank": row["rank"],
        "member": row["member"],
        "waited_for_s": number(float(waited_s)),
        "of_team_time": number(part),
        "delay_s": number(float(delay_s)),
        "text": text + told,
    }


def _series(history: RunHistory, table: dict[str, Floats], most_numbers: int) -> dict[str, Any]:
    count, lanes = len(history), len(table["weight"])
    each = 3 * (4 + 2 * lanes)
    most = max(20, min(MOST_POINTS, most_numbers // each))
    starts = bucket_starts(count, most)
    ends = bucket_ends(starts, count)
    columns = {key: np.asarray(column) for key, column in history.columns.items()}
    weight, samples = table["weight"].sum(axis=0), table["samples"].sum(axis=0)
    loss, anchor = columns["loss"], columns["anchor"]
    counted = np.where(weight > 0, weight, 0.0)
    spent_s = table["compute_s"] + table["wait_s"] + table["sync_s"]
    sent = table["sent_bytes"].sum(axis=0)
    return {
        "windows_per_point": number(count / len(starts)) if count else 0,
        "end_s": numbers(columns["end_s"][ends]),
        "samples": numbers(np.cumsum(samples)[ends]),
        "window": numbers(columns["window"][ends]),
        "loss": band(loss * counted, counted, starts),
        "speed": band(weight, _lengths(history), starts),
        "anchor": band(anchor, np.ones(count), starts) if np.isfinite(anchor).any() else None,
        "sent_bytes": band(sent, np.ones(count), starts) if sent.any() else None,
        "shares": [band(row, weight, starts) for row in table["weight"]],
        "waits": [
            band(row, whole, starts) for row, whole in zip(table["wait_s"], spent_s, strict=True)
        ],
    }


def _samples_before(history: RunHistory, table: dict[str, Floats], window: int) -> float:
    before = np.asarray(history.columns["window"]) < window
    return float(table["samples"][:, before].sum()) if len(table["samples"]) else 0.0


def _shortened(items: Sequence[Any]) -> Sequence[Any]:
    if len(items) <= MOST_LISTED:
        return items
    return [*items[: MOST_LISTED // 2], *items[-MOST_LISTED // 2 :]]
