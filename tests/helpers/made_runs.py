"""Events of runs that never were: ranks whose speeds change, a resume, a team that changes."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

from evener.observe.events import Event, make_event
from helpers.event_cases import started

TOKENS: float = 128.0
"""Weight of a sample."""


class MadeRun:
    """Writes windows of a team, whose times follow from speeds that a test gives.

    Args:
        speeds: Samples per second of each member.
    """

    def __init__(self, speeds: Mapping[str, float]) -> None:
        self._random = random.Random(7)
        self.t = 1000.0
        self.window = self._start = self.generation = 0
        self.speeds = dict(speeds)
        self.events: list[Event] = [self._started()]

    def _started(self) -> Event:
        return started(t=self.t, members=[*self.speeds], window=self.window, params=1000)

    def train(self, count: int, shares: Sequence[int]) -> None:
        """Commit windows, each of which takes as long as its slowest rank."""
        for _ in range(count):
            computes_s = [
                samples / speed * self._random.uniform(0.95, 1.1) + 0.004
                for samples, speed in zip(shares, self.speeds.values(), strict=True)
            ]
            length_s = max(computes_s)
            rows = [
                {
                    "rank": rank,
                    "member": member,
                    "samples": samples,
                    "weight": samples * TOKENS,
                    "loss": 2.0 + self._random.random(),
                    "data_s": 0.003,
                    "compute_s": compute_s,
                    "wait_s": length_s - compute_s + 0.001,
                    "sync_s": 0.01,
                    "update_s": 0.004,
                    "micro_batches": -(-samples // 8),
                    "elapsed_s": length_s + 0.016,
                }
                for rank, (member, samples, compute_s) in enumerate(
                    zip(self.speeds, shares, computes_s, strict=True)
                )
            ]
            self.t += length_s + 0.016
            stop = self._start + sum(shares)
            place = {"window": self.window, "generation": self.generation, "epoch": 0}
            committed = [[self._start, stop]]
            self.events.append(
                make_event("window", t=self.t, **place, committed=committed, ranks=rows)
            )
            self.window, self._start = self.window + 1, stop

    def evaluate(self) -> None:
        """Evaluate for two seconds."""
        self.t += 2.0
        numbers: dict[str, Any] = {"loss": 2.5, "weight": 1.0, "elapsed_s": 2.0}
        self.events.append(
            make_event("eval", t=self.t, window=self.window, name="heldout", **numbers)
        )

    def resume(self, window: int) -> None:
        """End, and resume an hour later from an earlier window."""
        self.t += 3600.0
        self.window = window
        self.events += [
            make_event("run_resumed", t=self.t, window=window, path="step", new_data=False),
            self._started(),
        ]

    def replace(self, lost: str, joins: str) -> None:
        """Lose a member, whose place another one takes; the last window is done again."""
        rank = [*self.speeds].index(lost)
        self.speeds = {joins if name == lost else name: s for name, s in self.speeds.items()}
        self.t += 1.5
        self.generation, self.window = self.generation + 1, self.window - 1
        at = {"t": self.t, "window": self.window}
        team = {"generation": self.generation, "members": [*self.speeds]}
        self.events += [
            make_event("worker_lost", **at, rank=rank, member=lost, reason="it was killed"),
            make_event("reformed", **at, **team, detect_s=1.0, reform_s=0.2, recover_s=0.3),
            make_event("worker_joined", **at, rank=rank, member=joins, generation=self.generation),
        ]


def halved() -> list[Event]:
    """The speed of rank 1 halves midway."""
    run = MadeRun({"a": 40.0, "b": 40.0})
    run.train(60, (8, 8))
    run.evaluate()
    run.speeds["b"] = 20.0
    run.train(5, (8, 8))
    run.train(55, (11, 5))
    return run.events


def resumed() -> list[Event]:
    """It resumes after a rank has become slower."""
    run = MadeRun({"a": 40.0, "b": 15.0})
    run.train(50, (12, 4))
    run.speeds["b"] = 10.0
    run.resume(40)
    run.train(40, (13, 3))
    return run.events


def elastic() -> list[Event]:
    """A rank is killed, and a slower one takes its place."""
    run = MadeRun({"a": 40.0, "b": 30.0, "c": 20.0})
    run.train(40, (8, 5, 3))
    run.replace("b", "d")
    run.speeds["d"] = 8.0
    run.train(60, (10, 1, 5))
    return run.events
