"""Elastic teams that make local steps: ranks die at every point, and others join; on threads."""

import time
from collections.abc import Callable

import pytest

from evener import Ddp, WindowResult
from helpers.clocks import RankClocks
from helpers.elastic import Kill, ThreadMembership
from helpers.elastic_local import BATCH, DATA, EPOCHS, NUM_SAMPLES, LocalRuns

# Rounds of rows in the order of a run: 0 plans; then two for each window, of reports and of the
# next plan.
PLAN, NEXT_PLAN_OF_2 = 0, 6


@pytest.fixture(params=["cadence", "async"])
def runs(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, rank_clocks: RankClocks
) -> LocalRuns:
    return LocalRuns(monkeypatch, rank_clocks, request.param)


@pytest.mark.parametrize("told", ["w0", "w2"])
def test_a_window_has_landed_on_some_ranks_when_another_dies(runs: LocalRuns, told: str) -> None:
    """The rank on which it has not receives the consensus."""
    kill = Kill("w1", "a round", skip=NEXT_PLAN_OF_2, when="inside", told=[told])
    team = runs.run(3, [kill])
    assert team.formations[-1].base == 3
    assert team.formations[-1].receivers == ({"w0": "w2", "w2": "w0"}[told],)


def test_a_value_is_asked_for_in_mid_batch_and_a_rank_dies(runs: LocalRuns) -> None:
    """The batch that the loop is in is done again, and so are those that were not averaged."""

    def script(ddp: Ddp, step: Callable[[], None]) -> None:
        model, asked = ddp.assembly.model, 0
        loader = ddp.loader(DATA[:NUM_SAMPLES], batch_size=BATCH, seed=3)
        for epoch in ddp.epochs(EPOCHS):
            for x, y in loader.epoch(epoch):
                step()
                loss = ((model(x) - y) ** 2).mean()
                if ddp.window == 2 and not asked:
                    asked = 1
                    ddp.weighted_mean(1.0)
                ddp.backward(loss)
                ddp.step()

    team = runs.run(3, [Kill("w1", "a round", skip=5)], body=script)
    assert len(team.formations) == 2


def test_a_rank_dies_when_others_have_left_their_loop(runs: LocalRuns) -> None:
    """The others are led out, and all are at the last average."""

    def script(ddp: Ddp, step: Callable[[], None]) -> None:
        model = ddp.assembly.model
        loader = ddp.loader(DATA[:NUM_SAMPLES], batch_size=BATCH, seed=3)
        for x, y in loader.epoch(0):
            step()
            ddp.backward(((model(x) - y) ** 2).mean())
            ddp.step()
            if ddp.window == 2 and ddp.rank == 0:
                break
        ddp.weighted_mean(1.0)

    team = runs.run(3, [Kill("w1", "parameters of window 2")], body=script, whole=False)
    assert len(team.formations) == 2
    one, other = (trained.state for trained in runs.trained.values())
    assert all(a.equal(b) for a, b in zip(one, other, strict=True))


def test_a_rank_is_told_to_leave(runs: LocalRuns) -> None:
    """What it has not averaged yet, others do again."""

    def tell(membership: ThreadMembership, result: WindowResult) -> None:
        membership.is_told_to_leave |= membership.member == "w1" and result.window == 2

    team = runs.run(3, at_commit=tell)
    assert isinstance(team.fate("w1").error, KeyboardInterrupt)
    assert [len(formation.members) for formation in team.formations] == [3, 2]


def test_a_rank_that_was_left_out_joins_again(runs: LocalRuns) -> None:
    def stop(membership: ThreadMembership, result: WindowResult) -> None:
        team = membership.team
        if membership.member == "w2" and result.window == 2 and len(team.formations) == 1:
            team.leave_out("w2")
        while len(team.formations) == 2 and membership.member == "w0" and not team.joiners:
            time.sleep(0.001)  # or the others would do the run to its end

    team = runs.run(3, at_commit=stop)
    assert [len(formation.members) for formation in team.formations] == [3, 2, 3]
