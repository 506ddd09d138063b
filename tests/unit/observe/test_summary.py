import dataclasses
import io
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from evener.errors import EvenerError
from evener.observe.summary import (
    RankSummary,
    RunSummary,
    closing_lines,
    closing_table,
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


def table_text(summary: RunSummary, width: int = 140) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(closing_table(summary))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert isinstance(text, str)
    return text


def contributions(summary: RunSummary) -> list[str]:
    """The last column of the table."""
    rows = [line for line in table_text(summary).splitlines() if "cpu:" in line]
    return [re.split(r"\s{2,}", row.strip())[-1] for row in rows]


def test_no_cell_wraps_in_80_columns() -> None:
    summary = make((19_464.0, 5_777.0), 22_516.0, unit="samples", emulated={1: 3.0})
    names = ("cuda:0 (NVIDIA GeForce RTX 4090)", "cuda:1 (Quadro RTX 6000 with Max-Q Design)")
    ranks = tuple(
        dataclasses.replace(row, device=name)
        for row, name in zip(summary.ranks, names, strict=True)
    )
    lines = table_text(dataclasses.replace(summary, ranks=ranks), width=80).rstrip().splitlines()
    assert max(map(len, lines)) <= 80
    assert len([line for line in lines if line.strip()]) == 5  # title, head, rule, two ranks
    assert "cuda:0 (RTX 4090)" in lines[-2]


def test_each_fact_is_said_once() -> None:
    summary = make(
        (1000.0, 600.0, 10.0),
        1500.0,
        emulated={1: 3.0},
        parked=(2,),
        verdict=("The team does 1.50× rank 0 alone.", "Nothing stands out."),
    )
    assert closing_lines(summary) == [
        "The team does 1.50× rank 0 alone.",
        "Nothing stands out.",
        "Rank 1 is emulated 3× slower.",
        "page: evener report runs/first",
        "run folder: runs/first",
    ]
    assert contributions(summary) == ["adds 150%", "adds 50%", "parked"]
    text = table_text(summary) + "\n".join(closing_lines(summary))
    for fact in ("emulated 3× slower", "parked", "1,500", "1.50×"):
        assert text.count(fact) == 1, fact
    title, *_ = text.splitlines()
    told = "500 steps, 1.2M tokens in 13 min 20 s, 1,500 tokens/s, held-out loss 2.346"
    assert title.strip() == told


def test_a_long_answer_is_wrapped_between_words() -> None:
    long = "Leave out rank 1 (cuda:1, a device with a very long name): " + "it slows the team. " * 4
    *lines, _, _ = closing_lines(make((1000.0, 600.0), 1500.0, verdict=(long.strip(), "Short.")))
    assert all(len(line) <= 80 for text in lines for line in text.splitlines())
    assert " ".join(" ".join(lines).split()) == f"{long}Short."


def test_the_table_of_an_elastic_team_tells_of_those_at_its_end() -> None:
    # Rank 1 of three numbers is gone; it did a quarter of the work.
    ranks = tuple(
        RankSummary(rank=r, member=f"m{r}", device="cpu:0", samples=1, weight=w, wait_fraction=0.0)
        for r, w in ((0, 500.0), (2, 250.0))
    )
    summary = make((100.0, None, 50.0), 145.0, ranks=ranks, world_size=2, gone_weight=250.0)
    assert [part in table_text(summary) for part in ("50%", "25%", "33%")] == [True, True, False]
    assert contributions(summary) == ["adds 190%", "adds 45%"]
    assert "Departed ranks processed 25% of the tokens." in closing_lines(summary)


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
