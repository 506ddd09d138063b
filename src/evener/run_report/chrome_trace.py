"""A run as a Chrome trace, which Perfetto and ``chrome://tracing`` open. Pure.

The format is the `Trace Event Format`: complete events (``X``) with a begin and a length in
microseconds, instants (``i``), counters (``C``) and names of processes and threads (``M``).
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np

from evener.observe.events import SPANS
from evener.run_report.history import RunHistory

_TEAM: Final = 1  # process id; those of the ranks follow. Viewers take 0 for the idle process.
_WINDOWS, _EVALUATIONS, _CHECKPOINTS = 1, 2, 3  # tracks of a process
_EVENTS: Final = _WINDOWS  # of the team
Trace = Iterator[dict[str, Any]]


def trace_events(name: str, history: RunHistory) -> Trace:
    """Yield the events of a trace.

    Each rank is a process with one track: a slice for each window, and in it waiting for data,
    compute, wait and exchange. A span of several pieces is drawn as one. A span that does not fit
    into its window, such as an exchange in the background, is drawn shorter; ``args`` holds the
    measured time. The process "team" has evaluations, checkpoints, membership changes, changed
    plans, and counters for loss, speed and bytes.

    Args:
        name: Name of the run.
        history: Its events.
    """
    yield from _named(_TEAM, 0, f"team of {name}", "events")
    for track, title in ((_EVALUATIONS, "evaluations"), (_CHECKPOINTS, "checkpoints")):
        yield _meta(_TEAM, track, "thread_name", name=title)
    table = history.table
    order = sorted(range(len(table.members)), key=lambda i: (table.ranks[i], table.members[i]))
    for place, lane in enumerate(order, start=1):
        member = table.members[lane]
        device = history.workers.get(member, {}).get("device", "")
        process = f"rank {table.ranks[lane]} ({member}{f', {device}' if device else ''})"
        yield from _named(_TEAM + 1 + lane, place, process, "windows")
    yield from _team(history)
    yield from _windows(history)


def trace_text(events: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the JSON of a trace in pieces, so that a large trace is never whole in memory."""
    yield '{"displayTimeUnit":"ms","traceEvents":[\n'
    separator = ""
    for event in events:
        yield separator + json.dumps(event, separators=(",", ":"), allow_nan=False)
        separator = ",\n"
    yield "\n]}\n"


def _named(pid: int, order: int, process: str, track: str) -> Trace:
    yield _meta(pid, _WINDOWS, "process_name", name=process)
    yield _meta(pid, _WINDOWS, "process_sort_index", sort_index=order)
    yield _meta(pid, _WINDOWS, "thread_name", name=track)


def _place(pid: int, track: int) -> dict[str, int]:
    # Viewers expect the ids of Linux, where no two threads of any processes have the same one.
    return {"pid": pid, "tid": 10 * pid + track}


def _meta(pid: int, track: int, kind: str, **args: Any) -> dict[str, Any]:
    return {"ph": "M", **_place(pid, track), "ts": 0, "name": kind, "args": args}


def _team(history: RunHistory) -> Trace:
    yield from _tracked(
        _EVALUATIONS,
        [
            (f"evaluation {one['name']}", one["begin_s"], one["t_s"], {"loss": one["loss"]})
            for one in history.evals
        ],
    )
    yield from _tracked(
        _CHECKPOINTS,
        [
            (
                f"{what} after window {one['window']}",
                max(0.0, one["t_s"] - before_s),
                max(0.0, one["t_s"] - before_s + length_s),
                {name: one[name] for name in ("path", "num_bytes", "rank")},
            )
            for one in history.checkpoints
            for what, before_s, length_s in (
                ("copy for a checkpoint", one["write_s"] + one["copy_s"], one["copy_s"]),
                ("checkpoint", one["write_s"], one["write_s"]),
            )
            if length_s > 0
        ],
    )
    plans = [one for one in history.decisions if one["kind"].endswith("plan")]
    for one in [*history.incidents, *plans]:
        yield {
            "ph": "i",
            "s": "t",
            **_place(_TEAM, _EVENTS),
            "ts": _us(one["t_s"]),
            "name": one.get("type", "plan"),
            "args": {"text": one["text"], "window": one["window"]},
        }


