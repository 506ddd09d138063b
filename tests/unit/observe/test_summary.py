import dataclasses
import io
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from evener.errors import EvenerError
from evener.observe.summary import (
    RankSummary,
    RunSummary,
    best_speed_without,
    closing_table,
    contribution,
    verdict,
)
from evener.observe.tally import EventTally
from helpers.event_cases import committed_window

TOO_SHORT = "the run was too short, or its team changed too late, to measure its speed"


def make(solos: tuple[float | None, ...], team: float | None, **changes: Any) -> RunSummary:
    world_size = len(solos)
    options: dict[str, Any] = {
        "tokens_per_s": team,
        "solo_tokens_per_s": solos,
        "solo_source": "measured",
        "beside_solo_tokens_per_s": team,
        "equal_split_tokens_per_s": None,
        "heldout_loss": 2.3456,
        "committed_tokens": 1_200_000.0,
        "committed_samples": 12_000,
        "steps": 500,
        "world_size": world_size,
        "policy": "sync",
        "backend": "gloo",
        "checkpoint": None,
        "run_folder": "runs/first",
        "elapsed_s": 800.0,
        "ranks": tuple(
            RankSummary(
                rank=rank,
                member=f"m{rank}",
                device=f"cpu:{rank}",
                samples=6000,
                weight=600_000.0 / (rank + 1),
                wait_fraction=0.25 * rank,
            )
            for rank in range(world_size)
        ),
    }
    return RunSummary(**{**options, **changes})


def table_text(summary: RunSummary) -> str:
    console = Console(file=io.StringIO(), width=140)
    console.print(closing_table(summary))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert isinstance(text, str)
    return text


def contributions(summary: RunSummary) -> list[str]:
    """The last column of the table."""
    rows = [line for line in table_text(summary).splitlines() if "cpu:" in line]
    return [row.rpartition("│")[0].rpartition("│")[2].strip() for row in rows]


def test_contributions_are_parts_of_the_work_of_the_run() -> None:
    # In the time of the run rank 0 alone would have done 1000/1310 of the work, rank 1 400/1310.
    summary = make((1000.0, 400.0), 1310.0)
    assert contributions(summary) == ["69% of the work", "24% of the work"]
    assert verdict(summary) == ["the team did 1.31x rank 0 alone", "run folder: runs/first"]


def test_rank_that_costs_time_is_named() -> None:
    # Rank 0 alone would have taken 640 s of the 800 s.
    summary = make((1000.0, 50.0), 800.0)
    assert contributions(summary) == ["94% of the work", "cost 20% of the time"]
    assert verdict(summary)[:2] == [
        "the team did 0.80x rank 0 alone",
        "leave out rank 1: the others are faster by themselves",
    ]


def test_slow_rank_that_makes_no_difference() -> None:
    assert contributions(make((1000.0, 50.0), 1005.0)) == ["95% of the work", "none"]


@pytest.mark.parametrize("team", [930.0, 1000.0, 1005.0])
def test_no_equal_rank_is_called_useless(team: float) -> None:
    """On cores that ranks share, a team may be as fast as any of its ranks alone."""
    summary = make((1000.0, 960.0), team)
    assert not [line for line in verdict(summary) if "leave" in line]
    assert not {"none", "cost"} & {cell.split()[0] for cell in contributions(summary)}
    assert verdict(summary)[1].startswith("the team is no faster with rank ")
    assert "compete for the same cores" in verdict(summary)[1]


def test_the_fastest_rank_need_not_be_rank_0_and_is_never_left_out() -> None:
    assert verdict(make((400.0, 1000.0), 1310.0))[0] == "the team did 1.31x rank 1 alone"
    assert verdict(make((800.0, 1000.0), 790.0))[1].startswith("leave out rank 0:")


@given(
    st.lists(st.floats(0.01, 1e6), min_size=2, max_size=5),
    st.floats(0.01, 1e7),
    st.sets(st.integers(1, 4)),
)
def test_no_rank_contributes_more_than_the_run(
    solos: list[float], team: float, parked: set[int]
) -> None:
    summary = make(tuple(solos), team, parked=tuple(r for r in parked if r < len(solos)))
    for rank in range(len(solos)):
        part = contribution(summary, rank)
        assert part is None or -1 <= part <= 1
    lines = verdict(summary)
    assert len(lines) == len(set(lines))


def test_predicted_speeds_say_so_once() -> None:
    summary = make((1000.0, 400.0), 1310.0, solo_source="compute time")
    assert "by what each rank did per second of its own compute time" in verdict(summary)[0]
    assert "compute time" not in table_text(summary)


@pytest.mark.parametrize(
    ("solos", "beside", "said"),
    [
        ((300.0, 200.0), 880.0, "the team is not compared with its ranks alone: speeds changed"),
        ((300.0, 200.0), 526.0, "the team is not compared with its ranks alone: speeds changed"),
        ((300.0, 200.0), 520.0, "the team did 1.73x rank 0 alone"),
        ((300.0, 200.0), None, "the team is not compared with its ranks alone: they were measured"),
    ],
)
def test_no_multiple_that_cannot_be(
    solos: tuple[float, ...], beside: float | None, said: str
) -> None:
    summary = make(solos, 450.0, beside_solo_tokens_per_s=beside, equal_split_tokens_per_s=100.0)
    lines = verdict(summary)
    assert lines[0].startswith(said)
    if not said.startswith("the team did"):
        assert summary.to_json()["of_ideal"] is None
        assert contributions(summary) == ["–", "–"]
        assert not any(re.search(r"\d(x|%)", line) for line in lines), lines


