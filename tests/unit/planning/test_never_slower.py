"""Never slower than the fastest rank alone: the planner of SYNC under virtual time."""

import random
from dataclasses import dataclass, field
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from evener.planning.policies import LEAST_APART
from evener.planning.report import Report
from evener.planning.speed import CostModel, num_micro_batches
from evener.planning.sync import SyncPolicy

BOUNDED = settings(deadline=None, derandomize=True, max_examples=25, database=None)
DECIDED = 20
"""Windows after which the team is to work as it should."""


@dataclass
class Ranks:
    """Ranks with known costs, and what an engine does with the planner's word."""

    costs: list[CostModel]
    exchange_s: float
    batch_size: int
    noise: float = 0.0
    seed: int = 0
    #: Whether the ranks that are present divide the update among them.
    divides: bool = False
    #: Seconds of every window, those of changes included, and who worked in it.
    windows: list[tuple[float, tuple[int, ...]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.size = max(1, -(-self.batch_size // len(self.costs)))
        self.policy = SyncPolicy(
            [f"member-{rank}" for rank in range(len(self.costs))], [self.size] * len(self.costs)
        )
        fastest_s = min(cost.per_sample_s for cost in self.costs)
        self.policy.calibrate([fastest_s / cost.per_sample_s for cost in self.costs])
        self.away: frozenset[int] = frozenset()
        self.recall_at = 0
        self.planned: list = []

    @property
    def present(self) -> list[int]:
        return [rank for rank in range(len(self.costs)) if rank not in self.away]

    def alone_s(self) -> float:
        """Seconds of a window of the fastest rank alone."""
        return min(cost.seconds(self.batch_size, self.size) for cost in self.costs)

    def exchange(self) -> float:
        return self.exchange_s if len(self.present) > 1 else 0.0

    def change(self, away: frozenset[int], *work_for_all: float) -> None:
        self.away = away
        self.policy.set_parked(away)
        self.planned = [self.plan(wanted) for wanted in work_for_all]

    def plan(self, work_for_all: float = 0.0):
        window = len(self.windows)
        return self.policy.plan(window, 0, 0, self.batch_size, work_for_all=work_for_all)

    def run(self, num_windows: int) -> None:
        """Plans are made two windows ahead; reports are known a window later."""
        self.planned = self.planned or [self.plan(), self.plan()]
        for _ in range(num_windows):
            plan = self.planned.pop(0)
            self.planned.append(self.plan())
            misfits = self.policy.ranks_to_park(self.batch_size)
            noisy = [1.0 + self.noise * self.random.expovariate(1.0) for _ in self.costs]
            parts = len(self.present) if self.divides else 1
            costs = [cost._replace(window_s=cost.window_s / parts) for cost in self.costs]
            spent_s = [
                cost.seconds(share, self.size) * noise
                for cost, share, noise in zip(costs, plan.shares, noisy, strict=True)
            ]
            reports = [
                Report(
                    samples=share,
                    micro_batches=num_micro_batches(share, self.size),
                    compute_s=spent_s[rank],
                    update_s=costs[rank].window_s * noisy[rank],
                    update_parts=parts,
                )
                if rank not in self.away
                else Report()
                for rank, share in enumerate(plan.shares)
            ]
            window_s = max(spent_s[rank] for rank in self.present) + self.exchange()
            self.windows.append((window_s, tuple(self.present)))
            self.policy.observe(reports, plan, self.exchange())
            if misfits:
                self.change(self.away | misfits, 0.0, 0.0)
                apart = self.policy.windows_apart(self.batch_size, 0.0)
                self.recall_at = len(self.windows) + apart
            elif self.away and len(self.windows) >= self.recall_at:
                self.change(frozenset(), float("inf"), float("inf"))


SPEEDS = st.floats(-3.0, 0.0).map(lambda power: 10.0**power)


@st.composite
def teams(draw: st.DrawFn, **options: float) -> Ranks:
    costs = []
    for _ in range(draw(st.integers(2, 5))):
        speed, fixed, update = draw(SPEEDS), draw(st.floats(0, 8)), draw(st.floats(0, 8))
        costs.append(CostModel(1e-3 * fixed / speed, 1e-3 / speed, 1e-3 * update / speed))
    return Ranks(
        costs,
        exchange_s=draw(st.sampled_from([0.0, 1e-4, 3e-3, 3e-2, 1.0])),
        batch_size=draw(st.integers(1, 96)),
        **options,
    )


@BOUNDED
@given(team=teams())
def test_the_window_is_never_longer_than_that_of_the_fastest_rank_alone(team: Ranks) -> None:
    team.run(3 * DECIDED)
    for seconds, _ in team.windows[-DECIDED:]:
        assert seconds <= team.alone_s() * 1.001


def test_a_rank_without_samples_stays_where_it_shortens_the_update() -> None:
    update_s = 8e-3
    slow = CostModel(0.0, 1.0, update_s)
    for divides in (False, True):
        costs = [CostModel(0.0, 1e-3, update_s)] * 2 + [slow]
        team = Ranks(costs, exchange_s=1e-3, batch_size=16, divides=divides)
        team.run(3 * DECIDED)
        assert team.away == (frozenset() if divides else {2})
        # 8 samples, the update in two or three parts, and the exchange.
        assert team.windows[-1][0] <= 8e-3 + update_s / (3 if divides else 1) + 1e-3 + 1e-6


@settings(BOUNDED, max_examples=6)
@given(team=teams(noise=0.03))
def test_parked_ranks_do_not_come_and_go(team: Ranks) -> None:
    """They are tried again, as seldom as costs little; nothing else changes who works."""
    team.run(3 * LEAST_APART)
    settled = team.windows[3 * DECIDED :]
    changes = sum(left[1] != right[1] for left, right in pairwise(settled))
    assert changes <= 4 * (1 + len(settled) // LEAST_APART)
    spent_s = sum(seconds for seconds, _ in settled)
    assert spent_s <= 1.02 * (1.0 + 2 * team.noise) * team.alone_s() * len(settled)
