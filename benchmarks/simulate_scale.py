"""What planning a window costs, by the number of ranks. No process, no torch.

    python benchmarks/simulate_scale.py --json simulate_scale.json
    python benchmarks/simulate_scale.py --ranks 2,64

``decision`` is a plan and the decision whether a rank should be parked; ``observe``, what is learnt
from a window's reports before it: on the rank that plans. In every round a team of unequal ranks,
whose speeds are settled, reports the window that was planned last, with new timings: 2 % of noise,
and one window in twenty disturbed.

``seconds`` is the median of the rounds in processor time: nothing here waits, and other programs on
the machine count less. ``bytes`` is the memory that a team's planner holds.
"""

import random
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

from report import load_before, make_parser, numbers, spread, text_of, write_report

from evener.planning.cadence import CadencePolicy
from evener.planning.elche import ElChe
from evener.planning.guard import LevelGuard
from evener.planning.speed import CostModel
from evener.planning.sync import SyncPolicy
from evener.simulation.simulated_rank import Link, SimulatedRank
from evener.simulation.simulated_sync import SimulatedSync

RANKS = (2, 8, 64, 256, 1024, 10240)
SAMPLES_A_RANK = 32
MICRO_BATCH_SIZE = 8
SYNC_S = 0.01
#: Windows before the first round: more than a speed model remembers.
SETTLING = 20


class Disturbed(SimulatedRank):
    """A rank whose times have noise, as they are measured."""

    def __init__(self, speed: float, source: random.Random) -> None:
        super().__init__(CostModel(0.002 / speed, 0.001 / speed), MICRO_BATCH_SIZE)
        self.source = source

    def factor(self, at_s: float) -> float:
        """See ``SimulatedRank``."""
        outlier = 3.0 if self.source.random() < 0.05 else 1.0
        return outlier * self.source.uniform(0.98, 1.02)


def unequal_ranks(num_ranks: int) -> list[Disturbed]:
    """Return ranks of different speeds."""
    source = random.Random(num_ranks)
    return [Disturbed(source.uniform(0.25, 1.0), source) for _ in range(num_ranks)]


class SyncTeam:
    """A fixed global batch."""

    decides, observes = "decision", "observe"

    def __init__(self, num_ranks: int) -> None:
        self.batch_size = SAMPLES_A_RANK * num_ranks
        members = [str(rank) for rank in range(num_ranks)]
        self.team = SimulatedSync(
            unequal_ranks(num_ranks),
            Link(meeting_s=SYNC_S),
            SyncPolicy(members, [MICRO_BATCH_SIZE] * num_ranks),
            batch_size=self.batch_size,
        )
        self.compute, self.observe = self.team.compute, self.team.observe
        self.decide()

    def decide(self) -> None:
        """Plan another window, and ask for a rank to park."""
        self.team.decide()
        self.team.policy.decide_parking(self.batch_size, 0)


class CadenceTeam:
    """Windows of local steps."""

    decides, observes = "decision of cadence", "observe of cadence"

    def __init__(self, num_ranks: int) -> None:
        self.ranks = unequal_ranks(num_ranks)
        members = [str(rank) for rank in range(num_ranks)]
        elche = ElChe(num_ranks, anchor=10)
        self.policy = CadencePolicy(members, elche, LevelGuard(), max_batch_diff=100)
        self.decide()

    def compute(self) -> None:
        """Make the reports of the window that was planned last."""
        self.reports = [
            rank.share(MICRO_BATCH_SIZE * steps, 0.0)._replace(steps=steps)
            for rank, steps in zip(self.ranks, self.plan.steps, strict=True)
        ]

    def observe(self) -> None:
        """Let the planner learn from them."""
        self.policy.observe(self.reports, SYNC_S)

    def decide(self) -> None:
        """Plan another window: the last of an epoch, which takes the most work."""
        self.plan = self.policy.plan(0, 0, left=15 * len(self.ranks), limit=None)


def main() -> None:
    """Measure every size of a team."""
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--ranks", type=numbers, default=list(RANKS), help="such as 2,64,1024")
    parser.add_argument("--quick", action="store_true", help="2, 1,024 and 10,240 ranks; 3 rounds")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.ranks, arguments.rounds = [2, 1024, 10240], 3
    before = load_before()
    rows: list[dict[str, Any]] = []
    for kind in (SyncTeam, CadenceTeam):
        for num_ranks in arguments.ranks:
            rows += measure(kind, num_ranks, arguments.rounds)
    print(text_of(rows))
    write_report(arguments, before, rows)


def measure(
    kind: type[SyncTeam | CadenceTeam], num_ranks: int, rounds: int
) -> list[dict[str, Any]]:
    """Return the rows of one kind of team of one size."""
    tracemalloc.start()
    team = kind(num_ranks)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    times: dict[str, list[float]] = {kind.decides: [], kind.observes: []}
    for _ in range(SETTLING + rounds):
        team.compute()
        times[kind.observes].append(seconds(team.observe))
        times[kind.decides].append(seconds(team.decide))
    return [
        {"name": name, "ranks": num_ranks, **spread("seconds", taken[SETTLING:]), "bytes": held}
        for name, taken in times.items()
    ]


def seconds(action: Callable[[], None]) -> float:
    """Return how long something takes the processor."""
    started_s = time.process_time()
    action()
    return time.process_time() - started_s


if __name__ == "__main__":
    main()
