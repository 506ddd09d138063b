"""What follows from the speeds of a team and of its ranks alone."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.observe.estimate import Estimate, contribution


@pytest.mark.parametrize(
    ("alone", "team", "multiple", "parts"),
    [
        ((1000.0, 400.0), 1310.0, 1.31, ["adds 228%", "adds 31%"]),
        ((400.0, 1000.0), 1310.0, 1.31, ["adds 31%", "adds 228%"]),
        ((1000.0, 50.0), 800.0, 0.8, ["adds 1500%", "slows the team by 20%"]),
        ((1000.0, 50.0), 1005.0, 1.005, ["adds 1910%", "adds nothing"]),
        # On cores that ranks share, a team may be as fast as any of its ranks alone.
        ((1000.0, 960.0), 1000.0, 1.0, ["adds 4%", "as fast as any other"]),
        # The best of the others is a team, or one alone where the exchange eats everything.
        ((1000.0, 1000.0, 500.0), 2000.0, 2.0, ["adds 67%", "adds 67%", "adds 25%"]),
        ((1000.0, 100.0, 100.0), 600.0, 0.6, ["adds 500%", *["slows the team by 40%"] * 2]),
    ],
)
def test_what_a_rank_adds(
    alone: tuple[float, ...], team: float, multiple: float, parts: list[str]
) -> None:
    found = Estimate(speed=team, alone=dict(enumerate(alone)))
    assert found.of_fastest == pytest.approx(multiple)
    assert found.of_ideal == pytest.approx(team / sum(alone))
    assert [contribution(found, rank) for rank in range(len(alone))] == parts


@pytest.mark.parametrize(
    "changes",
    [
        {"speed": None},
        {"speed": 526.0},  # above 105 % of the ideal
        {"alone": {0: 300.0}, "unknown": {1}},
        {"alone": {}},
    ],
)
def test_an_impossible_or_unknown_multiple_is_none(changes: dict[str, Any]) -> None:
    given: dict[str, Any] = {"speed": 450.0, "alone": {0: 300.0, 1: 200.0}}
    found = Estimate(**{**given, **changes})
    assert (found.of_fastest, found.of_ideal, found.ideal) == (None, None, None)
    assert [found.adds(rank) for rank in (0, 1)] == [None, None]
    assert found.speeds_changed == (changes.get("speed") == 526.0)


def test_a_team_may_seem_a_little_faster_than_all_of_its_ranks() -> None:
    found = Estimate(speed=520.0, alone={0: 300.0, 1: 200.0})
    assert found.of_ideal == pytest.approx(1.04)


def test_the_lowest_of_equals_is_the_fastest_and_parked_ranks_add_nothing() -> None:
    found = Estimate(speed=190.0, alone={0: 10.0, 1: 100.0, 2: 100.0}, parked={0})
    assert found.fastest == 1
    assert (found.adds(0), contribution(found, 0)) == (None, "parked")
    assert found.without(1) == 100.0


@given(
    st.lists(st.floats(0.01, 1e6), min_size=2, max_size=5),
    st.floats(0.01, 1e7),
    st.sets(st.integers(1, 4)),
)
def test_a_team_is_never_compared_with_less_than_one_other_rank(
    alone: list[float], team: float, parked: set[int]
) -> None:
    found = Estimate(speed=team, alone=dict(enumerate(alone)), parked=parked)
    for rank in set(range(len(alone))) - parked:
        without = found.without(rank)
        others = [alone[r] for r in range(len(alone)) if r not in {*parked, rank}]
        assert without is None or max(others) <= without <= max(*others, sum(others))