def test_a_parked_rank_need_not_be_known_alone() -> None:
    summary = make((1000.0, None), 990.0, parked=(1,))
    assert verdict(summary)[0] == "the team did 0.99x rank 0 alone"


def test_each_fact_is_said_once() -> None:
    summary = make(
        (1000.0, 600.0, 10.0),
        1500.0,
        equal_split_tokens_per_s=786.0,
        emulated={1: 3.0},
        parked=(2,),
    )
    assert verdict(summary) == [
        "the team did 1.50x rank 0 alone",
        "an equal split does 786 tokens/s (measured): shares by speed did 1.91x that",
        "run folder: runs/first",
    ]
    assert best_speed_without(summary, 1) == 1000.0
    text = table_text(summary) + "\n".join(verdict(summary))
    for fact in ("emulated 3x slower", "parked: faster without it", "1,500", "786", "1.50x"):
        assert text.count(fact) == 1, fact


def test_best_team_of_several_others() -> None:
    summary = make((1000.0, 1000.0, 500.0), 2000.0)
    assert summary.multiples.of_ideal == 0.8
    assert best_speed_without(summary, 2) == 1600.0
    assert contribution(summary, 2) == pytest.approx(0.2)
    # Where the exchange eats everything, the best of the others works alone.
    slow = make((1000.0, 100.0, 100.0), 600.0)
    assert best_speed_without(slow, 2) == 1000.0
    assert verdict(slow)[1].startswith("leave out rank 1 or 2:")


@pytest.mark.parametrize(
    ("solos", "team", "said"),
    [
        ((1000.0, None), 1310.0, ["what each rank does alone is not known"]),
        ((1000.0, 400.0), None, [TOO_SHORT]),
        ((1000.0,), 990.0, []),
        ((1000.0,), None, [TOO_SHORT]),
    ],
)
def test_what_is_not_known_is_not_claimed(
    solos: tuple[float | None, ...], team: float | None, said: list[str]
) -> None:
    summary = make(solos, team)
    assert verdict(summary) == [*said, "run folder: runs/first"]
    assert contribution(summary, 0) is None
    table_text(summary)


def test_table_has_a_row_per_rank() -> None:
    text = table_text(make((1000.0, 400.0), 1310.0, emulated={1: 3.0}))
    title, *_ = text.splitlines()
    assert title.strip() == "500 steps, 1.2M tokens in 13 min, 1,310 tokens/s, held-out loss 2.346"
    (row,) = [line for line in text.splitlines() if "cpu:1" in line]
    for part in ("cpu:1, emulated 3x slower", "33%", "400", "25%", "24% of the work"):
        assert part in row


def test_the_table_of_an_elastic_team_tells_of_those_at_its_end() -> None:
    # Rank 1 of three numbers is gone; it did a quarter of the work.
    ranks = tuple(
        RankSummary(rank=r, member=f"m{r}", device="cpu:0", samples=1, weight=w, wait_fraction=0.0)
        for r, w in ((0, 500.0), (2, 250.0))
    )
    summary = make((100.0, None, 50.0), 145.0, ranks=ranks, world_size=2, gone_weight=250.0)
    assert [part in table_text(summary) for part in ("50%", "25%", "33%")] == [True, True, False]
    assert contributions(summary) == ["66% of the work", "31% of the work"]
    assert verdict(summary)[0] == "the team did 1.45x rank 0 alone"
    assert "ranks that are gone did 25% of the tokens" in verdict(summary)


def test_json_has_every_figure_and_no_infinity(tmp_path: Path) -> None:
    summary = make((1000.0, 400.0), 1310.0, heldout_loss=math.nan, emulated={1: 3.0}, parked=(1,))
    summary = dataclasses.replace(summary, details={"accuracy": 0.5})
    path = tmp_path / "summary.json"
    path.write_text("old")
    summary.write(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["summary.json"]
    content = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(name))
    own = {part.name for part in dataclasses.fields(summary)} - {"details"}
    assert set(content) == own | {"of_ideal", "ceiling", "accuracy"}
    assert content["accuracy"] == 0.5
    assert content["of_ideal"] == 1310.0 / 1400.0
    assert content["heldout_loss"] is None
    assert content["emulated"] == {"1": 3.0}
    assert content["parked"] == [1]
    assert content["ranks"][1]["device"] == "cpu:1"


def test_summary_that_cannot_be_written_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(EvenerError, match=r"missing/summary\.json cannot be written"):
        make((1.0,), 1.0).write(tmp_path / "missing" / "summary.json")


def test_summary_from_a_tally() -> None:
    tally = EventTally.of(committed_window(window) for window in range(8))
    speed = tally.speed()
    assert speed is not None
    summary = make(
        (80.0, 40.0),
        speed,
        ranks=tuple(
            RankSummary(
                rank=rank,
                member=member,
                device="cpu",
                samples=totals.samples,
                weight=totals.weight,
                wait_fraction=totals.wait_fraction,
            )
            for rank, (member, totals) in enumerate(tally.members.items())
        ),
    )
    assert "60%" in table_text(summary)
    assert verdict(summary)[0] == "the team did 1.25x rank 0 alone"


@pytest.mark.parametrize(("side_by_side", "told"), [(1200.0, True), (1300.0, False), (None, False)])
def test_other_load_prevents_a_verdict(side_by_side: float | None, told: bool) -> None:
    summary = make((1000.0, 400.0), 1150.0, side_by_side_tokens_per_s=side_by_side)
    said = "\n".join(verdict(summary))
    assert ("no verdict on the team" in said) is told
    assert ("did 0.86 of what each does alone" in said) is told
    assert summary.to_json()["ceiling"] == (side_by_side and pytest.approx(side_by_side / 1400.0))
