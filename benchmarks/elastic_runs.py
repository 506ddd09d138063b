"""Runs ``evener launch --elastic`` on ``elastic_worker.py``, and disturbs it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from elastic_logs import WorkerLog

WORKER = Path(__file__).with_name("elastic_worker.py")
#: Longest wait for what has to come.
PATIENCE_S = 120.0
_LOOK_S = 0.01
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


class ElasticTeam:
    """A launcher with its workers, for the length of a ``with`` block.

    Args:
        folder: For logs, new and empty.
        workers: How many.
        arguments: For ``elastic_worker.py``.
    """

    def __init__(self, folder: Path, workers: int, arguments: Sequence[object]) -> None:
        launch = [sys.executable, "-P", "-m", "evener", "launch"]
        options = ["--elastic", f"1:{workers}", "--nproc", workers, "--max-failures", 10_000]
        script = [WORKER, "--log", folder, "--epochs", 1_000_000, *arguments]
        self.folder, self.workers = folder, workers
        self.output = (folder / "output.txt").open("w")
        self.process = subprocess.Popen(
            [str(word) for word in (*launch, *options, *script)],
            # evener chooses the number of threads by itself.
            env={k: v for k, v in os.environ.items() if k not in _THREADS},
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
        """Workers whose process runs, by their place in the team."""
        return sorted((log for log in self.logs() if log.lives), key=lambda log: log.member)

    def members(self) -> list[WorkerLog]:
        """Those of them that have seen a window committed."""
        return [log for log in self.alive() if log.commits]

    def wait_for_all(self, windows: int = 1, since_t: float = 0.0) -> None:
        """Wait until as many workers as the team has see so many windows committed.

        Args:
            windows: How many each has to see.
            since_t: Windows that were committed earlier do not count.
        """
        for _ in self._looks("all workers take part"):
            if sum(log.commits_since(since_t) >= windows for log in self.alive()) == self.workers:
                return

    def wait_for_commits(self, since_t: float, windows: int = 1) -> None:
        """Wait until a worker has seen so many windows committed after a moment."""
        for _ in self._looks("a window is committed"):
            if any(log.commits_since(since_t) >= windows for log in self.alive()):
                return

    def said(self) -> str:
        """What launcher and workers have printed."""
        return (self.folder / "output.txt").read_text(errors="replace")

    def _looks(self, what: str) -> Iterator[None]:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            if (code := self.process.poll()) is not None:
                raise RuntimeError(f"the run ended with {code} before {what}:\n{self.said()}")
            yield
            time.sleep(_LOOK_S)
        raise RuntimeError(f"{PATIENCE_S:g} s passed before {what}:\n{self.said()}")


def send(pid: int, number: signal.Signals) -> float:
    """Send a signal; return when that was."""
    if pid <= 0:  # to the whole process group of this program
        raise RuntimeError(f"there is no process {pid} to send {number.name} to")
    sent_t = time.time()
    os.kill(pid, number)
    return sent_t
