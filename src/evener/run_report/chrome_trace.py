"""A run as a Chrome trace, which Perfetto and ``chrome://tracing`` open. Pure.

The format is the `Trace Event Format`: complete events (``X``) with a begin and a length in
microseconds, instants (``i``), counters (``C``) and names of processes and threads (``M``).
"""

import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from evener.observe.events import SPANS, Event, RankRow
from evener.observe.lineage import Voids
from evener.run_report.history import CommittedWindow, RunHistory

_TEAM: Final = 1  # process id; those of the ranks follow. Viewers take 0 for the idle process.
_WINDOWS, _EVALUATIONS, _CHECKPOINTS = 1, 2, 3  # tracks of a process
_EVENTS: Final = _WINDOWS  # of the team
Trace = Iterator[dict[str, Any]]


def trace_events(name: str, events: Iterable[Event], voids: Voids | None = None) -> Trace:
    """Yield the events of a trace.

    Each rank is a process of its own with one track: a slice for each window, and in it waiting for
    data, compute, wait and exchange. A span of several pieces is drawn as one. What does not fit
    into its window, as exchanges in the background do not, is drawn shorter; ``args`` holds what
    was measured. The process "team" has evaluations, checkpoints, membership changes, changed
    plans, and counters for loss, speed and bytes.

    Args:
        name: What the run is called.
        events: Its events; those that cannot be are left out.
        voids: Which windows are void.
    """
    history = RunHistory(voids, most_kept=0, most_listed=sys.maxsize)
    newest = None
    for event in events:
        with suppress(ValueError):
            history.add(event)
        if history.newest is not None and history.newest is not newest:
            newest = history.newest
            yield from _window(newest, list(history.lanes))
    yield from _named(_TEAM, 0, f"team of {name}", "events")
    for track, name in ((_EVALUATIONS, "evaluations"), (_CHECKPOINTS, "checkpoints")):
        yield _meta(_TEAM, track, "thread_name", name=name)
    yield from _team(history)
    lanes = list(history.lanes.values())
    by_rank = sorted(lanes, key=lambda lane: (lane.rank, lane.member))
    for order, lane in enumerate(by_rank, start=1):
        device = f", {lane.device}" if lane.device else ""
        process = f"rank {lane.rank} ({lane.member}{device})"
        yield from _named(_TEAM + 1 + lanes.index(lane), order, process, "windows")


def trace_text(events: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the JSON of a trace in pieces: large traces are never whole in memory."""
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
            (f"evaluation {one.name}", one.begin_s, one.end_s, {"loss": _finite(one.loss)})
            for one in history.evals
        ],
    )
    yield from _tracked(
        _CHECKPOINTS,
        [
            (
                f"{what} after window {one.window}",
                max(0.0, one.t_s - before_s),
                max(0.0, one.t_s - before_s + length_s),
                {"path": one.path, "num_bytes": one.num_bytes, "rank": one.rank},
            )
            for one in history.checkpoints
            for what, before_s, length_s in (
                ("copy for a checkpoint", one.write_s + one.copy_s, one.copy_s),
                ("checkpoint", one.write_s, one.write_s),
            )
            if length_s > 0
        ],
    )
    for one in [*history.incidents, *history.reasons]:
        yield {
            "ph": "i",
            "s": "t",
            **_place(_TEAM, _EVENTS),
            "ts": _us(one.t_s),
            "name": one.kind,
            "args": {"text": one.text, "window": one.window},
        }


def _tracked(track: int, spans: Sequence[tuple[str, float, float, dict[str, Any]]]) -> Trace:
    """Put spans on a track one after another: on one track they must not overlap partly."""
    free_us = 0
    for name, begin_s, end_s, args in sorted(spans, key=lambda span: span[2]):
        begin_us, end_us = max(free_us, _us(begin_s)), max(free_us, _us(end_s))
        yield _slice(_TEAM, track, name, begin_us, end_us, args)
        free_us = end_us


def _window(window: CommittedWindow, members: Sequence[str]) -> Trace:
    begin_us, end_us = _us(window.begin_s), _us(window.end_s)
    for pid, member in enumerate(members, start=_TEAM + 1):
        if member in window.rows:
            yield from _part(pid, window.rows[member], f"window {window.number}", begin_us, end_us)
    length_s = window.end_s - window.begin_s
    weight = sum(row["weight"] for row in window.rows.values())
    sent = sum(row.get("sent_bytes", 0) for row in window.rows.values())
    speed = weight / length_s if length_s > 0 else math.nan
    # Perfetto calls them by name and key, such as "loss mean".
    counters = (
        ("loss", "mean", window.loss),
        ("units", "per second", speed),
        ("bytes", "sent", sent or math.nan),
    )
    for name, key, value in counters:
        if math.isfinite(value):
            place = {**_place(_TEAM, _EVENTS), "ts": end_us}
            yield {"ph": "C", **place, "name": name, "args": {key: value}}


def _part(pid: int, row: RankRow, name: str, begin_us: int, end_us: int) -> Trace:
    spent_s = [row.get("data_s", 0.0), row["compute_s"], row["wait_s"], row["sync_s"]]
    if not any(spent_s) and not row["samples"]:
        return  # it was parked
    args = {"samples": row["samples"], "weight": row["weight"]}
    args |= {"sent_bytes": row.get("sent_bytes", 0)}
    args |= {f"{span}_s": value for span, value in zip(SPANS, spent_s, strict=True)}
    yield _slice(pid, _WINDOWS, name, begin_us, end_us, args)
    work, wait, sync = row.get("work_ago_s"), row.get("wait_ago_s"), row.get("sync_ago_s")
    if work is None or wait is None or sync is None:
        return  # a damaged line does not say when the spans began
    ago_s = work, max(0.0, work - spent_s[0]), wait, sync
    for span, (start_us, stop_us) in zip(
        SPANS, laid_out(begin_us, end_us, spent_s, ago_s), strict=True
    ):
        if stop_us > start_us:
            yield _slice(pid, _WINDOWS, span, start_us, stop_us, {})


def laid_out(
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


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
