"""Events as lines, and back."""

import json
import math
from typing import Any

import pytest

from evener.observe.event_lines import from_line, to_line
from evener.observe.events import FIELDS, make_event
from helpers.event_cases import committed_window, started


def test_an_event_comes_back_as_it_was() -> None:
    window = committed_window(3, samples=(6, 4), losses=(1.25, None))
    window["ranks"][0] |= {"data_s": 0.0015, "sent_bytes": 7, "mood": "new fields pass"}
    assert from_line(to_line(window)) == window
    assert from_line(to_line(started(seed=7)))["seed"] == 7
    assert from_line(b'{"t": 1, "type": "weather", "rain": true}')["rain"]


def test_numbers_that_are_not_finite_are_null() -> None:
    rows = from_line(to_line(committed_window(0, losses=(math.nan, 2.0))))["ranks"]
    assert [row["loss"] for row in rows] == [None, 2.0]


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"weight": "4"}, "weight"),
        ({"wait_s": -1}, "wait_s"),
        ({"wait_s": 10**400}, "wait_s"),
        ({"sync_s": True}, "sync_s"),
        ({"samples": 1.5}, "samples"),
        ({"loss": math.nan}, "loss"),
        ({"member": 1}, "member"),
    ],
)
def test_impossible_rows_are_refused(changes: dict[str, Any], key: str) -> None:
    window = committed_window(0)
    window["ranks"][1] |= changes
    with pytest.raises(ValueError, match=rf"ranks\.1\.{key}"):
        from_line(json.dumps(window).encode())


@pytest.mark.parametrize("kind", FIELDS)
def test_an_event_without_a_field_of_its_type_is_refused(kind: str) -> None:
    names = FIELDS[kind].split()
    fields = dict.fromkeys(names)
    assert make_event(kind, t=1.0, **fields, further=2)["further"] == 2
    for name in names:
        with pytest.raises(ValueError, match=f"the event {kind} lacks {name}"):
            make_event(kind, t=1.0, **{key: fields[key] for key in names if key != name})
