"""Names from URLs lead to runs of the folder, and nowhere else."""

import errno
import fcntl
import json
import os
import re
from pathlib import Path

import pytest

from evener.config.folders import EVENTS, FolderLock
from evener.dashboard import watching
from evener.dashboard.broadcasts import AT_ONCE_S, PART_OF_CORE, LookPace
from evener.dashboard.holders import ask_to_stop, find_holder
from evener.dashboard.shelf import Shelf
from evener.dashboard.view import RunView
from evener.dashboard.watching import RunWatch
from evener.errors import ConfigError, UsageError
from evener.observe import following
from evener.observe.events import Event, make_event
from helpers.event_cases import committed_window, started, to_line


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "runs"
    for name in ("first", "a b%c"):
        (root / name).mkdir(parents=True)
        (root / name / EVENTS).touch()
    (root / "no run").mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / EVENTS).touch()
    (tmp_path / EVENTS).touch()
    (root / "way out").symlink_to(tmp_path / "outside")
    (root / "linked").mkdir()
    (root / "linked" / EVENTS).symlink_to(tmp_path / EVENTS)
    os.utime(root / "first" / EVENTS, (2e9, 2e9))
    return root


def test_runs_of_a_folder(root: Path) -> None:
    shelf = Shelf.at(root)
    assert shelf.names() == ["first", "a b%c"]
    assert shelf.find("a b%c") == root / "a b%c"


def test_one_run(root: Path) -> None:
    for path in (root / "first", root / "first" / EVENTS):
        shelf = Shelf.at(path)
        assert shelf.names() == ["first"]
        assert shelf.find("a b%c") is None


@pytest.mark.parametrize(
    "name",
    [
        *("", ".", "..", "../outside", "..%2foutside", "first/..", "first/../../outside", "/etc"),
        *("first\0", "no run", "absent", "way out", "linked", "x" * 5000, "\ud800"),
    ],
)
def test_no_name_leads_out(root: Path, name: str) -> None:
    assert Shelf.at(root).find(name) is None


def test_no_folder_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="absent is not a folder"):
        Shelf.at(tmp_path / "absent")


def test_the_holder_of_a_folder(root: Path) -> None:
    folder = root / "first"
    assert find_holder(folder) is None
    with FolderLock(folder) as lock:
        lock.require()
        assert find_holder(folder) == os.getpid()
        assert find_holder(root / "a b%c") is None
    assert find_holder(folder) is None
    with (folder / EVENTS).open() as stream:
        fcntl.flock(stream, fcntl.LOCK_SH)  # as a backup program might
        assert find_holder(folder) is None


def test_nobody_to_stop(root: Path) -> None:
    with pytest.raises(UsageError, match=f"at work in {re.escape(str(root / 'first'))}: .*Ctrl-C"):
        ask_to_stop(root / "first")


def test_a_long_file_is_read_piece_by_piece(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = [started(), *(committed_window(k) for k in range(200))]
    (root / "first" / EVENTS).write_bytes(b"[\n" + b"".join(map(to_line, events)))
    monkeypatch.setattr(following, "LOOK_BYTES", 4096)
    monkeypatch.setattr(watching, "_CATCH_UP_S", 0.0)
    monkeypatch.setattr(watching, "_NEWEST_BYTES", 4096)
    watch = RunWatch(root / "first")
    found = [json.loads(watch.look() or b"null")]
    while watch.has_more:
        found.append(json.loads(watch.look() or b"null"))
    watch.close()
    assert len(found) > 10
    # Meanwhile the newest windows are shown, and what they let expect of the others.
    assert found[0]["run"]["windows"] == 200
    assert found[0]["line"].startswith("step 200 ")
    assert "of the older windows are passed over" in found[0]["notes"][-2]
    assert "of events.jsonl have been read so far" in found[-2]["notes"][-1]
    assert found[-1]["run"]["windows"] == 200
    assert len(found[-1]["notes"]) == 1
    assert found[-1]["notes"][0].startswith("line 1 of events.jsonl is left out")


def test_a_run_that_is_removed_is_a_problem_and_no_end(root: Path) -> None:
    watch = RunWatch(root / "first")
    assert b'"problem"' not in (watch.look() or b"")
    (root / "first" / EVENTS).unlink()
    assert b"No such file" in (watch.look() or b"")
    (root / "first" / EVENTS).touch()
    assert b'"problem"' not in (watch.look() or b"")
    watch.close()


def test_no_event_is_missed_after_a_problem(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = [started(), committed_window(0)]
    (root / "first" / EVENTS).write_bytes(b"".join(map(to_line, events)))
    watch = RunWatch(root / "first")

    def fail(_: RunView, event: Event) -> None:
        raise OSError(errno.EIO, "the disk is tired")

    with monkeypatch.context() as patch:
        patch.setattr(RunView, "add", fail)
        assert b"cannot be read: the disk is tired" in (watch.look() or b"")
    assert json.loads(watch.look() or b"")["run"]["windows"] == 1
    watch.close()


def test_a_resume_makes_windows_void(root: Path) -> None:
    resumed = make_event("run_resumed", t=100.0, window=60, path="step-60", new_data=False)
    windows = [committed_window(k) for k in range(100)]
    events = [started(), *windows, resumed, *windows[60:]]
    (root / "first" / EVENTS).write_bytes(b"".join(map(to_line, events)))
    watch = RunWatch(root / "first")
    run = json.loads(watch.look() or b"")["run"]
    assert (run["windows"], run["void_windows"], run["sessions"]) == (100, 40, 2)
    watch.close()


def test_looks_take_a_small_part_of_a_core_on_the_long_run() -> None:
    pace, now_s, spent_s = LookPace(0.0), 0.0, 0.0
    assert pace.spend(AT_ONCE_S, now_s) == 0, "a file of usual length is read at once"
    while now_s < 1000.0:
        pause_s = pace.spend(0.2, now_s)
        spent_s, now_s = spent_s + 0.2, now_s + pause_s
    assert spent_s <= PART_OF_CORE * now_s
    assert pace.spend(0.2, now_s + 2 * AT_ONCE_S / PART_OF_CORE) == 0
    assert pace.spend(AT_ONCE_S, now_s + 2 * AT_ONCE_S / PART_OF_CORE) == pytest.approx(
        0.2 / PART_OF_CORE
    ), "no more is saved up"


def test_a_run_has_its_part_of_the_time_for_looks() -> None:
    long, live = LookPace(0.0), LookPace(0.0)
    assert long.spend(AT_ONCE_S + 1.0, 0.0, 2) == pytest.approx(2 / PART_OF_CORE)
    assert live.spend(0.01, 0.0, 2) == 0
