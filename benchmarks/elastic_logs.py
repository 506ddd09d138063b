"""Reads what ``elastic_worker.py`` logs, and checks that an elastic team has lost nothing."""

import json
import os
import signal
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

Line = dict[str, Any]


@dataclass
class WorkerLog:
    """The log of one worker, read as it grows.

    Attributes:
        path: The file.
        pid: Its process; 0 until it has begun.
        member: Its id.
        ready_t: When its script was ready to join.
        ended_t: When ``kill`` ended it; ``inf`` before.
        commits: Windows that it saw committed, in order.
        handed: Micro-batches that it was handed, in order.
    """

    path: Path
    pid: int = 0
    member: str = ""
    ready_t: float = float("inf")
    ended_t: float = float("inf")
    commits: list[Line] = field(default_factory=list)
    handed: list[Line] = field(default_factory=list)
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
            elif "at" in line:
                self.handed.append(line)
            elif "ready" in line:
                self.ready_t = line["t"]
            else:
                self.pid, self.member = line["pid"], line["member"]

    @property
    def lives(self) -> bool:
        """Whether its process runs."""
        with suppress(OSError):
            os.kill(self.pid, 0)
            return bool(self.pid) and self.ended_t == float("inf")
        return False

    def commits_since(self, moment_t: float) -> int:
        """Return how many windows it saw committed after a moment."""
        return sum(line["t"] > moment_t for line in self.commits[-50:])

    def kill(self) -> float:
        """End it by SIGKILL; return when that was."""
        self.ended_t = time.time()
        os.kill(self.pid, signal.SIGKILL)
        return self.ended_t


def window_s(logs: Sequence[WorkerLog], until_t: float = float("inf")) -> float:
    """Return the median time between the latest commits before a moment."""
    times = sorted({w: t for w, t in commit_times(logs).items() if t < until_t}.values())
    return statistics.median(b - a for a, b in pairwise(times[-12:]))


def commit_times(logs: Sequence[WorkerLog], key: str = "t") -> dict[int, float]:
    """Return by window when the first worker saw it committed, or with another key applied it."""
    times: dict[int, float] = {}
    for log in logs:
        for line in log.commits:
            times[line["window"]] = min(times.get(line["window"], float("inf")), line[key])
    return times


def first_commit(logs: Sequence[WorkerLog], moment_t: float) -> float:
    """Return when the first window was committed that no worker had applied at a moment.

    A window that was applied before is often committed soon after: only its last message lacked.
    """
    applied = commit_times(logs, "applied_t")
    return commit_times(logs)[min(window for window, t in applied.items() if t > moment_t)]


def committed(logs: Sequence[WorkerLog]) -> dict[int, Line]:
    """Return the committed windows by number.

    Raises:
        AssertionError: A window is missing, workers saw different windows, or hold different bits
            after one, or began one with other bits than the others had after the one before.
    """
    windows: dict[int, Line] = {}
    for log in logs:
        for line in log.commits:
            known = windows.setdefault(line["window"], line)
            for key in ("epoch", "start", "size", "bits"):
                assert line[key] == known[key], f"{log.member}: {line}, others: {known}"
    assert sorted(windows) == list(range(len(windows))), "a window is missing"
    for log in logs:
        for line in log.handed:
            before = windows.get(line["at"] - 1)
            if line["bits"] and before is not None:
                assert line["bits"] == before["bits"], (
                    f"{log.member} began window {line['at']} with {line['bits']}, after {before}"
                )
    return windows


def verdict(logs: Sequence[WorkerLog], samples: int, policy: str) -> Line:
    """Return whether a team is ``sound``, the ``verdict`` in words, and ``times_trained``.

    ``times_trained`` is the number of ids of whole epochs by how often they were committed.
    """
    try:
        windows = committed(logs)
    except AssertionError as error:
        return {"sound": False, "times_trained": {}, "verdict": str(error)}
    times = times_trained(logs, windows, samples, policy)
    told = {"sound": set(times) == {1}, "times_trained": {str(n): times[n] for n in sorted(times)}}
    if not times:
        return told | {"verdict": "no epoch was completed: let it train for longer"}
    if not told["sound"]:
        return told | {"verdict": f"ids by how often they were trained on: {dict(times)}"}
    return told | {
        "verdict": f"{len(windows)} windows, none is missing, with the same bits on all of "
        f"{len(logs)} processes; {times[1]} ids of whole epochs, each exactly once"
    }


def times_trained(
    logs: Sequence[WorkerLog], windows: dict[int, Line], samples: int, policy: str
) -> Counter[int]:
    """Return how many samples of whole epochs were committed how often.

    A rank's share of a committed window are the last ids that it was handed for it: those of a try
    that was given up came before. In ASYNC, where the next window begins before one is over, the
    positions that windows report are counted.
    """
    whole = max(line["epoch"] for line in windows.values())
    counts = Counter({(epoch, index): 0 for epoch in range(whole) for index in range(samples)})
    handed = _handed(logs)
    for number, line in windows.items():
        if policy == "async":
            parts = [range(start, stop) for start, stop in line["ranges"]]
        else:
            shares = [(rank, size) for rank, size in enumerate(line["shares"]) if size]
            parts = [handed.get((number, rank), [])[-size:] for rank, size in shares]
        if line["epoch"] < whole:
            counts.update((line["epoch"], index) for part in parts for index in part)
    return Counter(counts.values())


def _handed(logs: Sequence[WorkerLog]) -> dict[tuple[int, int], list[int]]:
    """Return the ids that a rank was handed for a window, by both."""
    handed: dict[tuple[int, int], list[int]] = {}
    # A worker that has seen a window committed contributed to it. One that has not did so only if
    # it died at that moment and no other worker has had its number in that window.
    for has_seen in (False, True):
        for log in logs:
            seen = {line["window"] for line in log.commits}
            own: dict[tuple[int, int], list[int]] = {}
            for line in log.handed:
                if (line["at"] in seen) is has_seen:
                    own.setdefault((line["at"], line["rank"]), []).extend(line["ids"])
            handed |= own
    return handed


def redone(logs: Sequence[WorkerLog], from_t: float, to_t: float) -> float:
    """Return the work on windows of a span that was done more than once, in windows."""
    handed: Counter[int] = Counter()
    for log in logs:
        for line in log.handed:
            handed[line["at"]] += len(line["ids"])
    sizes = {line["window"]: line["size"] for log in logs for line in log.commits}
    times = commit_times(logs)
    return sum(handed[w] / sizes[w] - 1 for w, t in times.items() if from_t < t <= to_t)