def _tracked(track: int, spans: Sequence[tuple[str, float, float, dict[str, Any]]]) -> Trace:
    """Put spans on a track one after another: on one track they must not overlap partly."""
    free_us = 0
    for name, begin_s, end_s, args in sorted(spans, key=lambda span: span[2]):
        begin_us, end_us = max(free_us, _us(begin_s)), max(free_us, _us(end_s))
        yield _slice(_TEAM, track, name, begin_us, end_us, args)
        free_us = end_us


def _windows(history: RunHistory) -> Trace:
    rows, parts = history.table.rows(), history.table.parts()
    bounds = np.searchsorted(parts["row"], np.arange(len(history.table) + 1)).tolist()
    for row, (first, last) in enumerate(pairwise(bounds)):
        window = {name: float(values[row]) for name, values in rows.items()}
        begin_us, end_us = _us(window["begin_s"]), _us(window["end_s"])
        for i in range(first, last):
            part = {name: float(values[i]) for name, values in parts.items()}
            yield from _part(part, _title(window), begin_us, end_us)
        length_s = window["length_s"]
        # Perfetto calls them by name and key, such as "loss mean".
        counters = (
            ("loss", "mean", window["loss"]),
            ("units", "per second", window["weight"] / length_s if length_s > 0 else math.nan),
            ("bytes", "sent", window["sent_bytes"] or math.nan),
        )
        for name, key, value in counters:
            if math.isfinite(value):
                place = {**_place(_TEAM, _EVENTS), "ts": end_us}
                yield {"ph": "C", **place, "name": name, "args": {key: value}}


def _title(window: Mapping[str, float]) -> str:
    last, count = int(window["window"]), int(window["windows"])
    return f"window {last}" if count == 1 else f"windows {last - count + 1} to {last}"


def _part(part: Mapping[str, float], name: str, begin_us: int, end_us: int) -> Trace:
    spent_s = [part[f"{span}_s"] for span in SPANS]
    if not any(spent_s) and not part["samples"]:
        return  # it was parked
    pid = _TEAM + 1 + int(part["lane"])
    args = {key: part[key] for key in ("samples", "weight", "sent_bytes")}
    args |= {f"{span}_s": value for span, value in zip(SPANS, spent_s, strict=True)}
    yield _slice(pid, _WINDOWS, name, begin_us, end_us, args)
    work, wait, sync = (part[f"{key}_ago_s"] for key in ("work", "wait", "sync"))
    if not all(map(math.isfinite, (work, wait, sync))):
        return  # the spans of several windows have no common beginning
    ago_s = work, max(0.0, work - spent_s[0]), wait, sync
    for span, (start_us, stop_us) in zip(
        SPANS, _laid_out(begin_us, end_us, spent_s, ago_s), strict=True
    ):
        if stop_us > start_us:
            yield _slice(pid, _WINDOWS, span, start_us, stop_us, {})


def _laid_out(
    begin_us: int, end_us: int, spent_s: Sequence[float], ago_s: Sequence[float]
) -> list[tuple[int, int]]:
    """Return begin and end of the parts of a window, in their order and without overlap.

    Args:
        begin_us: Microsecond at which the window could begin.
        end_us: Microsecond at which it was applied.
        spent_s: Seconds of the parts, in their order.
        ago_s: When each began, in seconds before the end.
    """
    begins = [max(begin_us, min(end_us, end_us - _us(max(0.0, ago)))) for ago in ago_s]
    parts, limit_us = [], end_us
    for begin, seconds in zip(reversed(begins), reversed(spent_s), strict=True):
        start_us = min(begin, limit_us)
        parts.append((start_us, min(limit_us, start_us + _us(min(seconds, 1e9)))))
        limit_us = start_us
    return parts[::-1]


def _slice(
    pid: int, track: int, name: str, begin_us: int, end_us: int, args: dict[str, Any]
) -> dict[str, Any]:
    span = {"ph": "X", **_place(pid, track), "ts": begin_us, "dur": end_us - begin_us}
    return {**span, "name": name, "cat": "evener", "args": args}


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
