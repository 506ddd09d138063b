"""Never slower than the fastest rank alone: the planner of SYNC under virtual time."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.planning.policies import LEAST_APART, Parking
from evener.planning.speed import CostModel
from evener.planning.sync import SyncPolicy
from evener.simulation.simulated_rank import Link, SimulatedRank
from evener.simulation.simulated_sync import SimulatedSync

DECIDED = 20
"""Windows after which the team is to work as it should."""


class Constant(Link):
    """An exchange that takes as long with any number of ranks."""

    def exchange_s(self, num_ranks: int) -> float:
        return self.transfer_s if num_ranks > 1 else 0.0


class NoisyLink(Constant):
    """The same with one-sided noise."""

    source = random.Random(0)

    def exchange_s(self, num_ranks: int) -> float:
        return super().exchange_s(num_ranks) * (1.0 + 0.3 * self.source.expovariate(1.0))


class Noisy(SimulatedRank):
    """A rank with one-sided noise."""

    def __init__(self, cost: CostModel, size: int, noise: float, source: random.Random) -> None:
        super().__init__(cost, size)
        self.scale, self.random = noise, source

    def lengthen(self, plain_s: float, at_s: float) -> float:
        return plain_s * (1.0 + self.scale * self.random.expovariate(1.0))


class Ranks:
    """Ranks with known costs, and their windows so far."""

    def __init__(
        self,
        costs: list[CostModel],
        exchange_s: float,
        batch_size: int,
        noise: float = 0.0,
        *,
        divides: bool = False,
        seed: int = 0,
        link: type[Constant] = Constant,
        hides: float = 0.0,
    ) -> None:
        self.costs, self.batch_size, self.noise = costs, batch_size, noise
        self.size = max(1, -(-batch_size // len(costs)))
        policy = SyncPolicy(
            [f"member-{rank}" for rank in range(len(costs))], [self.size] * len(costs)
        )
        fastest_s = min(cost.per_sample_s for cost in costs)
        policy.calibrate([fastest_s / cost.per_sample_s for cost in costs])
        source = random.Random(seed)
        self.team = SimulatedSync(
            [Noisy(cost, self.size, noise, source) for cost in costs],
            link(transfer_s=exchange_s, hides=hides),
            policy,
            batch_size=batch_size,
            divides_updates=divides,
        )
        self.policy = policy
        #: Seconds of every window, and who worked in it.
        self.windows: list[tuple[float, tuple[int, ...]]] = []

    def alone_s(self) -> float:
        """Seconds of a window of the fastest rank alone."""
        return min(cost.seconds(self.batch_size, self.size) for cost in self.costs)

    def decisions(self, num_windows: int) -> list[tuple[Parking, frozenset[int]]]:
        """Each decision to park ranks in so many windows, and who had no share then."""
        found: list[tuple[Parking, frozenset[int]]] = []
        decide = self.policy.decide_parking

        def note(batch_size: int, main: int) -> Parking | None:
            if (parking := decide(batch_size, main)) is not None:
                plan = self.policy.plan(0, 0, 0, batch_size)
                found.append((parking, frozenset(r for r, s in enumerate(plan.shares) if not s)))
            return parking

        self.policy.decide_parking = note  # type: ignore[method-assign]
        self.run(num_windows)
        return found

    def run(self, num_windows: int) -> None:
        self.windows += [(w.length_s, w.present) for w in self.team.run(num_windows)]


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
        hides=draw(st.sampled_from([0.0, 0.7])),
        **options,
    )


@given(team=teams())
def test_the_window_is_never_longer_than_that_of_the_fastest_rank_alone(team: Ranks) -> None:
    team.run(3 * DECIDED)
    for seconds, _ in team.windows[-DECIDED:]:
        assert seconds <= team.alone_s() * 1.001


def test_a_calibration_that_is_wrong_does_not_keep_the_faster_rank_without_work() -> None:
    """For one sample rank 0 is the faster one; by the calibration rank 1 is, for many."""
    team = Ranks([CostModel(0.0, 1.0), CostModel(0.3, 0.3, 0.6)], exchange_s=0.0, batch_size=1)
    team.run(3 * DECIDED)
    assert team.windows[0][0] == pytest.approx(1.2)
    assert team.windows[-1] == (1.0, (0,))


@given(team=teams(noise=0.3))
def test_whoever_is_parked_makes_windows_longer_by_the_forecasts_that_are_told(team: Ranks) -> None:
    for parking, idle in team.decisions(3 * DECIDED):
        if parking.after.window_s >= parking.before.window_s:
            assert parking.after.window_s == parking.before.window_s
            assert idle.issuperset(parking.ranks)


@pytest.mark.parametrize("seed", range(3))
def test_of_ranks_that_are_equally_fast_the_main_process_stays(seed: int) -> None:
    costs = [CostModel(0.0, 1e-3)] * 2
    team = Ranks(costs, exchange_s=0.1, batch_size=16, noise=0.3, seed=seed, link=NoisyLink)
    team.run(2 * DECIDED)
    assert team.team.parked == {1}


@pytest.mark.parametrize("seed", range(3))
def test_noise_parks_no_rank_that_helps_a_little(seed: int) -> None:
    """Together a window takes 14 ms, that of one rank alone 16 ms."""
    costs = [CostModel(0.0, 1e-3)] * 2
    team = Ranks(costs, exchange_s=6e-3, batch_size=16, noise=0.3, seed=seed, link=NoisyLink)
    team.run(3 * DECIDED)
    assert not team.team.parked


def test_ranks_that_pay_because_backward_hides_the_exchange_stay(monkeypatch):
    """With all of the exchange a window takes 0.66 s, with what is not hidden 0.46 s."""
    team = Ranks([CostModel(0.0, 0.075)] * 2, exchange_s=0.36, batch_size=8, hides=2 / 3)
    with monkeypatch.context() as patch:  # the order of gradients is not known so far
        patch.setattr(Constant, "exposed_s", lambda link, num_ranks, _: link.exchange_s(num_ranks))
        team.run(1)
    team.run(2 * DECIDED)
    assert {present for _, present in team.windows} == {(0, 1)}
    assert team.windows[-1][0] == pytest.approx(0.46)
    assert team.alone_s() == pytest.approx(0.6)


def test_ranks_that_compute_for_too_short_a_time_to_hide_the_exchange_are_parked():
    team = Ranks([CostModel(0.0, 0.01)] * 2, exchange_s=0.36, batch_size=8, hides=2 / 3)
    team.run(2 * DECIDED)
    assert team.team.parked == {1}


@pytest.mark.parametrize(("later_s", "parked"), [(0.02, set()), (0.36, {1})])
def test_a_parked_rank_is_tried_over_the_link_as_it_is_then(monkeypatch, later_s, parked):
    team = Ranks([CostModel(0.0, 0.01)] * 2, exchange_s=0.36, batch_size=8)
    team.run(DECIDED)
    assert team.team.parked == {1}
    monkeypatch.setattr(Constant, "exchange_s", lambda _, n: later_s if n > 1 else 0.0)
    apart = team.policy.windows_apart(8, 0.0)
    assert apart >= LEAST_APART
    team.run(apart + DECIDED)
    assert team.team.parked == parked
    assert len(team.windows[-1][1]) == 2 - len(parked)
