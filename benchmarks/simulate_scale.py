"""What a window costs in Python, by the number of ranks: plans, data, rows. No process, no torch.

    python benchmarks/simulate_scale.py --json simulate_scale.json
    python benchmarks/simulate_scale.py --ranks 2,64

``decision`` is a plan and the decision whether a rank should be parked; ``observe``, what is learnt
from a window's reports before it: on the rank that plans. In every round a team of unequal ranks,
whose speeds are settled, reports the window that was planned last, with new timings: 2 % of noise,
and one window in twenty disturbed. ``take`` and ``commit`` are what every rank does with its copy
of the cursor: what is leased for a window, in queues for each rank where they make local steps, and
what is committed of it. ``row`` is one rank's row of numbers in the exchange that ends a window,
written and read again; each rank reads those of all.

``seconds`` is the best of the rounds, ``median_s`` their median, both in processor time: nothing
here waits, and other programs on the machine count less. ``bytes`` is the memory that a team's
planner or cursor holds; of ``row`` what each rank receives in a window.
"""

import argparse
import random
import statistics
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from machine import load_before, write_report
from options import make_parser, numbers

from evener.data.cursor import Cursor, Slice
from evener.data.leases import LeaseBook
from evener.planning.cadence import CadencePolicy
from evener.planning.elche import ElChe
from evener.planning.guard import LevelGuard
from evener.planning.plans import WindowPlan
from evener.planning.report import Report
from evener.planning.speed import CostModel
from evener.planning.sync import SyncPolicy
from evener.protocol.row import Purpose, Row, decode, encode
from evener.simulation.simulated_rank import Link, SimulatedRank
from evener.simulation.simulated_sync import SimulatedSync

RANKS = (2, 8, 64, 256, 1024, 10240)
SAMPLES_A_RANK = 32
MICRO_BATCH_SIZE = 8
LOCAL_STEPS = 2
SYNC_S = 0.01
#: Samples of an epoch whose end is not reached.
ENDLESS = 10**12
#: Windows before the first round of a planner: more than a speed model remembers.
SETTLING = 20


class Team(Protocol):
    """A planner, and ranks that report what they are told to do."""

    def compute(self) -> None:
        """Makes the reports of the window that was planned last."""

    def observe(self) -> None:
        """Lets the planner learn from them."""

    def decide(self) -> None:
        """Plans another window."""


class Disturbed(SimulatedRank):
    """A rank whose times have noise, as they are measured."""

    def __init__(self, speed: float, source: random.Random) -> None:
        super().__init__(CostModel(0.002 / speed, 0.001 / speed), MICRO_BATCH_SIZE)
        self.source = source

    def factor(self, at_s: float) -> float:
        """See ``SimulatedRank``."""
        outlier = 3.0 if self.source.random() < 0.05 else 1.0
        return outlier * self.source.uniform(0.98, 1.02)


def unlike_ranks(num_ranks: int) -> list[Disturbed]:
    """Ranks of unlike speeds."""
    source = random.Random(num_ranks)
    return [Disturbed(source.uniform(0.25, 1.0), source) for _ in range(num_ranks)]


class SyncTeam:
    """A fixed global batch."""

    def __init__(self, num_ranks: int) -> None:
        self.batch_size = SAMPLES_A_RANK * num_ranks
        members = [str(rank) for rank in range(num_ranks)]
        self.team = SimulatedSync(
            unlike_ranks(num_ranks),
            Link(meeting_s=SYNC_S),
            SyncPolicy(members, [MICRO_BATCH_SIZE] * num_ranks),
            batch_size=self.batch_size,
            num_samples=ENDLESS,
        )
        self.decide()

    def compute(self) -> None:
        """Makes the reports of the window that was planned last."""
        self.team.compute()

    def observe(self) -> None:
        """Lets the planner learn from them."""
        self.team.observe()

    def decide(self) -> None:
        """Plans another window, and asks for a rank to park."""
        self.team.decide()
        self.team.policy.decide_parking(self.batch_size, 0)


class CadenceTeam:
    """Windows of local steps."""

    def __init__(self, num_ranks: int) -> None:
        self.ranks = unlike_ranks(num_ranks)
        members = [str(rank) for rank in range(num_ranks)]
        elche = ElChe(num_ranks, anchor=10)
        self.policy = CadencePolicy(members, elche, LevelGuard(), max_batch_diff=100)
        self.decide()

    def compute(self) -> None:
        """Makes the reports of the window that was planned last."""
        self.reports = [
            rank.share(MICRO_BATCH_SIZE * steps, 0.0)._replace(steps=steps)
            for rank, steps in zip(self.ranks, self.plan.steps, strict=True)
        ]

    def observe(self) -> None:
        """Lets the planner learn from them."""
        self.policy.observe(self.reports, SYNC_S)

    def decide(self) -> None:
        """Plans another window: the last of an epoch, which takes the most work."""
        left = 15 * len(self.policy.members)
        self.plan = self.policy.plan(0, 0, left=left, limit=None)


