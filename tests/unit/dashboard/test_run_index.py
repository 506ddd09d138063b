"""Names from URLs lead to runs of the folder, and nowhere else."""

import fcntl
import os
import re
from pathlib import Path

import pytest

from evener.config.folders import EVENTS, FolderLock
from evener.dashboard.lock_owner import ask_to_stop, find_lock_owner
from evener.dashboard.run_index import RunIndex
from evener.errors import ConfigError, UsageError


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
    index = RunIndex.at(root)
    assert index.names() == ["first", "a b%c"]
    assert index.find("a b%c") == root / "a b%c"


def test_one_run(root: Path) -> None:
    for path in (root / "first", root / "first" / EVENTS):
        index = RunIndex.at(path)
        assert index.names() == ["first"]
        assert index.find("a b%c") is None


@pytest.mark.parametrize(
    "name",
    [
        *("", ".", "..", "../outside", "..%2foutside", "first/..", "first/../../outside", "/etc"),
        *("first\0", "no run", "absent", "way out", "linked", "x" * 5000, "\ud800"),
    ],
)
def test_no_name_leads_out(root: Path, name: str) -> None:
    assert RunIndex.at(root).find(name) is None


def test_no_folder_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="absent is not a folder"):
        RunIndex.at(tmp_path / "absent")


def test_the_owner_of_a_folders_lock(root: Path) -> None:
    folder = root / "first"
    assert find_lock_owner(folder) is None
    with FolderLock(folder) as lock:
        lock.require()
        assert find_lock_owner(folder) == os.getpid()
        assert find_lock_owner(root / "a b%c") is None
    assert find_lock_owner(folder) is None
    with (folder / EVENTS).open() as stream:
        fcntl.flock(stream, fcntl.LOCK_SH)  # as a backup program might
        assert find_lock_owner(folder) is None


def test_nobody_to_stop(root: Path) -> None:
    with pytest.raises(UsageError, match=f"has locked {re.escape(str(root / 'first'))}: .*Ctrl-C"):
        ask_to_stop(root / "first")
