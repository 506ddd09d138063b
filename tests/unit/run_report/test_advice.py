"""Each rule of the advice fires in its case, and is silent beside it."""

from pathlib import Path
from typing import Any

import pytest

from evener.observe.estimate import Estimate
from evener.planning.policies import ApplyPolicy
from evener.run_report.advice import RankFacts, RunFacts, advise_run, coarsest_loss
from evener.simulation.changes import Change

KEYS = Path(__file__).resolve().parents[3] / "docs" / "reference" / "keys.md"

FINE: dict[str, Any] = {
    "policy": ApplyPolicy.SYNC,
    "estimate": Estimate(speed=135.0, alone={0: 100.0, 1: 40.0}),
    "batch_size": 512,
    "window_s": 4.0,
    "wait": 0.05,
    "exchange": 0.02,
    "data": 0.01,
}


def facts(*, one: dict[str, Any] | None = None, **changes: Any) -> RunFacts:
    """A run in which nothing stands out, with changes; ``one`` are those of rank 1."""
    usual: dict[str, Any] = {"data": 0.01, "at_once": 8.0, "passes": 4.0}
    ranks = (
        RankFacts(rank=0, name="rank 0 (a)", **usual),
        RankFacts(rank=1, name="rank 1 (b)", **{**usual, **(one or {})}),
    )
    return RunFacts(**{**FINE, "ranks": ranks, **changes})


def test_a_run_in_which_nothing_stands_out_gets_no_advice() -> None:
    assert advise_run(facts()) == []
    alone = facts(estimate=Estimate(speed=99.0, alone={0: 100.0}))
    assert advise_run(alone) == []


@pytest.mark.parametrize(
    ("run", "silent", "kind", "key", "said"),
    [
        (
            facts(estimate=Estimate(speed=90.0, alone={0: 100.0, 1: 40.0}), one={"joined": 400}),
            facts(estimate=Estimate(speed=99.5, alone={0: 100.0, 1: 40.0})),
            "slow_rank",
            None,
            "Leave out rank 1 (b), which joined with window 400: the team does 90 samples/s, and "
            "would do 100 without.",
        ),
        (
            facts(batch_size=16),
            facts(batch_size=16, wait=0.02),  # it does not cost anything
            "coarse_split",
            "batch_size=32",
            "16 samples can be split 12/4 at best, which loses 4.8% to waiting.",
        ),
        (
            facts(data=0.06, one={"data": 0.1}),
            facts(data=0.04, one={"data": 0.09}),
            "data_wait",
            None,
            "Ranks wait 6.0% of their time for data, rank 1 (b) 10.0%",
        ),
        (facts(exchange=0.2), facts(exchange=0.14), "exchange", None, "20.0% of"),
        (
            facts(exchange=0.2, policy=ApplyPolicy.CADENCE),
            facts(exchange=0.1, policy=ApplyPolicy.CADENCE),
            "exchange",
            "overhead_target=0.02",
            "A larger anchor averages less often.",
        ),
        (
            facts(one={"changed": 2.0}),
            facts(one={"changed": 1.25}),
            "speed_changed",
            None,
            "Rank 1 (b) was 2.0× slower at the end than at the beginning.",
        ),
        (
            facts(one={"changed": 0.5}),
            facts(one={"changed": 0.8}),
            "speed_changed",
            None,
            "Rank 1 (b) was 2.0× faster at the end than at the beginning. Look for what slowed it "
            "at first: other programs",
        ),
        (
            facts(one={"at_once": 2.0}),
            facts(one={"at_once": 2.0, "passes": 1.0}),  # its whole share, which is small
            "memory",
            "precision=bf16",
            "Rank 1 (b) computes at most 2 samples at once, others 8",
        ),
        (
            facts(policy=ApplyPolicy.CADENCE, window_s=660.0),
            facts(policy=ApplyPolicy.CADENCE, window_s=59.0),
            "window_length",
            "max_anchor=10",
            "Ranks average only every 11 min",
        ),
        (
            facts(estimate=Estimate(speed=99.0, alone={0: 100.0, 1: 1.0}, parked={1})),
            facts(),
            "parked",
            None,
            "Rank 1 (b) is parked",
        ),
    ],
)
def test_a_rule_fires_in_its_case_alone(
    run: RunFacts, silent: RunFacts, kind: str, key: str | None, said: str
) -> None:
    (found,) = advise_run(run)
    assert (found.kind, found.key) == (kind, key)
    # What it would do without a rank follows from what was measured; the rest is predicted.
    assert found.gain == (pytest.approx(100 / 90 - 1) if kind == "slow_rank" else None)
    assert found.text.startswith(said) or said in found.text
    assert advise_run(silent) == []
    if key is not None:
        assert f"\n| `{key.partition('=')[0]}` " in KEYS.read_text()


def test_a_split_among_many_ranks_is_cut() -> None:
    alone = {rank: 100.0 - rank for rank in range(20)}
    (found,) = advise_run(facts(estimate=Estimate(speed=900.0, alone=alone), batch_size=160))
    assert found.text.startswith("160 samples can be split 9/9/9/9/9/8/8/8/… at best")


def test_the_largest_gain_comes_first_and_a_change_without_gain_is_left_out() -> None:
    run = facts(exchange=0.2, batch_size=16)
    gains = {Change(policy=ApplyPolicy.CADENCE): 0.3, Change(batch_size=32): 0.1}
    assert [(one.key, one.gain) for one in advise_run(run, gains.get)] == [
        ("policy=cadence", 0.3),
        ("batch_size=32", 0.1),
    ]
    (only,) = advise_run(run, lambda change: 0.005 if change.policy else 0.1)
    assert only.kind == "coarse_split"


def test_another_policy_is_recommended_only_with_a_predicted_gain() -> None:
    run = facts(exchange=0.2)
    (found,) = advise_run(run, lambda change: None)
    assert (found.key, found.brief) == (None, "ask evener plan about policies")
    (found,) = advise_run(run, lambda change: 0.1)
    assert (found.key, found.brief) == ("policy=cadence", "try policy=cadence")


@pytest.mark.parametrize(
    ("batch_size", "speeds", "shares", "lost"),
    [
        (16, [3.0, 1.0], (12, 4), 0.0),
        (16, [4.0, 1.0], (13, 3), 1 - 3.2 / 3.25),
        (1, [2.0, 1.0], (1, 0), 1 / 3),
        (7, [1.0, 1.0, 1.0], (3, 2, 2), 1 - 7 / 9),
    ],
)
def test_the_best_split_into_whole_samples(
    batch_size: int, speeds: list[float], shares: tuple[int, ...], lost: float
) -> None:
    found = coarsest_loss(batch_size, speeds)
    assert found == (shares, pytest.approx(lost))
