"""Whatever a file holds, there is a page, and it is JSON within HTML."""

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from evener.observe.events import make_event
from evener.observe.following import each_event
from evener.run_report.chrome_trace import trace_events, trace_text
from evener.run_report.document import figures
from evener.run_report.history import RunHistory
from evener.run_report.page import page
from evener.run_report.summary_facts import SummaryFacts, read_facts
from helpers.event_cases import committed_window, started, to_line

SUMMARY: dict[str, Any] = {
    "steps": 5,
    "elapsed_s": 2.5,
    "machine": {"cores": 2},
    "versions": {"torch": "2"},
    "labels": ["x", "y"],
    "confusion": [[1, 2], [3, 4]],
}

EVENTS = [
    started(backend_reason="r"),
    make_event("worker_started", t=0.0, rank=1, member="b", pid=7, host="box", device="cpu")
    | {"emulated": 3.0},
    committed_window(0, t=1.0) | {"lr": 0.1, "anchor": 3, "parked": [1]},
    make_event("plan", t=1.0, window=0, generation=0, epoch=0, start=0, size=10, shares=[6, 4]),
    make_event("eval", t=1.5, window=1, name="heldout", loss=3.0, weight=1.0, elapsed_s=0.2),
    make_event("checkpoint", t=1.6, window=1, path="p", num_bytes=9, write_s=0.1),
    make_event("checkpoint_missed", t=1.7, window=1, reason="full"),
    make_event("straggler", t=1.8, rank=1, member="b", window=1, compute_s=2.0, expected_s=1.0),
    make_event("worker_lost", t=2.0, rank=1, member="b", window=1, reason="killed"),
    make_event("reformed", t=2.1, window=1, generation=1, members=["a"]),
    make_event("worker_joined", t=2.2, rank=1, member="b", window=1, generation=2),
    make_event(
        "recovered", t=2.3, rank=1, member="b", window=1, source="a", num_bytes=5, elapsed_s=0.1
    ),
    committed_window(1, t=3.0),
    make_event("run_resumed", t=9.0, window=1, path="p", new_data=False),
    started(t=9.0),
    committed_window(1, t=10.0),
    make_event("run_finished", t=11.0, window=2, reason="completed", message=None),
]  # fmt: skip

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["</script>", "\ud800", -1, 1e308, 2**53, 10**300, -(10**400)]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=4,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of everything inside a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    found = []
    for key, one in inner:
        found.append((*path, key))
        if isinstance(one, dict | list):
            found += places(one, (*path, key))
    return found


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    copied = json.loads(json.dumps(value))
    inner = copied
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = new
    return copied


@settings(max_examples=150)
@given(data=st.data())
def test_one_damaged_value_anywhere_costs_no_more_than_its_line(data, tmp_path_factory):
    lines = [json.loads(to_line(event)) for event in EVENTS]
    number = data.draw(st.integers(0, len(lines) - 1))
    path = data.draw(st.sampled_from(places(lines[number])))
    lines[number] = replaced(lines[number], path, data.draw(json_values))
    file = tmp_path_factory.mktemp("run", numbered=True) / "events.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    history, skipped = RunHistory(), list[int]()
    for event in each_event(file, lambda line, _: skipped.append(line)):
        history.add(event)
    assert len(skipped) <= 1
    shown(history, SummaryFacts())


@settings(max_examples=60)
@given(data=st.data())
def test_a_damaged_summary_is_refused_or_shown(data):
    path = data.draw(st.sampled_from(places(SUMMARY)))
    history = RunHistory()
    for event in EVENTS:
        history.add(event)
    try:
        facts = read_facts(replaced(SUMMARY, path, data.draw(json_values)))
    except ValueError:
        return
    shown(history, facts)


def shown(history: RunHistory, facts: SummaryFacts) -> None:
    document = figures("run", history, facts, [])
    json.dumps(document, allow_nan=False)
    text = page({"version": "0", "runs": [document]})
    text.encode()
    assert text.count("</script>") == 2
    json.loads("".join(trace_text(trace_events("run", history))))
