"""Folders in which tests start commands, and the trained run that tests share which only read."""

import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from helpers.launched import Sandbox
from helpers.pretraining import RUN_TIMEOUT_S, Lab, RunFolder


@pytest.fixture
def sandbox(tmp_path: Path) -> Iterator[Sandbox]:
    sandbox = Sandbox(tmp_path)
    yield sandbox
    sandbox.close()


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    lab = Lab(tmp_path)
    yield lab
    lab.close()


@dataclass(frozen=True)
class Trained:
    """Two runs of ``helpers.pretraining.TINY``, which nobody may change.

    Attributes:
        folder: Holds the corpus and ``run.yaml``.
        said: What the command of ``team`` printed to stderr.
    """

    folder: Path

    @property
    def team(self) -> RunFolder:
        """Two unequal ranks, by the command line."""
        return RunFolder(self.folder / "runs" / "team")

    @property
    def alone(self) -> RunFolder:
        """One rank."""
        return RunFolder(self.folder / "runs" / "alone")

    @property
    def said(self) -> str:
        return (self.folder / "said").read_text()


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Trained once, whichever of pytest's processes needs it first."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    folder = shared / "trained"
    with (shared / "trained.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "said").exists():
            folder.mkdir()
            train(folder)
    return Trained(folder)


def train(folder: Path) -> None:
    lab = Lab(folder)
    try:
        options = ("run.yaml", "--name", "team", "--nproc", 2, "--emulate-slow", "1:2")
        running = lab.command(*options, "--set", "tensorboard=true")
        lab.run("run.yaml", "--name", "alone")
        ended = running.end(RUN_TIMEOUT_S)
    finally:
        lab.close()
    assert (ended.code, ended.out) == (0, ""), ended.err
    (folder / "said").write_text(ended.err)
