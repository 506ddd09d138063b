from pathlib import Path

import pytest

from evener.observe.events import make_event
from evener.observe.following import read_events
from evener.observe.jsonl import JsonlSink
from evener.observe.measuring import measure
from evener.observe.table import RunTable
from evener.observe.thinning import merge, stride
from helpers.event_cases import committed_window, started
from helpers.limits import PATIENCE_S
from helpers.lineage import check_exactly_once


def test_the_stride_doubles_with_the_number_of_windows() -> None:
    assert [stride(k, 2, 100) for k in (0, 99, 100, 199, 200, 399, 400)] == [1, 1, 2, 2, 4, 4, 8]
    assert stride(99, 8, 100) == 2, "events of large teams are larger"
    # A run of twice the length has half as many further events as it had of the first windows.
    assert sum(1 / stride(k, 2, 100) for k in range(12_800)) == pytest.approx(450)


def test_the_file_of_a_long_run_is_short_and_has_the_same_sums(tmp_path: Path) -> None:
    events = [started(), *(committed_window(k) for k in range(1000))]
    with JsonlSink(tmp_path / "events.jsonl", full_windows=50) as sink:
        for event in events:
            sink.emit(event)
    found = read_events(tmp_path / "events.jsonl")
    assert 150 < len(found) < 200
    assert check_exactly_once(found, 10_000) == []
    first, last = RunTable.of(events), RunTable.of(found)
    assert measure(first).speed == measure(last).speed == 100.0
    assert measure(first).alone == pytest.approx(measure(last).alone)
    for name, values in first.lane_sums().items():
        assert values == pytest.approx(last.lane_sums()[name]), name


def test_no_event_holds_windows_on_both_sides_of_a_checkpoint_or_another_event(
    tmp_path: Path,
) -> None:
    plan = {"generation": 0, "epoch": 0, "start": 0, "size": 10, "shares": [6, 4]}
    saved = make_event("checkpoint", t=41.0, window=41, path="p", num_bytes=1, write_s=0.1)
    with JsonlSink(tmp_path / "events.jsonl", full_windows=1) as sink:
        for k in range(32, 48):
            sink.emit(make_event("plan", t=float(k), window=k, **plan))
            sink.emit(committed_window(k))
            if k == 37:
                (written,) = sink.pending()  # the state of a checkpoint is copied
                assert written.wait(PATIENCE_S)
                assert read_events(tmp_path / "events.jsonl")[-1]["type"] == "plan"
            if k == 40:
                sink.emit(saved)
    found = read_events(tmp_path / "events.jsonl")
    rows = [(e["window"], e.get("windows", 1)) for e in found if e["type"] == "window"]
    assert rows == [(37, 6), (40, 3), (47, 7)]
    plans = [event["window"] for event in found if event["type"] == "plan"]
    assert plans == [32, 37, 38, 40, 41, 47], "of those in a row the newest"


def test_merged_windows_have_sums_means_and_joined_ranges() -> None:
    one, two = committed_window(0, losses=(1.0, 2.0)), committed_window(1, losses=(2.0, None))
    for event in (one, two):
        event["ranks"][0] |= {"sent_bytes": 5, "work_ago_s": 0.5}
    merged = merge(one | {"lr": 0.1}, two | {"lr": 0.2})
    assert (merged["window"], merged["windows"], merged["lr"]) == (1, 2, 0.2)
    assert merged["committed"] == [[0, 20]]
    first, second = merged["ranks"]
    assert (first["samples"], first["loss"], first["sent_bytes"]) == (12, 1.5, 10)
    assert first["compute_s"] == pytest.approx(1.4)
    assert "work_ago_s" not in first
    assert (second["loss"], merged["loss"]) == (None, None), "one was not finite"
