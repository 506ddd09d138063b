import errno
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from evener.errors import EvenerError
from evener.observe.following import read_events
from evener.observe.jsonl import MOST_WAITING, JsonlSink
from helpers.event_cases import committed_window, started
from helpers.limits import PATIENCE_S


def event(number: int, **fields: Any) -> dict[str, Any]:
    return {"t": float(number), "type": "note", "number": number, **fields}


def numbers(path: Path) -> list[int]:
    return [found["number"] for found in read_events(path)]


def flush(sink: JsonlSink) -> None:
    """Waits until what was emitted is written."""
    for written in sink.pending():
        assert written.wait(PATIENCE_S)


def test_each_event_is_a_line_that_can_be_read_while_the_run_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "new" / "events.jsonl"
    with JsonlSink(path) as sink:
        for number in range(3):
            sink.emit(event(number))
            flush(sink)
            assert numbers(path) == list(range(number + 1))
    assert path.read_bytes().count(b"\n") == 3
    with JsonlSink(path) as sink:
        sink.emit(event(3))
    assert numbers(path) == [0, 1, 2, 3]


def test_numbers_that_are_not_finite_are_strict_json(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with JsonlSink(path) as sink:
        rows = [{"x": float("inf"), "y": (0.1,)}]
        sink.emit(event(0, loss=float("nan"), rows=rows, path=path, sum=0.1 + 0.2))
    line = path.read_text()
    found = json.loads(line, parse_constant=lambda constant: pytest.fail(constant))
    assert found["loss"] is None
    assert found["rows"] == [{"x": None, "y": [0.1]}]
    assert found["path"] == str(path)
    assert found["sum"] == 0.1 + 0.2


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_torn_line_is_skipped_at_the_end_and_in_the_middle(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "events.jsonl"
    with JsonlSink(path) as sink:
        sink.emit(event(0))
        sink.emit(event(1))
    path.write_bytes(path.read_bytes()[:-cut])
    skipped: list[int] = []
    at_once = [found["number"] for found in read_events(path, lambda line, _: skipped.append(line))]
    assert (at_once, skipped) == ([0], [])  # it might be being written

    with JsonlSink(path) as sink:
        sink.emit(event(2))
    # Without its line end only, the event is whole.
    assert numbers(path) == ([0, 1, 2] if cut == 1 else [0, 2])
    read_events(path, lambda line, reason: skipped.append(line))
    assert skipped == ([] if cut == 1 else [2])


def test_full_disk_warns_once_never_raises_and_recovers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "events.jsonl"
    warnings: list[str] = []
    sink = JsonlSink(path, on_warning=warnings.append)
    sink.emit(event(0))
    real_write = os.write

    def half(file: int, data: bytes) -> int:
        return real_write(file, data[: len(data) // 2])

    def full(file: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        flush(sink)
        patch.setattr(os, "write", half)
        sink.emit(event(1))
        flush(sink)
        patch.setattr(os, "write", full)
        sink.emit(event(2))
        sink.emit(event(3))
        flush(sink)
    sink.emit(event(4))
    sink.close()
    assert numbers(path) == [0, 4]
    assert len(warnings) == 1
    assert str(path) in warnings[0]
    assert "training continues" in warnings[0]


def test_a_second_run_in_a_file_is_told_and_a_resume_is_not(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    resumed = event(0, type="run_resumed", window=3, path="saved", new_data=False)
    told: list[list[str]] = []
    for events in ([started()], [started()], [resumed, started(window=3)], [committed_window(3)]):
        told.append([])
        with JsonlSink(path, on_warning=told[-1].append) as sink:
            for one in events:
                sink.emit(one)
    assert [len(warnings) for warnings in told] == [0, 1, 0, 0]
    assert told[1][0].startswith(f"{path} holds an earlier run")


def test_an_event_that_is_no_json_costs_itself_alone(tmp_path: Path) -> None:
    def refuse(_: str) -> None:
        raise RuntimeError("nobody can be warned")

    path = tmp_path / "events.jsonl"
    with JsonlSink(path, on_warning=refuse) as sink:
        sink.emit(event(0, table={(1, 2): 3}))
        sink.emit(event(1))
    assert numbers(path) == [1]


def test_paths_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    with pytest.raises(EvenerError, match="cannot be opened"):
        JsonlSink(tmp_path)
    with pytest.raises(EvenerError, match=r"missing\.jsonl cannot be read"):
        read_events(tmp_path / "missing.jsonl")


def test_a_file_that_was_removed_is_begun_anew_with_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "run" / "events.jsonl"
    warnings: list[str] = []
    with JsonlSink(path, on_warning=warnings.append) as sink:
        sink.emit(event(0))
        flush(sink)
        path.unlink()
        path.parent.rmdir()
        sink.emit(event(1))
        sink.emit(event(2))
    assert numbers(path) == [1, 2]
    (warning,) = warnings
    assert f"events are missing from {path}: the file was removed, and is created again" in warning


def test_what_waits_for_a_slow_disk_is_bounded_and_nobody_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "events.jsonl"
    hangs, goes_on, real_write = threading.Event(), threading.Event(), os.write

    def slow(file: int, data: bytes) -> int:
        hangs.set()
        assert goes_on.wait(60.0)
        return real_write(file, data)

    warnings: list[str] = []
    with monkeypatch.context() as patch, JsonlSink(path, on_warning=warnings.append) as sink:
        patch.setattr(os, "write", slow)
        sink.emit(event(0))
        assert hangs.wait(60.0)
        for number in range(1, MOST_WAITING + 1):
            sink.emit(event(number))
        for _ in range(20):
            sink.emit(event(-1))
        (written,) = sink.pending()
        assert not written.is_set()
        goes_on.set()
    assert written.is_set()
    assert sink.pending() == []
    events = read_events(path)
    (dropped,) = (one for one in events if one["type"] == "events_dropped")
    assert dropped["num_events"] == 20
    kept = [one["number"] for one in events if one["type"] == "note"]
    assert kept == list(range(MOST_WAITING + 1))
    assert "too slow for 20 of them" in warnings[0]
