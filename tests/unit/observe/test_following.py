"""Events of a run that goes on, look by look."""

import os
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest

from evener.observe import following
from evener.observe.event_lines import LineWriter
from evener.observe.events import make_event
from evener.observe.following import MOST_LINE_BYTES, EventFollower, each_effective_event
from helpers.event_cases import committed_window, started, to_line


class Reader:
    """A follower, and what it has told."""

    def __init__(self, path: Path) -> None:
        self.skipped: list[tuple[int | None, str]] = []
        self.follower = EventFollower(path, lambda line, why: self.skipped.append((line, why)))

    def windows(self) -> list[int]:
        self.begins = self.follower.begins()
        return [event["window"] for event in self.follower.look().events]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as stream:
        stream.write(data)


def test_each_look_takes_in_what_is_new(path: Path) -> None:
    append(path, to_line(started()))
    reader = Reader(path)
    with reader.follower as follower:
        first = follower.look()
        assert [event["type"] for event in first.events] == ["run_started"]
        assert (first.is_all, first.read_part) == (True, 1.0)
        assert reader.windows() == []
        append(path, to_line(committed_window(0)) + to_line(committed_window(1)))
        assert reader.windows() == [0, 1]
    assert reader.skipped == []


def test_a_line_that_is_being_written_is_left_for_the_next_look(path: Path) -> None:
    line = to_line(committed_window(3))
    append(path, line[:40])
    reader = Reader(path)
    with reader.follower:
        assert reader.windows() == []
        append(path, line[40:-1])
        assert reader.windows() == []
        append(path, b"\n")
        assert reader.windows() == [3]
    assert reader.skipped == []


def test_what_is_not_an_event_is_named_and_left_out(path: Path) -> None:
    good = to_line(committed_window(0))
    append(path, b"{\n[1]\n\n" + b"\xff\xfe\n" + b"[" * 9000 + b"\n" + good[:50] + b"\n" + good)
    reader = Reader(path)
    with reader.follower:
        assert reader.windows() == [0]
    assert [line for line, _ in reader.skipped] == [1, 2, 4, 5, 6]


def test_a_line_without_end_takes_no_memory(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "MOST_LINE_BYTES", 1000)
    monkeypatch.setattr(following, "LOOK_BYTES", 300)
    append(path, b"x" * 5000 + b"\n" + to_line(committed_window(0)))
    reader = Reader(path)
    found = []
    with reader.follower:
        for _ in range(100):
            found += reader.windows()
    assert found == [0]
    assert reader.skipped == [(1, "it has more than 1,000 bytes")]
    assert MOST_LINE_BYTES > 1000


def test_a_file_that_was_replaced_or_cut_is_read_anew(path: Path) -> None:
    append(path, to_line(committed_window(0)) * 3)
    reader = Reader(path)
    with reader.follower as follower:
        assert reader.windows() == [0, 0, 0]
        path.write_bytes(to_line(committed_window(7)))
        assert (reader.windows(), reader.begins) == ([7], True)
        other = path.with_name("other")
        other.write_bytes(to_line(committed_window(8)) * 9)
        other.replace(path)
        assert follower.begins()


def test_further_parts_follow(path: Path) -> None:
    append(path, to_line(committed_window(0)))
    reader = Reader(path)
    with reader.follower:
        assert reader.windows() == [0]
        append(path, to_line(committed_window(1)))
        append(path.with_name("events.1.jsonl"), to_line(committed_window(2)))
        append(path.with_name("events.10.jsonl"), to_line(committed_window(4)))
        append(path.with_name("events.2.jsonl"), to_line(committed_window(3)))
        looks = [reader.follower.look() for _ in range(5)]
    assert [event["window"] for look in looks for event in look.events] == [1, 2, 3, 4]
    parts = [look.read_part for look in looks]
    assert parts == sorted(parts)
    assert (parts[0], parts[-1]) == (pytest.approx(0.4, rel=0.01), 1.0)


def test_a_part_that_is_removed_while_it_is_read_is_left(path: Path) -> None:
    append(path, to_line(committed_window(0)))
    second, third = (path.with_name(f"events.{number}.jsonl") for number in (1, 2))
    append(second, to_line(committed_window(1)))
    reader = Reader(path)
    with reader.follower:
        assert [reader.windows() for _ in range(2)] == [[0], [1]]
        second.unlink()
        append(third, to_line(committed_window(2)))
        assert [(reader.windows(), reader.begins) for _ in range(2)] == [([], False), ([2], False)]


def test_void_windows_are_known_from_a_quick_look(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "LOOK_BYTES", 64)  # words are cut in two
    resumed = make_event("run_resumed", t=9.0, window=2, path="step-2", new_data=False)
    windows = [to_line(committed_window(k)) for k in range(4)]
    append(path, b"".join(windows) + to_line(resumed) + b"".join(windows[2:]))
    found = [event["window"] for event in each_effective_event(path) if event["type"] == "window"]
    assert found == [0, 1, 2, 3]


def test_of_long_files_some_windows_stand_for_several(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "LOOK_BYTES", 4096)
    lines, times = LineWriter(), range(2000)
    evaluation = {"name": "heldout", "loss": 1.0, "weight": 1.0, "elapsed_s": 0.1}
    plan = {"generation": 0, "epoch": 0, "start": 0, "size": 10, "shares": [6, 4]}
    with path.open("wb") as stream:
        stream.write(lines.line(started()))
        for k in times:
            window = committed_window(k)
            if k >= 333:  # no other event tells of it
                window["ranks"][1]["member"] = "c"
            stream.write(lines.line(window))
            if k % 10 == 5:
                stream.write(lines.line(make_event("plan", t=k, window=k, **plan)))
            if k % 100 == 50:
                stream.write(lines.line(make_event("eval", t=k, window=k + 1, **evaluation)))
    skipped: list[int] = []
    events: list[dict[str, Any]] = []
    skim_bytes = path.stat().st_size // 8
    with EventFollower(path, lambda line, _: skipped.append(line), skim_bytes=skim_bytes) as one:
        while not (look := one.look()).is_all or look.events:
            events += look.events
    assert skipped == []
    windows = [event for event in events if event["type"] == "window"]
    assert len(windows) < len(times) // 2
    assert len(events) - len(windows) == 1 + 200 + 20, "all others are read"
    counts = [event.get("stands_for", 1) for event in windows]
    assert max(counts) in (9, 10)  # lines differ in length
    # Each stands for itself and for those right before it; the newest for themselves alone.
    assert [event["window"] + 1 for event in windows] == list(accumulate(counts))
    assert set(counts[-200:]) == {1}
    assert sum(counts) == len(times)
    # None stands for windows on both sides of an evaluation, which took time.
    before = [a for a, b in pairwise(events) if b["type"] == "eval"]
    assert [event["window"] % 100 for event in before] == [50] * 20


def test_a_folder_and_a_pipe_are_not_waited_for(path: Path) -> None:
    os.mkfifo(path)
    with pytest.raises(OSError, match="not a regular file"):
        Reader(path).follower.look()
    with pytest.raises(FileNotFoundError):
        Reader(path.with_name("absent")).follower.look()