class SyncCursor:
    """Windows of a fixed global batch, planned two ahead."""

    def __init__(self, num_ranks: int) -> None:
        self.batch_size = SAMPLES_A_RANK * num_ranks
        self.cursor = Cursor(1000 * self.batch_size, seed=0)
        self.leases: list[Slice] = []

    def compute(self) -> None:
        """Does nothing: samples are not computed here."""

    def observe(self) -> None:
        """Commits the oldest window."""
        if len(self.leases) > 2:
            self.cursor.commit(self.leases.pop(0))

    def decide(self) -> None:
        """Takes the samples of another window."""
        piece = self.cursor.take(self.batch_size)
        assert piece is not None
        self.leases.append(piece)


class LocalCursor:
    """Queues of batches, which ranks work off at speeds of their own."""

    def __init__(self, num_ranks: int) -> None:
        draw = random.Random(num_ranks)
        self.steps = [draw.randint(LOCAL_STEPS, 4 * LOCAL_STEPS) for _ in range(num_ranks)]
        batches = 100 * sum(self.steps)
        self.book = LeaseBook(
            Cursor(batches * MICRO_BATCH_SIZE, 0), MICRO_BATCH_SIZE, range(num_ranks)
        )
        self.decide()

    def compute(self) -> None:
        """Does nothing: samples are not computed here."""

    def observe(self) -> None:
        """Commits what ranks have done in a window."""
        done = [
            piece
            for rank, steps in enumerate(self.steps)
            for piece in self.book.retire(rank, steps, steps * MICRO_BATCH_SIZE)
        ]
        for piece in done:
            self.book.cursor.commit(piece)

    def decide(self) -> None:
        """Fills queues up for another window, and a quarter of one more."""
        self.book.fill([steps + steps // 4 for steps in self.steps])


class Rows:
    """The row of the rank that plans."""

    def __init__(self, num_ranks: int) -> None:
        shares = (SAMPLES_A_RANK,) * num_ranks
        plan = WindowPlan(0, 0, 0, sum(shares), shares)
        report = Report(weight=1.0, samples=SAMPLES_A_RANK, micro_batches=4, compute_s=0.1)
        self.row = Row(purpose=Purpose.WINDOW, window=0, report=report, plan=plan)
        self.num_ranks = num_ranks
        self.decide()

    @property
    def num_bytes(self) -> int:
        """What each rank receives in a window."""
        return 8 * len(self.numbers) * self.num_ranks

    def compute(self) -> None:
        """Does nothing: the row is the same in every window."""

    def observe(self) -> None:
        """Reads it."""
        decode(self.numbers)

    def decide(self) -> None:
        """Writes it."""
        self.numbers = encode(self.row, self.num_ranks)


@dataclass(frozen=True)
class Way:
    """A kind of team, and the names of its rows."""

    make: Callable[[int], Team]
    decide: str
    observe: str
    #: Windows before the first round; planners remember as many.
    settling: int = 1


WAYS = (
    Way(SyncTeam, "decision", "observe", SETTLING),
    Way(CadenceTeam, "decision of cadence", "observe of cadence", SETTLING),
    Way(SyncCursor, "take", "commit"),
    Way(LocalCursor, "take of cadence", "commit of cadence"),
    Way(Rows, "row written", "row read"),
)


def main() -> None:
    """Measures every size of a team."""
    arguments = parse_arguments()
    before = load_before()
    rows: list[dict[str, Any]] = []
    for way in WAYS:
        for num_ranks in arguments.ranks:
            for row in measure(way, num_ranks, arguments.rounds):
                rows.append(row)
                told = f"{1000 * row['seconds']:10.3f} ms {row['bytes'] / 2**20:10.3f} MiB"
                print(f"{row['name']:20} {num_ranks:6} ranks {told}", flush=True)
    write_report(arguments, before, rows)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--ranks", type=numbers, default=list(RANKS), help="such as 2,64,1024")
    parser.add_argument("--quick", action="store_true", help="2, 1,024 and 10,240 ranks; 3 rounds")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.ranks, arguments.rounds = [2, 1024, 10240], 3
    return arguments


def measure(way: Way, num_ranks: int, rounds: int) -> list[dict[str, Any]]:
    """The rows of one kind of team of one size."""
    held = memory(way, num_ranks)
    team = way.make(num_ranks)
    times: dict[str, list[float]] = {way.decide: [], way.observe: []}
    for _ in range(way.settling + rounds):
        team.compute()
        times[way.observe].append(seconds(team.observe))
        times[way.decide].append(seconds(team.decide))
    return [
        {
            "name": name,
            "ranks": num_ranks,
            "seconds": round(min(taken[way.settling :]), 7),
            "median_s": round(statistics.median(taken[way.settling :]), 7),
            "bytes": held,
        }
        for name, taken in times.items()
    ]


def memory(way: Way, num_ranks: int) -> int:
    """Bytes that a team of one size holds after some windows; of rows, what is received."""
    tracemalloc.start()
    try:
        team = way.make(num_ranks)
        for _ in range(2):
            team.compute()
            team.observe()
            team.decide()
        return team.num_bytes if isinstance(team, Rows) else tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def seconds(action: Callable[[], None]) -> float:
    """How long it takes the processor."""
    started_s = time.process_time()
    action()
    return time.process_time() - started_s


if __name__ == "__main__":
    main()
