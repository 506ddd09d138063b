"""The figures of a run as one JSON document, for the page and other programs. Pure."""

from collections.abc import Sequence
from typing import Any, Final, Literal

import numpy as np

from evener.observe.estimate import Estimate, contribution
from evener.observe.events import SPANS
from evener.observe.measuring import parts_of_time
from evener.observe.numbers import human_duration
from evener.observe.progress_line import progress_line
from evener.observe.table import SUMS, ratio, wait_parts
from evener.observe.waiting import Waits
from evener.run_report.curves import number, numbers, series, timeline
from evener.run_report.history import MOST_LISTED, RunHistory
from evener.run_report.summary_facts import SummaryFacts
from evener.run_report.verdict import judge
from evener.simulation.changes import Predictor

MOST_POINTS: Final = 1500
"""The most points of a curve: the columns of pixels of a wide screen."""

MOST_NUMBERS: Final = 250_000
"""The most numbers in all curves of a page; each takes about 7 bytes."""

MOST_TIMELINE_NUMBERS: Final = 850_000
"""The most numbers in all timelines of a page; windows are merged if there would be more."""

MOST_PAIRED: Final = 64
"""The most ranks for which the page has the waits of each pair."""

Presence = Literal["here", "gone", "replaced", "parked", "ended"]
"""Whether a member of the team takes part; a departed one may be replaced by another."""


