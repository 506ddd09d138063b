"""A run as the dashboard reads it, look by look."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from evener.config.folders import EVENTS, FolderLock
from evener.dashboard import watching
from evener.dashboard.watching import RunWatch
from helpers.event_cases import committed_window, started, to_line


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(watching, "INTERVAL_S", 0.0)
    monkeypatch.setattr(watching, "_MOST_PART", float("inf"))
    return tmp_path


def append(folder: Path, *events: Any) -> None:
    with (folder / EVENTS).open("ab") as stream:
        stream.write(b"".join(map(to_line, events)))


def test_the_document_changes_with_the_file(folder: Path) -> None:
    append(folder, started(total_windows=10), *(committed_window(k) for k in range(4)))
    watch = RunWatch(folder)
    document, tag, packed = watch.answer()
    (run,) = json.loads(document)["runs"]
    assert gzip.decompress(packed) == document
    assert run["line"].startswith("step 4/10  loss 2 ")
    assert (run["name"], run["run"]["windows"], run["notes"]) == (folder.name, 4, [])
    assert watch.answer().tag == tag
    append(folder, committed_window(4))
    assert watch.answer().tag != tag
    (folder / EVENTS).write_bytes(to_line(started()))
    assert json.loads(watch.answer().document)["runs"][0]["run"]["windows"] == 0, "another file"


def test_between_two_looks_all_who_ask_get_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "INTERVAL_S", 1e9)
    append(folder, started())
    watch = RunWatch(folder)
    before = watch.answer()
    append(folder, committed_window(0))
    assert watch.answer() is before


def test_a_job_runs_while_its_folder_is_locked(folder: Path) -> None:
    append(folder, started(), committed_window(0))
    watch = RunWatch(folder)

    def state() -> str:
        return str(json.loads(watch.answer().document)["runs"][0]["run"]["state"])

    assert state() == "no end recorded", "a loop of one's own locks nothing"
    (folder / "checkpoints").mkdir()
    assert state() == "ended unexpectedly"
    with FolderLock(folder) as lock:
        lock.require()
        assert state() == "running"


def test_a_run_that_is_removed_is_a_problem_and_no_end(folder: Path) -> None:
    append(folder, started())
    watch = RunWatch(folder)
    assert b'"problem"' not in watch.answer().document
    (folder / EVENTS).unlink()
    assert b"No such file" in watch.answer().document
    append(folder, started(), committed_window(0))
    assert json.loads(watch.answer().document)["runs"][0]["run"]["windows"] == 1


def test_a_file_of_events_that_cannot_be_read_is_a_problem_without_a_path(folder: Path) -> None:
    append(folder, started())
    watch = RunWatch(folder)
    watch.answer()
    (folder / EVENTS).unlink()
    (folder / EVENTS).mkdir()
    problem = json.loads(watch.answer().document)["problem"]
    assert problem == f"{folder.name} cannot be read: Is a directory"
