"""Events as lines, and back."""

import json
import math
from typing import Any

import pytest

from evener.observe.event_lines import from_line, to_line
from helpers.event_cases import committed_window, started


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
    assert from_line(line) == window
    ranks = json.loads(line)["ranks"]
    assert (ranks["samples"], ranks["data_us"], ranks["sent_bytes"]) == ([6, 4], 1500, 7)
    assert (ranks["weight"], ranks["loss"]) == ([60, 40], [1.25, None])
    assert "skipped" not in json.loads(line)


def test_numbers_that_are_not_finite_are_null_and_seconds_are_never_negative() -> None:
    window = committed_window(0, losses=(math.nan, 2.0), times_s=((0.7, -1e-9, 0.1),) * 2)
    rows = from_line(to_line(window))["ranks"]
    assert [row["loss"] for row in rows] == [None, 2.0]
    assert [row["wait_s"] for row in rows] == [0, 0]


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"weight": "gone"}, "weight"),
        ({"weight": "4"}, "weight"),
        ({"wait_us": [1, -1]}, "wait_us"),
        ({"wait_us": [10**400, 1]}, "wait_us"),
        ({"sync_us": [1, True]}, "sync_us"),
        ({"samples": [1.5, 1]}, "samples"),
        ({"compute_us": [1]}, "compute_us has 1 values for 2 ranks"),
        ({"later_us": ["x", 1]}, "later_us"),
        ({"loss": [math.nan, 1]}, "expected value"),
        ({"loss": 10**299}, "loss"),
        ({"member": ["a", 1]}, "member"),
        ({"rank": [0, -1]}, "rank"),
    ],
)
def test_impossible_columns_are_refused(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ValueError, match=key):
        from_line(changed(**changes))


def test_what_is_new_passes() -> None:
    event = from_line(changed(mood=[1, 2]))
    assert [row["mood"] for row in event["ranks"]] == [1, 2]
    assert from_line(to_line(started(seed=7)))["seed"] == 7
    assert from_line(b'{"t": 1, "type": "weather", "rain": true}')["rain"]
