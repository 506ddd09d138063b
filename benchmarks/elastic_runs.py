"""Runs ``evener launch --elastic`` on ``elastic_worker.py``, and reads what its workers log."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from runs import clean_environment, command_line

WORKER = Path(__file__).with_name("elastic_worker.py")
#: Longest wait for what has to come.
PATIENCE_S = 120.0
_LOOK_S = 0.005

Line = dict[str, Any]


@dataclass
class WorkerLog:
    """The log of one worker, read as it grows.

    Attributes:
        path: The file.
        pid: Its process; 0 until it has begun.
        member: Its id.
        commits: Windows that it saw committed, in order.
        was_killed: Whether ``kill`` has ended it; its process may still be listed.
    """

    path: Path
    pid: int = 0
    member: str = ""
    was_killed: bool = False
    commits: list[Line] = field(default_factory=list)
    _num_bytes: int = 0

    def read(self) -> None:
        """Take in what was written since."""
        with self.path.open("rb") as file:
            file.seek(self._num_bytes)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._num_bytes += len(whole)
        for line in map(json.loads, whole.splitlines()):
            if "window" in line:
                self.commits.append(line)
            else:
                self.pid, self.member = line["pid"], line["member"]

    @property
    def lives(self) -> bool:
        """Whether its process runs."""
        with suppress(OSError):
            os.kill(self.pid, 0)
            return bool(self.pid) and not self.was_killed
        return False

    def kill(self) -> float:
        """End it by SIGKILL; return when that was."""
        self.was_killed, killed_t = True, time.time()
        os.kill(self.pid, signal.SIGKILL)
        return killed_t


class ElasticTeam:
    """A launcher with its workers, for the length of a ``with`` block.

    Args:
        folder: For logs, new and empty.
        workers: How many.
        arguments: For ``elastic_worker.py``.
    """

    def __init__(self, folder: Path, workers: int, arguments: Sequence[object]) -> None:
        options = ["--elastic", f"1:{workers}", "--nproc", workers, "--max-failures", 10_000]
        script = [WORKER, "--log", folder, *arguments]
        self.folder, self.workers = folder, workers
        self.output = (folder / "output.txt").open("w")
        self.process = subprocess.Popen(
            [str(word) for word in (*command_line(), "launch", *options, *script)],
            env=clean_environment(),
            stdin=subprocess.DEVNULL,
            stdout=self.output,
            stderr=subprocess.STDOUT,
        )
        self._logs: dict[Path, WorkerLog] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(60.0)
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.output.close()

    def logs(self) -> list[WorkerLog]:
        """Every worker that has begun, with what it has logged so far."""
        for path in sorted(self.folder.glob("*.jsonl")):
            self._logs.setdefault(path, WorkerLog(path)).read()
        return list(self._logs.values())

    def alive(self) -> list[WorkerLog]:
        """Workers whose process runs."""
        return [log for log in self.logs() if log.lives]

    def has_ended(self) -> bool:
        """Whether the launcher has."""
        return self.process.poll() is not None

    def wait_for_all(self, windows: int = 1) -> None:
        """Wait until as many workers as the team has see so many windows committed."""
        for _ in self._looks("all workers take part"):
            if sum(len(log.commits) >= windows for log in self.alive()) == self.workers:
                return

    def wait_for_commit(self, after_t: float) -> float:
        """Wait for the next window that is committed after a moment; return when that was."""
        for _ in self._looks("a window is committed"):
            times = [c["t"] for log in self.logs() for c in log.commits[-50:] if c["t"] > after_t]
            if times:
                return float(min(times))
        raise AssertionError

    def said(self) -> str:
        """What launcher and workers have printed."""
        return (self.folder / "output.txt").read_text(errors="replace")

    def _looks(self, what: str) -> Iterator[None]:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            if self.has_ended():
                raise RuntimeError(
                    f"the run ended with {self.process.returncode} before {what}:\n{self.said()}"
                )
            yield
            time.sleep(_LOOK_S)
        raise RuntimeError(f"{PATIENCE_S:g} s passed before {what}:\n{self.said()}")


def committed(logs: Sequence[WorkerLog]) -> dict[int, Line]:
    """The committed windows by number.

    Raises:
        AssertionError: Workers saw different windows, or hold different bits after one.
    """
    windows: dict[int, Line] = {}
    for log in logs:
        for line in log.commits:
            known = windows.setdefault(line["window"], line)
            for key in ("epoch", "start", "size", "bits"):
                assert line[key] == known[key], f"{log.member}: {line}, others: {known}"
    return windows


def times_seen(windows: dict[int, Line], samples: int) -> dict[int, int]:
    """How many samples of whole epochs were committed how often."""
    last = max(line["epoch"] for line in windows.values())
    counts: dict[int, int] = {}
    for epoch in range(last):
        seen = [0] * samples
        for line in windows.values():
            if line["epoch"] == epoch:
                for place in range(line["start"], line["start"] + line["size"]):
                    seen[place] += 1
        for count in seen:
            counts[count] = counts.get(count, 0) + 1
    return counts
