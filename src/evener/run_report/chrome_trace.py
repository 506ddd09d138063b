"""A run as a Chrome trace, which Perfetto and ``chrome://tracing`` open. Pure.

The format is the `Trace Event Format`: complete events (``X``) with a begin and a length in
microseconds, instants (``i``), counters (``C``) and names of processes and threads (``M``).
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

from evener.observe.events import SPANS
from evener.run_report.history import BEGIN_COLUMNS, Lane, RunHistory

_TEAM: Final = 1  # process id; those of the ranks follow. Viewers take 0 for the idle process.
_WINDOWS, _EVALUATIONS, _CHECKPOINTS = 1, 2, 3  # tracks of a process
Trace = Iterator[dict[str, Any]]


def trace_events(name: str, history: RunHistory) -> Trace:
    """Yield the events of a trace.

    Each rank is a process of its own with one track: a slice for each window, and in it waiting for
    data, compute, wait and exchange. A span of several pieces is drawn as one. What does not fit
    into its window, as exchanges in the background do not, is drawn shorter; ``args`` holds what
    was measured. Events of earlier versions do not say when spans began: there they follow one
    another up to the end of the window. The process "team" has evaluations, checkpoints, membership
    changes, changed plans, and counters for loss, speed and bytes.

    Args:
        name: What the run is called.
        history: Its events.
    """
    yield from _named(_TEAM, 0, f"team of {name}", "windows")
    for track, name in ((_EVALUATIONS, "evaluations"), (_CHECKPOINTS, "checkpoints")):
        yield _meta(_TEAM, track, "thread_name", name=name)
    yield from _team(history)
    lanes = sorted(history.lanes.values(), key=lambda lane: (lane.rank, lane.member))
    for pid, lane in enumerate(lanes, start=_TEAM + 1):
        device = f", {lane.device}" if lane.device else ""
        yield from _named(pid, pid, f"rank {lane.rank} ({lane.member}{device})", "windows")
        yield from _lane(pid, lane, history)


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
            "s": "g",
            **_place(_TEAM, _WINDOWS),
            "ts": _us(one.t_s),
            "name": one.kind,
            "args": {"text": one.text, "window": one.window},
        }
    columns = history.columns
    for i in range(len(history)):
        length_s = columns["end_s"][i] - columns["begin_s"][i]
        weight = sum(lane.columns["weight"][i] for lane in history.lanes.values())
        speed = weight / length_s if length_s > 0 else math.nan
        sent = sum(lane.columns["sent_bytes"][i] for lane in history.lanes.values())
        counters = {"loss": columns["loss"][i], "units per second": speed}
        if sent:
            counters["bytes sent"] = sent
        for counter, value in counters.items():
            if math.isfinite(value):
                yield {
                    "ph": "C",
                    **_place(_TEAM, _WINDOWS),
                    "ts": _us(columns["end_s"][i]),
                    "name": counter,
                    "args": {counter: value},
                }


def _tracked(track: int, spans: Sequence[tuple[str, float, float, dict[str, Any]]]) -> Trace:
    """Put spans on a track one after another: on one track they must not overlap partly."""
    free_us = 0
    for name, begin_s, end_s, args in sorted(spans, key=lambda span: span[2]):
        begin_us, end_us = max(free_us, _us(begin_s)), max(free_us, _us(end_s))
        yield _slice(_TEAM, track, name, begin_us, end_us, args)
        free_us = end_us


def _lane(pid: int, lane: Lane, history: RunHistory) -> Trace:
    columns, own = history.columns, lane.columns
    for i in range(len(history)):
        spent_s = [own[f"{span}_s"][i] for span in SPANS]
        if not any(spent_s) and not own["samples"][i]:
            continue  # it was not there, or parked
        begin_us, end_us = _us(columns["begin_s"][i]), _us(columns["end_s"][i])
        args = {
            "samples": own["samples"][i],
            "weight": own["weight"][i],
            "sent_bytes": own["sent_bytes"][i],
            **{f"{span}_s": value for span, value in zip(SPANS, spent_s, strict=True)},
        }
        ago_s = [own[name][i] for name in BEGIN_COLUMNS]
        yield _slice(pid, _WINDOWS, f"window {columns['window'][i]:.0f}", begin_us, end_us, args)
        for span, (start_us, stop_us) in zip(
            SPANS, laid_out(begin_us, end_us, spent_s, ago_s), strict=True
        ):
            if stop_us > start_us:
                yield _slice(pid, _WINDOWS, span, start_us, stop_us, {})


def laid_out(
    begin_us: int, end_us: int, spent_s: Sequence[float], ago_s: Sequence[float] = ()
) -> list[tuple[int, int]]:
    """Return begin and end of the parts of a window, in their order and without overlap.

    Args:
        begin_us: Microsecond at which the window could begin.
        end_us: Microsecond at which it was applied.
        spent_s: Seconds of the parts, in their order.
        ago_s: When each began, in seconds before the end. Where that is not known, parts follow one
            another up to the end.
    """
    if ago_s and all(map(math.isfinite, ago_s)):
        begins = [max(begin_us, min(end_us, end_us - _us(max(0.0, ago)))) for ago in ago_s]
        parts, limit_us = [], end_us
        for begin, seconds in zip(reversed(begins), reversed(spent_s), strict=True):
            start_us = min(begin, limit_us)
            parts.append((start_us, min(limit_us, start_us + _us(min(seconds, 1e9)))))
            limit_us = start_us
        return parts[::-1]
    total_s = sum(spent_s)
    room_us = end_us - begin_us
    scale = min(1e6, room_us / total_s) if total_s > 0 else 0.0
    bounds = [end_us - round(total_s * scale)]
    done_s = 0.0
    for seconds in spent_s:
        done_s += seconds
        bounds.append(min(end_us, bounds[0] + round(done_s * scale)))
    bounds[0] = max(begin_us, bounds[0])
    return list(pairwise(bounds))


def _slice(
    pid: int, track: int, name: str, begin_us: int, end_us: int, args: dict[str, Any]
) -> dict[str, Any]:
    span = {"ph": "X", **_place(pid, track), "ts": begin_us, "dur": end_us - begin_us}
    return {**span, "name": name, "cat": "evener", "args": args}


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
