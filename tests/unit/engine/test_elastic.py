"""Elastic teams in SYNC: ranks die at every point, and others join; on threads."""

from collections.abc import Mapping
from typing import Any

import pytest

from evener import Sink, WindowResult
from evener.errors import ConfigError
from helpers.elastic import ElasticThreads, Kill, ThreadMembership
from helpers.elastic_runs import begin, check, run

# Rounds of rows in the order of a run: 0, 1 calibrate; 2, 3 plan; 4 to 7 close the windows of an
# epoch; 8 ends it; 9 averages a value; 10, 11 plan the next epoch; 12 to 15 close its windows.
ROUNDS = (1, 3, 4, 6, 8, 9, 11)


@pytest.mark.parametrize("skip", ROUNDS)
def test_the_planner_dies_before_a_round(skip: int) -> None:
    team, trained = run(2, [Kill("w0", "a meeting", skip=skip)])
    check(team, trained)
    assert [formation.members for formation in team.formations] == [("w0", "w1"), ("w1",)]


@pytest.mark.parametrize("skip", ROUNDS)
def test_a_rank_dies_in_a_round_of_which_only_one_of_the_others_hears(skip: int) -> None:
    team, trained = run(3, [Kill("w1", "a meeting", skip=skip, when="inside", told=["w2"])])
    check(team, trained)
    assert [len(formation.members) for formation in team.formations] == [3, 2]


@pytest.mark.parametrize("when", ["before", "inside", "after"])
@pytest.mark.parametrize(("founders", "what"), [(2, "gradients"), (3, "buffers"), (5, "gradients")])
def test_a_rank_dies_in_the_exchange_of_a_window(founders: int, what: str, when: str) -> None:
    kill = Kill("w1", f"{what} of window 2", when=when, told=["w0"])
    team, trained = run(founders, [kill])
    check(team, trained)
    assert len(trained) == founders - 1


def test_a_rank_joins_and_contributes() -> None:
    team, trained = run(2, joins_after=1)
    check(team, trained)
    assert team.formations[-1].members == ("w0", "w1", "j")
    assert team.formations[-1].receivers == ("j",)
    assert sum(trained["j"].handed_out) > 0


@pytest.mark.parametrize("member", ["w0", "w1", "j"])
@pytest.mark.parametrize("what", ["state index", "parameters of a recall", "optimizer state"])
def test_a_rank_dies_while_another_one_joins(member: str, what: str) -> None:
    team, trained = run(3, [Kill(member, what)], joins_after=1)
    check(team, trained)
    assert sorted(trained) == sorted({"w0", "w1", "w2", "j"} - {member})


def test_a_rank_dies_while_it_tells_of_a_window() -> None:
    def die(membership: ThreadMembership, result: WindowResult) -> None:
        if membership.member == "w1" and result.window == 2:
            membership.team.die("w1")

    team, trained = run(3, at_commit=die)
    check(team, trained)


def test_two_ranks_die_one_after_the_other() -> None:
    kills = [Kill("w0", "gradients of window 1"), Kill("w1", "gradients of window 5")]
    team, trained = run(3, kills)
    check(team, trained)
    assert [formation.base for formation in team.formations] == [0, 1, 5]


class Kept(Sink):
    """Keeps the events of changes."""

    def __init__(self, events: list[Mapping[str, Any]]) -> None:
        self.events = events

    def emit(self, event: Mapping[str, Any]) -> None:
        if event["type"] in ("worker_lost", "reformed", "healed", "worker_joined"):
            self.events.append(event)

    def close(self) -> None:
        pass


def test_events_tell_who_was_lost_and_who_joined() -> None:
    events: list[Mapping[str, Any]] = []
    kills = [Kill("w1", "gradients of window 6")]
    run(2, kills, joins_after=1, sinks=[lambda: Kept(events)])
    told = [(event["type"], event.get("rank"), event.get("members")) for event in events]
    assert told == [
        ("reformed", None, ["w0", "w1", "j"]),
        ("healed", 2, None),
        ("worker_joined", 2, None),
        ("worker_lost", 1, None),
        ("reformed", None, ["w0", "j"]),
    ]
    assert all(event["reform_s"] >= 0 for event in events if event["type"] == "reformed")
    assert all(event["num_bytes"] > 0 for event in events if event["type"] == "healed")


def test_a_policy_of_local_steps_is_refused() -> None:
    def body(membership: ThreadMembership) -> None:
        begin(membership, seed=1, policy="cadence")

    (fate,) = ElasticThreads(1).run(body)
    assert isinstance(fate.error, ConfigError)
    assert "policy 'sync' so far" in str(fate.error)
