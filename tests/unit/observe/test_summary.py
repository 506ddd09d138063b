import dataclasses
import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from evener.errors import EvenerError
from evener.observe.summary import (
    RankSummary,
    RunSummary,
    best_speed_without,
    closing_table,
    time_saved_s,
    verdict,
)
from evener.observe.tally import EventTally
from helpers.event_cases import committed_window


def make(solos: tuple[float | None, ...], team: float | None, **changes: Any) -> RunSummary:
    world_size = len(solos)
    options: dict[str, Any] = {
        "tokens_per_s": team,
        "solo_tokens_per_s": solos,
        "solo_source": "measured",
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


def test_team_that_is_faster_than_its_best_rank() -> None:
    # Rank 0 alone would have taken 800 s * 1310 / 1000 = 1048 s.
    assert verdict(make((1000.0, 400.0), 1310.0)) == [
        "the team did 1.31x rank 0 alone; rank 1 saved 4 min",
        "run folder: runs/first",
    ]


def test_rank_that_costs_time_is_named() -> None:
    # Rank 0 alone would have taken 800 s * 800 / 1000 = 640 s.
    assert verdict(make((1000.0, 50.0), 800.0))[0] == (
        "the team did 0.80x rank 0 alone; rank 1 cost you 3 min: leave it out"
    )


def test_rank_that_makes_no_difference() -> None:
    assert verdict(make((1000.0, 50.0), 1005.0))[0].endswith("; rank 1 made no difference")


def test_the_fastest_rank_need_not_be_rank_0() -> None:
    assert verdict(make((400.0, 1000.0), 1310.0))[0] == (
        "the team did 1.31x rank 1 alone; rank 0 saved 4 min"
    )


def test_predicted_speeds_say_so() -> None:
    line = verdict(make((1000.0, 400.0), 1310.0, solo_source="speed model"))[0]
    assert line.startswith("the team did 1.31x rank 0 alone (predicted by the speed model); rank 1")


def test_equal_split_and_emulated_ranks_are_told() -> None:
    lines = verdict(
        make((1000.0, 400.0), 1310.0, equal_split_tokens_per_s=786.0, emulated={1: 3.0})
    )
    assert lines[1:] == [
        "an equal split does 786 tokens/s (measured): shares by speed did 1.67x that",
        "(rank 1 is emulated 3x slower)",
        "run folder: runs/first",
    ]


def test_parked_rank_is_no_part_of_the_team() -> None:
    summary = make((1000.0, 600.0, 10.0), 1500.0, parked=(2,))
    assert verdict(summary)[:2] == [
        "the team did 1.50x rank 0 alone; rank 1 saved 7 min",
        "rank 2 was parked: the team is faster without it",
    ]
    assert best_speed_without(summary, 1) == 1000.0
    assert "parked" in table_text(summary)


def test_best_team_of_several_others() -> None:
    summary = make((1000.0, 1000.0, 500.0), 2000.0)
    assert summary.of_ideal == 0.8
    assert best_speed_without(summary, 2) == 1600.0
    assert time_saved_s(summary, 2) == pytest.approx(800.0 * 0.25)
    # Where the exchange eats everything, the best of the others works alone.
    slow = make((1000.0, 100.0, 100.0), 600.0)
    assert best_speed_without(slow, 2) == 1000.0
    assert verdict(slow)[0].count("leave it out") == 2


@pytest.mark.parametrize(
    ("solos", "team", "line"),
    [
        ((1000.0, None), 1310.0, "the team did 1,310 tokens/s; what each rank does alone is not"),
        ((1000.0, 400.0), None, "the run was too short to say what the team was worth"),
        ((1000.0,), 990.0, "rank 0 worked alone and did 990 tokens/s; there was nobody to share"),
        ((1000.0,), None, "rank 0 worked alone; the run was too short to measure its speed"),
    ],
)
def test_what_is_not_known_is_not_claimed(
    solos: tuple[float | None, ...], team: float | None, line: str
) -> None:
    summary = make(solos, team)
    lines = verdict(summary)
    assert lines[0].startswith(line)
    assert lines[-1] == "run folder: runs/first"
    assert len(lines) == 2
    assert time_saved_s(summary, 0) is None
    table_text(summary)


def test_table_has_a_row_per_rank() -> None:
    text = table_text(make((1000.0, 400.0), 1310.0, emulated={1: 3.0}))
    title, *_ = text.splitlines()
    assert title.strip() == "500 steps, 1.2M tokens in 13 min, 1,310 tokens/s, held-out loss 2.346"
    (row,) = [line for line in text.splitlines() if "cpu:1" in line]
    for part in ("cpu:1, emulated 3x slower", "33%", "400", "25%", "saved 4 min"):
        assert part in row


def test_json_has_every_figure_and_no_infinity(tmp_path: Path) -> None:
    summary = make((1000.0, 400.0), 1310.0, heldout_loss=math.nan, emulated={1: 3.0}, parked=(1,))
    summary = dataclasses.replace(summary, details={"accuracy": 0.5})
    path = tmp_path / "summary.json"
    path.write_text("old")
    summary.write(path)
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


def test_summary_that_cannot_be_written_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(EvenerError, match=r"missing/summary\.json cannot be written"):
        make((1.0,), 1.0).write(tmp_path / "missing" / "summary.json")


def test_summary_from_a_tally() -> None:
    tally = EventTally.of(committed_window(window) for window in range(8))
    speed = tally.speed()
    assert speed is not None
    summary = make(
        (80.0, 40.0),
        speed.weight_per_s,
        ranks=tuple(
            RankSummary(
                rank=totals.rank,
                member=totals.member,
                device="cpu",
                samples=totals.samples,
                weight=totals.weight,
                wait_fraction=totals.wait_fraction,
            )
            for totals in tally.members
        ),
    )
    assert "60%" in table_text(summary)
    assert verdict(summary)[0] == "the team did 1.25x rank 0 alone; rank 1 saved 3 min"
