"""A rank that turns slow in mid-window, under virtual time: planner and clocks, no torch."""

import random
from collections.abc import Callable, Sequence

import pytest

from evener.planning.cadence import CadencePolicy
from evener.planning.elche import ElChe
from evener.planning.guard import NoGuard
from evener.planning.report import Report
from evener.planning.speed import CostModel
from evener.simulation.simulated_local import SimulatedLocal
from evener.simulation.simulated_rank import Link, SimulatedRank, SimulatedWindow


class Changing(SimulatedRank):
    """A rank whose steps take other times at other moments."""

    def __init__(self, rank: int, step_s: Callable[[int, float], float]) -> None:
        super().__init__(CostModel(0.0, 1.0))
        self.rank, self.step_s = rank, step_s

    def step(self, samples: int, at_s: float) -> Report:
        return Report(steps=1, samples=1, weight=1, busy_s=self.step_s(self.rank, at_s))


def simulate(
    num_windows: int,
    step_s: Callable[[int, float], float],
    world_size: int,
    anchor: int,
    max_batch_diff: int | None = None,
) -> list[SimulatedWindow]:
    """Windows of CADENCE; ``step_s(rank, now)`` is what a step begun at ``now`` takes."""
    policy = CadencePolicy(
        [f"m{r}" for r in range(world_size)],
        ElChe(world_size, anchor),
        NoGuard(),
        max_batch_diff=max_batch_diff,
    )
    ranks = [Changing(rank, step_s) for rank in range(world_size)]
    link = Link(latency_s=0.002 / (world_size - 1))  # 4 ms for an exchange
    team = SimulatedLocal(ranks, link, policy, batch_size=1)
    return team.run(num_windows)


def steps(window: SimulatedWindow) -> list[int]:
    return [report.steps for report in window.reports]


def waited(windows: Sequence[SimulatedWindow], ranks: Sequence[int]) -> float:
    """Part of the time that these ranks waited."""
    total_s = sum(w.length_s for w in windows) * len(ranks)
    return sum(w.waits_s[r] for w in windows for r in ranks) / total_s


@pytest.mark.parametrize(
    ("speeds", "dropped"), [((1, 1 / 3), 0), ((1, 1 / 3), 1), ((1, 1 / 2, 1 / 4), 1), ((1, 1), 1)]
)
@pytest.mark.parametrize("anchor", [8, 20])
def test_a_rank_that_becomes_four_times_slower_hardly_costs_the_others(speeds, dropped, anchor):
    noise = random.Random(1)
    usual_s = [0.03 / s for s in speeds]
    settled = simulate(20, lambda r, _: usual_s[r], len(speeds), anchor)
    begin_s = sum(w.length_s for w in settled) - 0.6 * settled[-1].length_s  # in mid-window

    def step_s(rank: int, now_s: float) -> float:
        slow = 4.0 if rank == dropped and now_s >= begin_s else 1.0
        return usual_s[rank] * slow * noise.uniform(0.98, 1.02)

    windows = simulate(70, step_s, len(speeds), anchor)
    others = [r for r in range(len(speeds)) if r != dropped]
    assert waited(windows[20:], others) < 0.05
    # It goes on contributing, at its new pace.
    assert all(steps(w)[dropped] >= 1 for w in windows[20:])
    rate = sum(steps(w)[dropped] for w in windows[40:]) / sum(w.length_s for w in windows[40:])
    assert rate == pytest.approx(1 / (4 * usual_s[dropped]), rel=0.1)


@pytest.mark.parametrize("speeds", [(1, 1 / 3), (1, 1 / 2, 1 / 4), (1 / 2, 1 / 2, 1 / 8, 1 / 8)])
def test_unequal_ranks_do_nearly_all_that_they_can(speeds):
    noise = random.Random(2)
    windows = simulate(
        60, lambda r, _: 0.03 / speeds[r] * noise.uniform(0.95, 1.05), len(speeds), 8
    )[10:]
    done = sum(sum(steps(w)) for w in windows) / sum(w.length_s for w in windows)
    assert done / sum(s / 0.03 for s in speeds) > 0.95


@pytest.mark.parametrize("diff", [0, 2])
def test_max_batch_diff_holds_when_ranks_jitter_and_one_turns_slow(diff):
    noise = random.Random(3)

    def step_s(rank: int, now_s: float) -> float:
        slow = 4.0 if rank == 1 and now_s >= 5.0 else 1.0
        return 0.03 * slow * noise.uniform(0.8, 1.2)

    windows = simulate(40, step_s, 3, 10, max_batch_diff=diff)
    assert all(max(steps(w)) - min(steps(w)) <= diff for w in windows)
