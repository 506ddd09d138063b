"""Events as lines, and back."""

import json
import math
from typing import Any

import pytest

from evener.observe.event_lines import NAMED_EVERY, SUMMED, LineReader, LineWriter
from helpers.event_cases import committed_window, started, to_line

#: What a line leaves out.
USUAL = {"skipped": False, "update_parts": 1, "parked": []}


def changed(**changes: Any) -> bytes:
    """The line of a window, some of whose columns are others."""
    event = json.loads(to_line(committed_window(0)))
    event["ranks"] = {key: v for key, v in {**event["ranks"], **changes}.items() if v != "gone"}
    return json.dumps(event).encode()


def test_a_window_comes_back_as_it_was() -> None:
    window = committed_window(3, samples=(6, 4), losses=(1.25, None))
    further = {"data_s": 0.0015, "sent_bytes": 7, "micro_batches": 2, "work_ago_s": 0.75}
    for row in window["ranks"]:
        row |= further
    window |= {"lr": 0.1, "skipped": False, "update_parts": 2, "parked": []}
    line = to_line(window)
    assert LineReader().event(line) == window
    ranks = json.loads(line)["ranks"]
    assert (ranks["samples"], ranks["data_us"], ranks["sent_bytes"]) == ([6, 4], 1500, 7)
    assert (ranks["weight"], ranks["loss"]) == ([60, 40], [1.25, None])
    assert "skipped" not in json.loads(line)


def test_a_team_is_named_when_it_changes() -> None:
    other = committed_window(2)
    other["ranks"][1]["member"] = "c"
    windows = [committed_window(0), committed_window(1), other, committed_window(3)]
    writer, reader = LineWriter(), LineReader()
    lines = [writer.line(one) for one in windows]
    assert [b'"member"' in line for line in lines] == [True, False, True, True]
    assert [reader.event(line) for line in lines] == [{**one, **USUAL} for one in windows]
    with pytest.raises(ValueError, match=r"of the team \d+, which no earlier line has named"):
        LineReader().event(lines[1])


def test_a_team_is_named_every_so_many_windows() -> None:
    writer = LineWriter()
    lines = [writer.line(committed_window(k)) for k in range(2 * NAMED_EVERY + 1)]
    named = [k for k, line in enumerate(lines) if b'"member"' in line]
    assert named == [0, NAMED_EVERY, 2 * NAMED_EVERY]


def test_a_window_of_eight_ranks_is_short() -> None:
    window = committed_window(
        0, samples=(5,) * 8, losses=(2.5,) * 8, times_s=((0.7, 0.2, 0.1),) * 8
    )
    writer = LineWriter()
    writer.line(window)
    assert len(writer.line(window)) < 250


def test_numbers_that_are_not_finite_are_null_and_seconds_are_never_negative() -> None:
    window = committed_window(0, losses=(math.nan, 2.0), times_s=((0.7, -1e-9, 0.1),) * 2)
    rows = LineReader().event(to_line(window))["ranks"]
    assert [row["loss"] for row in rows] == [None, 2.0]
    assert [row["wait_s"] for row in rows] == [0, 0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"weight": "gone"}, "ranks.weight is missing"),
        ({"weight": "4"}, r"ranks.weight is \['4', '4'\], not 2 such numbers"),
        ({"wait_us": [1, -1]}, r"ranks.wait_us is \[1, -1\], not"),
        ({"wait_us": [10**400, 1]}, "ranks.wait_us is"),
        ({"sync_us": [1, True]}, "ranks.sync_us is"),
        ({"samples": [1.5, 1]}, "ranks.samples is"),
        ({"compute_us": [1]}, "ranks.compute_us is"),
        ({"later_us": ["x", 1]}, "ranks.later_us is"),
        ({"data_us": [None, 1]}, "ranks.data_us is"),
        ({"loss": [1e309, 1]}, "ranks.loss is"),
        ({"loss": [math.nan, 1]}, "ranks.loss is"),
        ({"loss": [-(10**400), 1.0]}, "ranks.loss is"),
        ({"loss": 10**299, "weight": 10**299}, "ranks.weight is"),
        ({"member": ["a", "a"]}, "are not one member each"),
        ({"member": ["a", 1]}, "not a list of texts"),
        ({"rank": [0, -1]}, "a rank of ranks is -1"),
        ({"team": "x"}, "ranks.team is 'x', not a whole number"),
    ],
)
def test_columns_that_cannot_be_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        LineReader().event(changed(**changes))


def test_who_wants_sums_reads_the_columns_for_them_alone() -> None:
    window = committed_window(0)
    for row in window["ranks"]:
        row |= {"update_s": 0.5, "data_s": 0.25}
    wanted = LineReader(SUMMED).event(to_line(window))["ranks"][0]
    assert (wanted["data_s"], wanted["loss"], "update_s" in wanted) == (0.25, 2.0, False)


def test_what_is_new_passes() -> None:
    event = LineReader().event(changed(mood=["good", "bad"]))
    assert [row["mood"] for row in event["ranks"]] == ["good", "bad"]
    assert LineReader().event(to_line(started(seed=7)))["seed"] == 7
    with pytest.raises(ValueError, match="ranks is \\[\\], not a JSON object"):
        LineReader().event(json.dumps({**committed_window(0), "ranks": []}).encode())
