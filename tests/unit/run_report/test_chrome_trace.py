"""Against the Trace Event Format: https://chromium.googlesource.com/catapult (tracing docs)."""

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from evener.observe.events import Event, make_event
from evener.run_report.chrome_trace import trace_events, trace_text
from evener.run_report.history import RunHistory
from helpers.event_cases import committed_window, started

WHOLE = ("pid", "tid", "ts")


def trace_of(events: Sequence[Event]) -> list[dict[str, Any]]:
    history = RunHistory()
    for event in events:
        history.add(event)
    document = json.loads("".join(trace_text(trace_events("x", history))))
    assert set(document) == {"displayTimeUnit", "traceEvents"}
    for event in document["traceEvents"]:
        check(event)
    return document["traceEvents"]


def check(event: dict[str, Any]) -> None:
    """What the format says of each phase."""
    assert all(type(event[key]) is int and event[key] >= 0 for key in WHOLE), event
    assert isinstance(event["name"], str)
    assert isinstance(event["args"], dict)
    if event["ph"] == "X":
        assert type(event["dur"]) is int
        assert event["dur"] >= 0
    elif event["ph"] == "i":
        assert event["s"] in {"g", "p", "t"}
    elif event["ph"] == "C":
        assert all(isinstance(value, int | float) for value in event["args"].values())
    else:
        assert event["ph"] == "M"
        assert event["name"] in {"process_name", "process_sort_index", "thread_name"}


def check_nesting(events: list[dict[str, Any]]) -> None:
    """On a track two slices are apart, or one is inside the other."""
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            end = event["ts"] + event["dur"]
            tracks[event["pid"], event["tid"]].append((event["ts"], -end))
    for slices in tracks.values():
        opened: list[int] = []
        for begin, negated in sorted(slices):
            end = -negated
            while opened and opened[-1] <= begin:
                opened.pop()
            assert not opened or end <= opened[-1], slices
            opened.append(end)


def full() -> list[Event]:
    return [
        started(),
        make_event("worker_started", t=0.0, rank=0, member="a", pid=1, host="h", device="cuda:0"),
        committed_window(0, t=1.0),
        make_event("eval", t=3.0, window=1, name="heldout", loss=None, weight=1.0, elapsed_s=1.5),
        make_event("checkpoint", t=3.0, window=1, path="p", num_bytes=9, write_s=2.5),
        make_event("checkpoint", t=3.5, window=1, path="q", num_bytes=9, write_s=1e300),
        # Longer parts than there is room for: exchanged in the background.
        committed_window(1, t=4.0, times_s=((1.0, 2.0, 3.0), (2.0, 0.0, 0.0))),
        committed_window(2, t=5.0, samples=(10, 0), losses=(2.0, None), times_s=((1, 0, 0),) * 2),
        make_event("worker_lost", t=5.5, rank=1, member="b", window=3, reason="killed <b>"),
        make_event("run_finished", t=6.0, window=3, reason="failed", message="x"),
    ]


def test_each_rank_is_a_process_with_a_name_and_properly_nested_slices():
    events = trace_of(full())
    check_nesting(events)
    names = {
        event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"
    }
    assert list(names.values()) == ["team of x", "rank 0 (a, cuda:0)", "rank 1 (b)"]
    assert 0 not in names
    # No thread has the number of another, of its own process or not.
    threads = {(event["tid"], event["pid"]) for event in events}
    assert len({tid for tid, _ in threads}) == len(threads)
    slices = [e for e in events if e["ph"] == "X" and names[e["pid"]].startswith("rank 0")]
    # Without begins of spans, the windows alone are known.
    assert [e["name"] for e in slices] == ["window 0", "window 1", "window 2"]
    assert (slices[0]["ts"], slices[0]["dur"]) == (0, 1_000_000)
    assert slices[1]["args"]["sync_s"] == 3.0
    instants = [event["args"]["text"] for event in events if event["ph"] == "i"]
    assert instants[0] == "lost rank 1 (b): killed <b>"
    counters = {event["name"] for event in events if event["ph"] == "C"}
    assert counters == {"loss", "units"}


def test_spans_lie_where_events_say_and_bytes_copies_and_reasons_are_shown():
    events = trace_of(events_with_spans())
    check_nesting(events)
    rank = next(e["pid"] for e in events if e["args"].get("name", "").startswith("rank 0"))
    slices = [e for e in events if e["ph"] == "X" and e["pid"] == rank]
    assert [(e["name"], e["ts"], e["dur"]) for e in slices] == [
        ("window 0", 0, 1_000_000),
        ("data", 50_000, 100_000),
        ("compute", 150_000, 500_000),
        ("wait", 700_000, 100_000),  # cut short by what follows it
        ("sync", 800_000, 100_000),
    ]
    assert slices[0]["args"]["sent_bytes"] == 1000
    (sent,) = (e["args"] for e in events if e["name"] == "bytes")
    assert sent == {"sent": 1500}
    saved = [e for e in events if e["ph"] == "X" and "checkpoint" in e["name"]]
    assert [(e["ts"], e["dur"]) for e in saved] == [(1_150_000, 50_000), (1_200_000, 500_000)]
    (plan,) = (e["args"]["text"] for e in events if e["name"] == "plan")
    assert plan == "6 / 4: rank 1 is slower"


def events_with_spans() -> list[Event]:
    window = committed_window(0, t=1.0, times_s=((0.5, 0.2, 0.1), (0.9, 0.0, 0.1)))
    ago = {"work_ago_s": 0.95, "wait_ago_s": 0.3, "sync_ago_s": 0.2}
    spans = {"data_s": 0.1, "sent_bytes": 1000, **ago}
    window["ranks"][0] |= spans
    window["ranks"][1] |= {"sent_bytes": 500}
    plan = {"window": 0, "generation": 0, "epoch": 0, "start": 0, "size": 10, "shares": [6, 4]}
    saved = {"window": 1, "path": "p", "num_bytes": 9, "write_s": 0.5, "begin_t": 1.2}
    return [
        started(),
        make_event("plan", t=0.5, **plan, reason="rank 1 is slower"),
        window,
        make_event("checkpoint", t=3.0, **saved, copy_s=0.05, rank=0),
    ]


def test_a_run_without_windows_is_a_trace():
    assert [event["ph"] for event in trace_of([])] == ["M"] * 5


times = st.floats(0, 3, allow_subnormal=False)


@given(st.lists(st.tuples(*[times] * 7), max_size=8))
def test_whatever_ranks_measure_slices_nest(measured):
    events, t = [started()], 0.0
    for k, (length, *spent) in enumerate(measured):
        t += length
        window = committed_window(k, t=t, times_s=(tuple(spent[:3]), tuple(spent[2::-1])))
        ago = dict(zip(("work_ago_s", "wait_ago_s", "sync_ago_s"), spent[3:], strict=True))
        window["ranks"][0] |= ago
        window["ranks"][1] |= {**ago, "sync_ago_s": math.nan}
        events.append(window)
    check_nesting(trace_of(events))
