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
    closing_table,
    contribution,
    verdict,
)


def make(solos: tuple[float | None, ...], team: float | None, **changes: Any) -> RunSummary:
    world_size = len(solos)
    options: dict[str, Any] = {
        "tokens_per_s": team,
        "solo_tokens_per_s": solos,
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


@pytest.mark.parametrize(
    ("solos", "team", "parts", "said"),
    [
        # In the time of the run rank 0 alone would have done 1000/1310 of the work.
        ((1000.0, 400.0), 1310.0, ["69% of the work", "24% of the work"], ["1.31x rank 0"]),
        ((400.0, 1000.0), 1310.0, ["24% of the work", "69% of the work"], ["1.31x rank 1"]),
        # Rank 0 alone would have taken 640 s of the 800 s.
        (
            (1000.0, 50.0),
            800.0,
            ["94% of the work", "cost 20% of the time"],
            ["0.80x rank 0", "leave out rank 1: the others are faster by themselves"],
        ),
        ((1000.0, 50.0), 1005.0, ["95% of the work", "none"], ["1.00x rank 0"]),
        # On cores that ranks share, a team may be as fast as any of its ranks alone.
        (
            (1000.0, 960.0),
            1000.0,
            ["4% of the work", "as any other"],
            ["1.00x rank 0", "the team is no faster with rank 1"],
        ),
        # The best of the others is a team, or one alone where the exchange eats everything.
        ((1000.0, 1000.0, 500.0), 2000.0, ["40% of the work"] * 2 + ["20% of the work"], ["2.00x"]),
        (
            (1000.0, 100.0, 100.0),
            600.0,
            ["83% of the work", *["cost 40% of the time"] * 2],
            ["0.60x rank 0", "leave out rank 1 or 2:"],
        ),
    ],
)
def test_what_a_rank_has_contributed(
    solos: tuple[float, ...], team: float, parts: list[str], said: list[str]
) -> None:
    summary = make(solos, team)
    assert contributions(summary) == parts
    *lines, last = verdict(summary)
    assert last == "run folder: runs/first"
    assert len(lines) == len(said)
    assert all(part in line for part, line in zip(said, lines, strict=True)), lines


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


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokens_per_s": 526.0}, "not compared with its ranks alone: speeds changed"),
        ({"tokens_per_s": 520.0}, "the team did 1.73x rank 0 alone"),
        ({"solo_tokens_per_s": (300.0, None)}, "what each rank does alone is not known"),
        (
            {
                "solo_tokens_per_s": (300.0, None),
                "parked": (1,),
                "tokens_per_s": 297.0,
            },
            "the team did 0.99x rank 0 alone",
        ),
        ({"tokens_per_s": None}, "the run was too short, or its team changed too late"),
        ({}, "by what each rank did per second of its own compute"),
    ],
)
def test_what_is_not_known_is_not_claimed(changes: dict[str, Any], said: str) -> None:
    summary = make((300.0, 200.0), 450.0, **changes)
    lines = verdict(summary)
    assert said in lines[0]
    if "the team did" not in lines[0] and summary.tokens_per_s is not None:
        assert contributions(summary) == ["–", "–"]
        assert not any(re.search(r"\d(x|%)", line) for line in lines), lines


def test_each_fact_is_said_once() -> None:
    summary = make(
        (1000.0, 600.0, 10.0),
        1500.0,
        emulated={1: 3.0},
        parked=(2,),
    )
    assert verdict(summary) == [
        "the team did 1.50x rank 0 alone (by what each rank did per second of its own compute "
        "time)",
        "run folder: runs/first",
    ]
    text = table_text(summary) + "\n".join(verdict(summary))
    for fact in ("emulated 3x slower", "parked: faster without it", "1,500", "1.50x"):
        assert text.count(fact) == 1, fact
    title, *_ = text.splitlines()
    assert title.strip() == "500 steps, 1.2M tokens in 13 min, 1,500 tokens/s, held-out loss 2.346"


def test_the_table_of_an_elastic_team_tells_of_those_at_its_end() -> None:
    # Rank 1 of three numbers is gone; it did a quarter of the work.
    ranks = tuple(
        RankSummary(rank=r, member=f"m{r}", device="cpu:0", samples=1, weight=w, wait_fraction=0.0)
        for r, w in ((0, 500.0), (2, 250.0))
    )
    summary = make((100.0, None, 50.0), 145.0, ranks=ranks, world_size=2, gone_weight=250.0)
    assert [part in table_text(summary) for part in ("50%", "25%", "33%")] == [True, True, False]
    assert contributions(summary) == ["66% of the work", "31% of the work"]
    assert "departed ranks processed 25% of the tokens" in verdict(summary)


def test_json_has_every_figure_and_no_infinity(tmp_path: Path) -> None:
    summary = make((1000.0, 400.0), 1310.0, heldout_loss=math.nan, emulated={1: 3.0}, parked=(1,))
    summary = dataclasses.replace(summary, details={"accuracy": 0.5})
    path = tmp_path / "summary.json"
    path.write_text("old")
    summary.write(path)
    with pytest.raises(EvenerError, match=r"missing/summary\.json cannot be written"):
        summary.write(tmp_path / "missing" / "summary.json")
    assert [entry.name for entry in tmp_path.iterdir()] == ["summary.json"]
    content = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(name))
    own = {part.name for part in dataclasses.fields(summary)} - {"details"}
    assert set(content) == own | {"of_ideal", "accuracy"}
    assert content["accuracy"] == 0.5
    assert content["of_ideal"] == 1310.0 / 1400.0
    assert content["heldout_loss"] is None
    assert content["emulated"] == {"1": 3.0}
    assert content["parked"] == [1]
    assert content["ranks"][1]["device"] == "cpu:1"
