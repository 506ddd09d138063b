"""What a window's decision costs the rank that plans, by the number of ranks. No process, no torch.

    python benchmarks/scale.py --json scale.json

``decision`` is a plan and the decision whether a rank should be parked; ``observe``, what is learnt
from a window's reports before it. In every round a team of unequal ranks, whose speeds are settled,
reports the window that was planned last, with new timings: 2 % of noise, and one window in twenty
disturbed. ``seconds`` is the best of the rounds, ``median_s`` their median, both in processor time:
nothing here waits, and other programs on the machine count less.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from machine import load_average, write_report

from evener.planning.cadence import CadencePolicy
from evener.planning.elche import ElChe
from evener.planning.guard import LevelGuard
from evener.planning.report import Report
from evener.planning.speed import CostModel, num_micro_batches
from evener.planning.sync import SyncPolicy

RANKS = (2, 8, 64, 256, 1024, 10240)
SAMPLES_A_RANK = 32
MICRO_BATCH_SIZE = 8
SYNC_S = 0.01
#: Windows before the first round: more than a speed model remembers.
SETTLING = 20


class Team(Protocol):
    """A planner, and ranks that report what they are told to do."""

    def compute(self) -> None:
        """Makes the reports of the window that was planned last."""

    def observe(self) -> None:
        """Lets the planner learn from them."""

    def decide(self) -> None:
        """Plans another window."""


class Timings:
    """How long ranks of unlike speeds take, with noise."""

    def __init__(self, num_ranks: int) -> None:
        self._random = random.Random(num_ranks)
        speeds = [self._random.uniform(0.25, 1.0) for _ in range(num_ranks)]
        self.costs = [CostModel(0.002 / speed, 0.001 / speed) for speed in speeds]

    def disturbed(self, seconds: float) -> float:
        """What is measured of a time."""
        outlier = 3.0 if self._random.random() < 0.05 else 1.0
        return seconds * outlier * self._random.uniform(0.98, 1.02)


class SyncTeam:
    """A fixed global batch."""

    def __init__(self, num_ranks: int) -> None:
        self.timings = Timings(num_ranks)
        self.batch_size = SAMPLES_A_RANK * num_ranks
        members = [str(rank) for rank in range(num_ranks)]
        self.policy = SyncPolicy(members, [MICRO_BATCH_SIZE] * num_ranks)
        self.decide()

    def compute(self) -> None:
        """Makes the reports of the window that was planned last."""
        self.reports = [
            Report(
                weight=float(share),
                samples=share,
                micro_batches=num_micro_batches(share, MICRO_BATCH_SIZE),
                compute_s=self.timings.disturbed(cost.seconds(share, MICRO_BATCH_SIZE)),
            )
            for cost, share in zip(self.timings.costs, self.plan.shares, strict=True)
        ]

    def observe(self) -> None:
        """Lets the planner learn from them."""
        self.policy.observe(self.reports, self.plan, SYNC_S)

    def decide(self) -> None:
        """Plans another window, and asks for a rank to park."""
        self.plan = self.policy.plan(0, 0, 0, self.batch_size)
        self.policy.ranks_to_park(self.batch_size)


class CadenceTeam:
    """Windows of local steps."""

    def __init__(self, num_ranks: int) -> None:
        self.timings = Timings(num_ranks)
        members = [str(rank) for rank in range(num_ranks)]
        elche = ElChe(num_ranks, anchor=10)
        self.policy = CadencePolicy(members, elche, LevelGuard(), max_batch_diff=100)
        self.decide()

    def compute(self) -> None:
        """Makes the reports of the window that was planned last."""
        self.reports = [
            Report(
                steps=steps,
                samples=MICRO_BATCH_SIZE * steps,
                busy_s=self.timings.disturbed(steps * cost.seconds(MICRO_BATCH_SIZE, None)),
            )
            for cost, steps in zip(self.timings.costs, self.plan.steps, strict=True)
        ]

    def observe(self) -> None:
        """Lets the planner learn from them."""
        self.policy.observe(self.reports, SYNC_S)

    def decide(self) -> None:
        """Plans another window: the last of an epoch, which takes the most work."""
        left = 15 * len(self.policy.members)
        self.plan = self.policy.plan(0, 0, left=left, limit=None)


@dataclass(frozen=True)
class Way:
    """A kind of team, and the names of its rows."""

    make: Callable[[int], Team]
    decide: str
    observe: str


WAYS = (
    Way(SyncTeam, "decision", "observe"),
    Way(CadenceTeam, "decision of cadence", "observe of cadence"),
)


def main() -> None:
    """Measures every size of a team."""
    arguments = parse_arguments()
    before = load_average()
    rows: list[dict[str, Any]] = []
    for way in WAYS:
        for num_ranks in arguments.ranks:
            for row in measure(way, num_ranks, arguments.rounds):
                rows.append(row)
                milliseconds = 1000 * row["seconds"]
                print(f"{row['name']:20} {num_ranks:6} ranks {milliseconds:10.3f} ms")
    write_report(
        arguments.json,
        benchmark="scale",
        load_average=[before, load_average()],
        arguments={"rounds": arguments.rounds, "ranks": arguments.ranks},
        rows=rows,
    )


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--ranks", type=sizes, default=list(RANKS), help="such as 2,64,1024")
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args()


def sizes(text: str) -> list[int]:
    """``2,64`` as numbers of ranks."""
    return [int(number) for number in text.split(",")]


def measure(way: Way, num_ranks: int, rounds: int) -> list[dict[str, Any]]:
    """The rows of one kind of team of one size."""
    team = way.make(num_ranks)
    times: dict[str, list[float]] = {way.decide: [], way.observe: []}
    for _ in range(SETTLING + rounds):
        team.compute()
        times[way.observe].append(seconds(team.observe))
        times[way.decide].append(seconds(team.decide))
    return [
        {
            "name": name,
            "ranks": num_ranks,
            "seconds": round(min(taken[SETTLING:]), 7),
            "median_s": round(statistics.median(taken[SETTLING:]), 7),
        }
        for name, taken in times.items()
    ]


def seconds(action: Callable[[], None]) -> float:
    """How long it takes the processor."""
    started_s = time.process_time()
    action()
    return time.process_time() - started_s


if __name__ == "__main__":
    main()
