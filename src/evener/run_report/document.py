"""The figures of a run as one JSON document, for the page and for programs. Pure."""

from collections.abc import Sequence
from typing import Any, Final, Literal

import numpy as np

from evener.observe.events import SPANS
from evener.observe.multiples import SPEEDS_CHANGED, multiples
from evener.observe.numbers import human_duration
from evener.observe.progress_line import progress_line
from evener.observe.table import SUMS, ratio, wait_parts
from evener.run_report.curves import number, series, timeline
from evener.run_report.history import MOST_LISTED, RunHistory
from evener.run_report.summary_facts import SummaryFacts
from evener.run_report.waiting import Waits

MOST_POINTS: Final = 1500
"""The most points of a curve: as many as a wide screen has columns of pixels for it."""

MOST_NUMBERS: Final = 250_000
"""The most numbers in all curves of a page; each takes about 7 bytes of it."""

MOST_TIMELINE_NUMBERS: Final = 850_000
"""The most numbers in all timelines of a page; windows are merged where there would be more."""

Presence = Literal["here", "gone", "replaced", "parked", "ended"]
"""Whether a member of the team takes part; one that is gone may be replaced by another."""


# Sums of absurd values become infinite, and null in the document.
@np.errstate(over="ignore", invalid="ignore")
def figures(
    name: str,
    history: RunHistory,
    facts: SummaryFacts,
    notes: Sequence[str],
    *,
    divisor: int = 1,
    is_running: bool | None = None,
) -> dict[str, Any]:
    """Return the document of a run.

    Args:
        name: What the run is called.
        history: Its events.
        facts: What its summary says.
        notes: What was left out while reading.
        divisor: Divides the room of a page, such as by the runs that share it.
        is_running: Whether its processes are there; ``None`` where that is not known.
    """
    table = history.table
    order = sorted(range(len(table.members)), key=lambda i: (table.ranks[i], table.members[i]))
    lanes = np.array(order, dtype=np.intp)
    alone = table.speeds_alone()
    waits = Waits.of(table)
    ranks = _ranks(history, order, alone, waits, is_running=is_running)
    most = MOST_NUMBERS // divisor // (3 * (4 + 2 * len(order)))
    parked = [lane for lane in order if _is_parked(history, table.members[lane])]
    return {
        "name": name,
        "notes": list(notes),
        "run": _run(history, facts, is_running=is_running),
        "is_running": bool(is_running) and history.ending is None,
        "line": progress_line(table, history.facts),
        "team": _team(history, alone),
        "ranks": ranks,
        "straggler": _straggler(ranks, waits, order, history),
        "series": series(table, lanes, parked, max(20, min(MOST_POINTS, most))),
        "evals": _evals(history),
        "events": history.incidents,
        "checkpoints": history.checkpoints,
        "reasons": history.plans,
        "counts": dict(history.counts),
        "timeline": timeline(table, lanes, MOST_TIMELINE_NUMBERS // divisor),
        "confusion": None
        if facts.confusion is None
        else {"labels": facts.labels, "counts": facts.confusion},
        "machine": {key: str(value) for key, value in facts.machine.items()},
        "versions": {key: str(value) for key, value in facts.versions.items()},
    }


def _run(history: RunHistory, facts: SummaryFacts, *, is_running: bool | None) -> dict[str, Any]:
    ending = history.ending
    names = ("run", "policy", "backend", "backend_reason", "num_samples", "total_windows")
    elapsed_s = facts.elapsed_s
    return {
        **{name: history.facts.get(name) for name in names},
        "unit": history.facts.get("unit") or "samples",
        "state": ending["reason"] if ending else _UNENDED[is_running],
        "message": ending.get("message") if ending else None,
        "sessions": history.sessions,
        "windows": int(history.table.rows()["windows"].sum()),
        "void_windows": history.table.void_windows,
        "steps": facts.steps,
        "plans": history.counts["plan"],
        "elapsed_s": number(history.table.elapsed_s if elapsed_s is None else elapsed_s),
    }


_UNENDED: Final = {True: "running", False: "ended unexpectedly", None: "no end recorded"}


def _team(history: RunHistory, alone: dict[str, float]) -> dict[str, Any]:
    table = history.table
    speed = table.speed()
    times = multiples(speed, alone.values())
    rows = table.rows()
    sums = {name: float(rows[name].sum()) for name in SUMS}
    total_s = sum(sums[f"{span}_s"] for span in SPANS)
    known = rows["loss"][np.isfinite(rows["loss"])]
    evals = [one["loss"] for one in history.evals if one["loss"] is not None]
    return {
        "samples": number(sums["samples"]),
        "weight": number(sums["weight"]),
        "speed": number(speed),
        "best_alone": number(max(alone.values(), default=None)),
        "ideal": number(times.ideal),
        "of_best_alone": number(times.of_best),
        "of_ideal": number(times.of_ideal),
        "no_multiple": SPEEDS_CHANGED if times.speeds_changed else None,
        "last_loss": number(float(known[-1])) if len(known) else None,
        "heldout_loss": number(evals[-1] if evals else None),
        **{
            f"{span}_fraction": number(sums[f"{span}_s"] / total_s) if total_s > 0 else None
            for span in SPANS
        },
        "sent_bytes": number(sums["sent_bytes"] or None),
    }


def _ranks(
    history: RunHistory,
    order: Sequence[int],
    alone: dict[str, float],
    waits: Waits,
    *,
    is_running: bool | None,
) -> list[dict[str, Any]]:
    table = history.table
    slowed = history.facts.get("emulated", {})
    sums = table.lane_sums()
    shares = ratio(sums["weight"], np.full(len(order), sums["weight"].sum()))
    waited = wait_parts(sums)
    rows = []
    for lane in order:
        member = table.members[lane]
        host, device = history.workers.get(member, ("", ""))
        own = {name: number(float(sums[name][lane])) for name in SUMS}
        rows.append(
            {
                "rank": table.ranks[lane],
                "member": member,
                "host": host,
                "device": device,
                "emulated": slowed.get(str(table.ranks[lane])),
                "parked": _is_parked(history, member),
                "presence": _presence(history, lane, is_running=is_running),
                "why_gone": history.gone.get(member, (None,))[0],
                **own,
                "sent_bytes": own["sent_bytes"] or None,
                "share": number(float(shares[lane])),
                "wait_fraction": number(float(waited[lane])),
                "alone": number(alone.get(member)),
                "windows_last": int(waits.windows_last[lane]),
                "waited_for_s": number(float(waits.waited_s[lane])),
                "delay_s": number(float(waits.delay_s[lane])),
            }
        )
    return rows


def _newest_rows(history: RunHistory) -> list[Any]:
    newest = history.table.newest
    return newest["ranks"] if newest else []


def _is_parked(history: RunHistory, member: str) -> bool:
    newest = history.table.newest or {}
    parked = newest.get("parked", ())
    return any(row["member"] == member and row["rank"] in parked for row in _newest_rows(history))


def _presence(history: RunHistory, lane: int, *, is_running: bool | None) -> Presence:
    member, rank = history.table.members[lane], history.table.ranks[lane]
    if history.ending is not None or is_running is False:
        return "ended"
    if member in history.gone:
        at_work = {row["rank"]: row["member"] for row in _newest_rows(history)}
        return "replaced" if at_work.get(rank, member) != member else "gone"
    return "parked" if _is_parked(history, member) else "here"


def _straggler(
    ranks: Sequence[dict[str, Any]], waits: Waits, order: Sequence[int], history: RunHistory
) -> dict[str, Any]:
    """Return the rank that the others waited for most, and a sentence about it."""
    named = [one["text"] for one in history.incidents if one["type"].startswith("straggler")]
    told = f" Named during the run: {'; '.join(named[:3])}." if named else ""
    if waits.straggler is None:
        text = "No rank keeps the others waiting for a noteworthy part of the time."
        if waits.shared_windows == 0:
            text = "There is no window in which two ranks worked together."
        return {"rank": None, "text": text + told}
    row = ranks[order.index(waits.straggler)]
    waited_s, delay_s = waits.waited_s[waits.straggler], waits.delay_s[waits.straggler]
    part = float(waited_s / waits.team_s)
    device = f", {row['device']}" if row["device"] else ""
    text = (
        f"The others wait most for rank {row['rank']} ({row['member']}{device}): it was the last "
        f"in {row['windows_last']:,} of {waits.shared_windows:,} windows, and they waited "
        f"{human_duration(waited_s)} for it, {part:.1%} of the team's time. Had it arrived with "
        f"the next one, windows would have ended {human_duration(delay_s)} sooner"
    )
    whole_s = float(history.table.rows()["length_s"].sum())
    text += f" ({delay_s / whole_s:.1%} of the run)." if whole_s > 0 else "."
    return {
        "rank": row["rank"],
        "member": row["member"],
        "waited_for_s": number(float(waited_s)),
        "of_team_time": number(part),
        "delay_s": number(float(delay_s)),
        "text": text + told,
    }


def _evals(history: RunHistory) -> list[dict[str, Any]]:
    """Return the evaluations, each with the samples before it; of very many, some of them.

    In a row all windows are taken to have as many samples.
    """
    step = -(-len(history.evals) // MOST_LISTED) or 1
    evals = history.evals[::-step][::-1]  # with the newest
    rows = history.table.rows()
    own = rows["samples"]
    done = np.cumsum(own)
    at = np.stack([rows["window"] - rows["windows"] + 1, rows["window"] + 1], axis=1).ravel()
    samples = np.stack([done - own, done], axis=1).ravel()
    windows = [one["window"] for one in evals]
    before = np.interp(windows, at, samples) if len(at) else np.zeros(len(windows))
    fields = ("name", "window", "loss", "t_s")
    return [
        {**{name: one[name] for name in fields}, "samples": number(float(so_far))}
        for one, so_far in zip(evals, before, strict=True)
    ]
