import json
import math

import pytest

from evener.observe.events import FIELDS, Totals, make_event, mean_loss
from helpers.event_cases import KINDS, check_kinds, committed_window, started


@pytest.mark.parametrize("kind", FIELDS)
def test_event_has_the_fields_of_its_type_and_further_ones(kind: str) -> None:
    fields = {name: f"the {name}" for name in FIELDS[kind].split()}
    event = make_event(kind, t=5.0, **fields, further=[1])
    assert event == {"t": 5.0, "type": kind, **fields, "further": [1]}
    for name in fields:
        rest = {other: value for other, value in fields.items() if other != name}
        with pytest.raises(ValueError, match=f"the event {kind} lacks {name}$"):
            make_event(kind, t=5.0, **rest)


def test_every_field_has_a_kind() -> None:
    fields = {name for names in FIELDS.values() for name in names.split()}
    assert fields <= set(KINDS)
    check_kinds(started(total_windows=None))
    check_kinds(committed_window(0))
    for wrong in (
        started(total_windows=2.5),
        started(run=None),
        started(members=[1, 2]),
        committed_window(0, committed=[(0.5, 4)]),
        {**committed_window(0), "ranks": [{**committed_window(0)["ranks"][0], "weight": "4"}]},
    ):
        with pytest.raises(AssertionError):
            check_kinds(wrong)


def test_window_event_lists_each_rank() -> None:
    event = committed_window(0, t=1.0, samples=(4,), losses=(1.5,), times_s=((0.5, 0.25, 0.125),))
    assert event["committed"] == [[0, 4]]
    row = {"rank": 0, "member": "a", "samples": 4, "weight": 40.0, "loss": 1.5}
    assert event["ranks"] == [{**row, "compute_s": 0.5, "wait_s": 0.25, "sync_s": 0.125}]
    assert json.loads(json.dumps(event)) == event, "lists, not tuples: it reads back as it is"


def test_run_started_takes_further_details() -> None:
    assert started(seed=7)["seed"] == 7


def test_totals_of_rows() -> None:
    totals = Totals().add(committed_window(0)["ranks"])
    assert (totals.windows, totals.samples, totals.weight) == (1, 10, 100.0)
    assert totals.wait_fraction == pytest.approx(0.1)
    assert Totals().wait_fraction == 0.0


def test_mean_loss_is_by_weight_over_ranks_with_work() -> None:
    assert mean_loss(committed_window(0, samples=(6, 4), losses=(1.0, 2.0))) == pytest.approx(1.4)
    assert mean_loss(committed_window(0, samples=(6, 0), losses=(1.0, None))) == 1.0
    assert mean_loss(committed_window(0, samples=(0, 0), losses=(None, None))) is None
    assert mean_loss(committed_window(0, losses=(1.0, None))) is None, "it was not finite"
    assert math.isnan(mean_loss(committed_window(0, losses=(1.0, math.nan))) or 0.0)
