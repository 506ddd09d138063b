"""The three answers about a run, in words."""

from dataclasses import replace

import pytest

from evener.observe.estimate import Estimate
from evener.observe.table import RunTable
from evener.observe.waiting import Waits, describe_waits
from evener.run_report.advice import Advice
from evener.run_report.verdict import RunVerdict
from helpers.made_runs import MadeRun

FINE = RunVerdict(
    estimate=Estimate(speed=126.0, alone={0: 100.0, 1: 40.0}),
    names={0: "rank 0 (a)", 1: "rank 1 (b)"},
    lost_waiting=0.086,
    waits="Rank 0 waits.",
)
LARGER = Advice(kind="coarse_split", text="Too coarse.", key="batch_size=64", gain=0.12)


def test_a_verdict_in_one_line_and_its_three_answers() -> None:
    found = replace(FINE, advice=(LARGER,))
    assert found.text == (
        "1.26× rank 0 alone · rank 1 adds 26% · 8.6% of the time lost waiting · try batch_size=64"
    )
    assert found.lines == [
        "The team does 1.26× rank 0 alone, 90% of all ranks together: rank 1 adds 26%.",
        "Rank 0 waits.",
        "Too coarse. Set batch_size=64. Expected: +12%.",
    ]
    assert FINE.change == "No change is expected to make it noticeably faster."


@pytest.mark.parametrize(
    ("estimate", "said"),
    [
        (Estimate(speed=None, alone={0: 1.0, 1: 1.0}), "The run was too short"),
        (Estimate(speed=150.0, alone={0: 100.0, 1: 40.0}), "speeds changed during the run"),
        (Estimate(speed=90.0, alone={0: 100.0}, unknown={1}), "The speed of rank 1 alone is not"),
        (Estimate(speed=90.0), "The speed of each rank alone is not known"),
    ],
)
def test_no_multiple_where_it_would_be_impossible_or_unknown(estimate: Estimate, said: str) -> None:
    found = replace(FINE, estimate=estimate)
    assert said in found.worth
    assert "×" not in found.worth + found.text
    assert found.document()["multiple"] is None
    assert found.document()["fastest"] is None


def test_a_change_of_speeds_is_remarked_beside_a_possible_multiple() -> None:
    found = replace(FINE, speeds_changed=True)
    assert found.remark == "speeds changed during the run"
    assert "1.26×" in found.worth
    assert "; speeds changed during the run" in found.worth


def test_one_rank_is_compared_with_nobody() -> None:
    alone = Estimate(speed=99.0, alone={0: 100.0})
    found = replace(FINE, estimate=alone, names={0: "rank 0 (a)"}, lost_waiting=0.0)
    assert (found.text, found.worth) == ("", "A single rank cannot be compared with others.")
    assert (found.document()["multiple"], found.document()["fastest"]) == (None, None)


def test_of_a_run_that_measured_nothing_no_advice_says_so() -> None:
    found = replace(FINE, estimate=Estimate(speed=None))
    assert found.change.startswith("The run is too short for advice")


@pytest.mark.parametrize(
    ("windows", "said"),
    [(1, "none of them stands out"), (4, "none of them stands out"), (5, "waits for rank 1 (b)")],
)
def test_a_rank_is_named_only_if_enough_windows_tell(windows: int, said: str) -> None:
    run = MadeRun({"a": 100.0, "b": 50.0})
    run.train(windows, (16, 16))
    table = RunTable.of(run.events)
    assert said in describe_waits(Waits.of(table), ["rank 0 (a)", "rank 1 (b)"], 1.0, waiting=0.5)


def test_one_rank_waits_for_no_other() -> None:
    run = MadeRun({"a": 100.0})
    run.train(8, (16,))
    waits = Waits.of(RunTable.of(run.events))
    assert describe_waits(waits, ["rank 0 (a)"], 1.0, waiting=0.0) == "One rank waits for no other."


def test_of_many_ranks_the_slowest_is_named_and_parked_ones_are_said_to_be() -> None:
    alone = {rank: 100.0 - rank for rank in range(6)}
    found = replace(
        FINE,
        estimate=Estimate(speed=500.0, alone=alone, parked={5}),
        names={rank: f"rank {rank}" for rank in alone},
    )
    assert found.text.startswith("5.00× rank 0 alone · rank 5 is parked · ")