# Sums of extreme values become infinite, and null in the document.
@np.errstate(over="ignore", invalid="ignore")
def figures(
    name: str,
    history: RunHistory,
    facts: SummaryFacts,
    notes: Sequence[str],
    *,
    divisor: int = 1,
    is_running: bool | None = None,
    predict: Predictor | None = None,
) -> dict[str, Any]:
    """Return the document of a run.

    Args:
        name: Name of the run.
        history: Its events.
        facts: The facts of its summary.
        notes: Notes about parts that could not be read.
        divisor: Divides the size limit of a page, for example by the number of runs in it.
        is_running: Whether its processes are running; ``None`` if unknown.
        predict: Predicts the gain of advice; ``None`` leaves gains out, which is faster.
    """
    table = history.table
    order = sorted(range(len(table.members)), key=lambda i: (table.ranks[i], table.members[i]))
    lanes = np.array(order, dtype=np.intp)
    waits = Waits.of(table)
    verdict = judge(history, waits, predict)
    ranks = _ranks(history, order, verdict.estimate, waits, is_running=is_running)
    most = MOST_NUMBERS // divisor // (3 * (4 + 2 * len(order)))
    parked = [lane for lane, row in zip(order, ranks, strict=True) if row["parked"]]
    return {
        "name": name,
        "notes": list(notes),
        "run": _run(history, facts, is_running=is_running),
        "is_running": bool(is_running) and history.ending is None,
        "line": progress_line(table, history.facts),
        "verdict": verdict.document(),
        "advice": [
            {"kind": one.kind, "text": one.text, "key": one.key, "gain": number(one.gain)}
            for one in verdict.advice
        ],
        "team": _team(history, verdict.estimate),
        "ranks": ranks,
        "waits": _waits(history, waits, order, verdict.waits),
        "series": series(table, lanes, parked, max(20, min(MOST_POINTS, most))),
        "evals": _evals(history),
        "events": history.incidents,
        "flags": _flags(history),
        "checkpoints": history.checkpoints,
        "decisions": history.decisions,
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


def _team(history: RunHistory, estimate: Estimate) -> dict[str, Any]:
    table = history.table
    rows = table.rows()
    sums = {name: float(rows[name].sum()) for name in SUMS}
    parts = parts_of_time(table)
    known = rows["loss"][np.isfinite(rows["loss"])]
    evals = [one["loss"] for one in history.evals if one["loss"] is not None]
    return {
        "samples": number(sums["samples"]),
        "weight": number(sums["weight"]),
        "speed": number(estimate.speed),
        "best_alone": number(max(estimate.alone.values(), default=None)),
        "ideal": number(estimate.ideal),
        "of_best_alone": number(estimate.of_fastest),
        "of_ideal": number(estimate.of_ideal),
        "last_loss": number(float(known[-1])) if len(known) else None,
        "heldout_loss": number(evals[-1] if evals else None),
        **{f"{span}_fraction": number(parts.get(span)) for span in SPANS},
        "sent_bytes": number(sums["sent_bytes"] or None),
    }


def _ranks(
    history: RunHistory,
    order: Sequence[int],
    estimate: Estimate,
    waits: Waits,
    *,
    is_running: bool | None,
) -> list[dict[str, Any]]:
    table = history.table
    sums = table.lane_sums()
    shares = ratio(sums["weight"], np.full(len(order), sums["weight"].sum()))
    waited = wait_parts(sums)
    rows = []
    present = frozenset(table.present)
    newest = table.newest or {}
    at_work = {row["rank"]: row["member"] for row in newest.get("ranks", ())}
    parked = {at_work.get(rank) for rank in newest.get("parked", ())}
    for lane in order:
        member, rank = table.members[lane], table.ranks[lane]
        presence: Presence = "parked" if member in parked else "here"
        if history.ending is not None or is_running is False:
            presence = "ended"
        elif member in history.gone:
            presence = "replaced" if at_work.get(rank, member) != member else "gone"
        worker = history.workers.get(member, {})
        own = {name: number(float(sums[name][lane])) for name in SUMS}
        rows.append(
            {
                "rank": rank,
                "member": member,
                "host": worker.get("host", ""),
                "device": worker.get("device", ""),
                "emulated": number(history.slowed(lane)),
                "parked": member in parked,
                "presence": presence,
                "why_gone": history.gone.get(member, (None,))[0],
                **own,
                "sent_bytes": own["sent_bytes"] or None,
                "share": number(float(shares[lane])),
                "wait_fraction": number(float(waited[lane])),
                "alone": number(estimate.alone.get(rank) if lane in present else None),
                "adds": number(estimate.adds(rank) if lane in present else None),
                "contribution": contribution(estimate, rank) if lane in present else "–",
                "windows_last": int(waits.windows_last[lane]),
                "waited_for_s": number(float(waits.waited_for_s[lane])),
                "delay_s": number(float(waits.delay_s[lane])),
            }
        )
    return rows


def _waits(history: RunHistory, waits: Waits, order: Sequence[int], text: str) -> dict[str, Any]:
    table = history.table
    named = [one["text"] for one in history.incidents if one["type"].startswith("straggler")]
    warned = f" Named during the run: {'; '.join(named[:3])}." if named else ""
    pairs_s = waits.pairs_s[np.ix_(order, order)]
    return {
        "ranks": [table.ranks[lane] for lane in order],
        "members": [table.members[lane] for lane in order],
        "seconds": [*map(numbers, pairs_s)] if len(order) <= MOST_PAIRED else None,
        "culprit": None if waits.culprit is None else table.ranks[waits.culprit],
        "text": text + warned,
    }


def _flags(history: RunHistory) -> list[dict[str, Any]]:
    """Return the marks of charts, in order of time."""
    fields = ("kind", "t_s", "window", "rank", "member", "cost_s", "text")
    flags = [{name: one[name] for name in fields} for one in history.incidents if one["kind"]]
    for one in history.checkpoints:
        text = f"checkpoint {one['path']}: training stood still for {human_duration(one['copy_s'])}"
        found = {name: one[name] for name in ("t_s", "window", "rank")}
        flags.append(
            {**found, "kind": "checkpoint", "member": None, "cost_s": one["copy_s"], "text": text}
        )
    return sorted(flags, key=lambda flag: flag["t_s"])


def _evals(history: RunHistory) -> list[dict[str, Any]]:
    """Return the evaluations, each with the samples before it; if there are many, some of them.

    All windows of a row are assumed to have the same number of samples.
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
