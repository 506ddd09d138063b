"""Events of a run while it trains, look by look."""

from pathlib import Path

import pytest

from evener.observe.event_lines import to_line
from evener.observe.events import make_event
from evener.observe.following import MOST_LINE_BYTES, EventFollower, newest_event
from helpers.event_cases import committed_window, started


class Reader:
    """A follower, and what it has told."""

    def __init__(self, path: Path) -> None:
        self.skipped: list[int] = []
        self.follower = EventFollower(path, lambda line, _: self.skipped.append(line))

    def windows(self) -> list[int]:
        return [event["window"] for event in self.follower.events()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as stream:
        stream.write(data)


def test_each_look_takes_in_what_is_new_and_leaves_a_line_that_is_being_written(path: Path) -> None:
    append(path, to_line(committed_window(0)))
    reader = Reader(path)
    assert [reader.windows(), reader.windows()] == [[0], []]
    line = to_line(committed_window(1))
    append(path, line[:40])
    assert reader.windows() == []
    append(path, line[40:] + to_line(committed_window(2)))
    assert reader.windows() == [1, 2]
    assert reader.skipped == []


def test_what_is_not_an_event_is_named_and_left_out(path: Path) -> None:
    good = to_line(committed_window(0))
    append(path, b"{\n[1]\n\n" + b"\xff\xfe\n" + b"[" * 9000 + b"\n" + good[:50] + b"\n" + good)
    append(path, b"x" * (3 * MOST_LINE_BYTES) + b"\n" + good)
    reader = Reader(path)
    assert reader.windows() == [0, 0]
    assert sorted(set(reader.skipped)) == [1, 2, 4, 5, 6, 8]


def test_a_file_that_was_replaced_or_cut_is_known(path: Path) -> None:
    append(path, to_line(committed_window(0)) * 3)
    reader = Reader(path)
    assert not reader.follower.is_replaced()
    reader.windows()
    assert not reader.follower.is_replaced()
    path.write_bytes(to_line(committed_window(7)))
    assert reader.follower.is_replaced()
    other = path.with_name("other")
    other.write_bytes(to_line(committed_window(8)) * 9)
    other.replace(path)
    assert reader.follower.is_replaced()


def test_the_newest_event_tells_how_a_run_ended(path: Path) -> None:
    assert newest_event(path) is None
    end = make_event("run_finished", t=9.0, window=1, reason="completed", message=None)
    append(path, to_line(started()) + to_line(committed_window(0)) + to_line(end))
    assert newest_event(path) == end
    append(path, b"{")
    assert newest_event(path) is None
