"""Whether the document of a page shows the figures that its events hold."""

from typing import Any

import pytest


def assert_agree(expected: dict[str, Any], document: dict[str, Any]) -> None:
    """Compare a run's document with ``helpers.recomputed``, to 1 %."""
    team, verdict, run = document["team"], document["verdict"], document["run"]
    ranks = {row["rank"]: row for row in document["ranks"] if row["alone"] is not None}
    shown = {
        "speed": team["speed"],
        "multiple": team["of_best_alone"],
        "of_ideal": team["of_ideal"],
        "lost_waiting": team["wait_fraction"],
        "exchange": team["sync_fraction"],
        "data": team["data_fraction"],
        "samples": team["samples"],
        "windows": run["windows"],
        "last_loss": team["last_loss"],
    }
    assert shown == pytest.approx({name: expected[name] for name in shown}, rel=0.01)
    assert verdict["multiple"] == team["of_best_alone"]
    assert verdict["of_ideal"] == team["of_ideal"]
    assert verdict["lost_waiting"] == team["wait_fraction"]
    by_rank = {"alone": "alone", "adds": "adds", "share": "shares", "waited_for_s": "waited_for_s"}
    for name, other in by_rank.items():
        figures = {rank: row[name] for rank, row in ranks.items()}
        assert figures == pytest.approx(expected[other], rel=0.01), name
