"""Elastic teams that make local steps: ranks die at every point, and others join; on threads."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from evener import Ddp, WindowResult
from evener.engine.local import LocalEngine
from helpers.clocks import RankClocks
from helpers.elastic import Kill, ThreadMembership
from helpers.elastic_local import BATCH, DATA, EPOCHS, NUM_SAMPLES, LocalRuns, loop
from helpers.sinks import Kept

# Rounds of rows in the order of a run: 0 plans; then two for each window, of reports and of the
# next plan.
PLAN, NEXT_PLAN_OF_2 = 0, 6


@pytest.fixture(params=["cadence", "async"])
def runs(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, rank_clocks: RankClocks
) -> LocalRuns:
    return LocalRuns(monkeypatch, rank_clocks, request.param)


@pytest.mark.parametrize("skip", [PLAN, NEXT_PLAN_OF_2])
def test_the_planner_dies_before_a_round(runs: LocalRuns, skip: int) -> None:
    team = runs.run(2, [Kill("w0", "a round", skip=skip)])
    assert [formation.members for formation in team.formations] == [("w0", "w1"), ("w1",)]


@pytest.mark.parametrize("told", ["w0", "w2"])
def test_a_window_has_landed_on_some_ranks_when_another_dies(runs: LocalRuns, told: str) -> None:
    """The rank on which it has not receives the consensus."""
    kill = Kill("w1", "a round", skip=NEXT_PLAN_OF_2, when="inside", told=[told])
    team = runs.run(3, [kill])
    assert team.formations[-1].base == 3
    assert team.formations[-1].receivers == ({"w0": "w2", "w2": "w0"}[told],)


def test_a_rank_joins_and_contributes(runs: LocalRuns) -> None:
    team = runs.run(2, joins_after=1)
    assert team.formations[-1].members == ("w0", "w1", "j")
    assert team.formations[-1].receivers == ("j",)
    assert sum(len(done.get("j", ())) for done in runs.record.done.values()) > 0


def test_a_rank_dies_that_has_received_only_a_part_of_the_state(runs: LocalRuns) -> None:
    runs.run(3, [Kill("j", "buffers")], joins_after=1)
    assert sorted(runs.trained) == ["w0", "w1", "w2"]


def test_events_of_windows_have_rows_of_those_who_are_there(runs: LocalRuns) -> None:
    kept = Kept()

    def body(ddp: Ddp, step: Callable[[], None]) -> None:
        ddp.events.report_to([kept])
        loop(ddp, step)

    runs.run(3, [Kill("w1", "parameters of window 2")], body=body)
    windows = [event for event in kept.events if event["type"] == "window"]
    assert [event["window"] for event in windows] == sorted(runs.record.done)
    members = [[row["member"] for row in event["ranks"]] for event in windows]
    assert members[0] == ["w0", "w1", "w2"]
    assert members[-1] == ["w0", "w2"]
    done = runs.record.done
    assert all(
        row["steps"] == len(done[event["window"]][row["member"]])
        for event in windows
        for row in event["ranks"]
        if row["samples"]
    )


def test_one_dies_one_joins_and_another_dies(runs: LocalRuns) -> None:
    kills = [Kill("w1", "parameters of window 2"), Kill("w0", "parameters of window 7")]
    team = runs.run(3, kills, joins_after=2)
    assert [len(formation.members) for formation in team.formations] == [3, 2, 3, 2]


def test_a_rank_dies_while_it_tells_of_a_window(runs: LocalRuns) -> None:
    def die(membership: ThreadMembership, result: WindowResult) -> None:
        if membership.member == "w1" and result.window == 2:
            membership.team.die("w1")

    runs.run(3, at_commit=die)


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


def test_a_void_batch_leaves_the_buffers_that_have_arrived(runs: LocalRuns) -> None:
    """Those of the change, not those with which the batch began."""

    class SeenError(Exception):
        """The batch is over."""

    def script(ddp: Ddp, step: Callable[[], None]) -> None:
        model, engine = ddp.assembly.model, ddp.assembly.engine
        assert isinstance(engine, LocalEngine)
        for x, y in ddp.loader(DATA, batch_size=BATCH, seed=3).epoch(0):
            step()
            is_changed = ddp.window == 2
            if is_changed:  # before the forward, as where a value is asked for here
                engine.drop()
                engine.buffers.agreed[0].add_(1)
                engine.recovered()
                engine.generations._resume()
            ddp.backward(((model(x) - y) ** 2).mean())
            ddp.step()
            if is_changed:
                assert all(map(torch.equal, engine.buffers.agreed, model.buffers()))
                raise SeenError

    with pytest.raises(SeenError):
        runs.run(1, body=script, whole=False)


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


def test_a_rank_dies_while_the_team_saves(runs: LocalRuns, tmp_path: Path) -> None:
    def script(ddp: Ddp, step: Callable[[], None]) -> None:
        loop(ddp, step, at_end=lambda epoch: ddp.save(tmp_path / f"{epoch}"))

    team = runs.run(3, [Kill("w0", "answers", skip=3, when="inside", told=["w2"])], body=script)
    assert len(team.formations) == 2
    assert (tmp_path / "0").exists()
    assert (tmp_path / "1").exists()


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
