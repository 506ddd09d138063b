import math

import pytest

from evener.observe.events import FIELDS, make_event, mean_loss, wait_fraction
from helpers.event_cases import KINDS, committed_window


@pytest.mark.parametrize("kind", FIELDS)
def test_event_has_the_fields_of_its_type_and_further_ones(kind: str) -> None:
    fields = {name: f"the {name}" for name in FIELDS[kind].split()}
    assert fields.keys() <= KINDS.keys()
    event = make_event(kind, t=5.0, **fields, further=[1])
    assert event == {"t": 5.0, "type": kind, **fields, "further": [1]}
    for name in fields:
        rest = {other: value for other, value in fields.items() if other != name}
        with pytest.raises(ValueError, match=f"the event {kind} lacks {name}$"):
            make_event(kind, t=5.0, **rest)


def test_wait_is_a_part_of_the_time_of_all_rows() -> None:
    assert wait_fraction(committed_window(0)["ranks"]) == pytest.approx(0.1)
    assert wait_fraction([]) == 0.0


def test_mean_loss_is_by_weight_over_ranks_with_work() -> None:
    assert mean_loss(committed_window(0, samples=(6, 4), losses=(1.0, 2.0))) == pytest.approx(1.4)
    assert mean_loss(committed_window(0, samples=(6, 0), losses=(1.0, None))) == 1.0
    assert mean_loss(committed_window(0, samples=(0, 0), losses=(None, None))) is None
    assert mean_loss(committed_window(0, losses=(1.0, None))) is None, "it was not finite"
    assert math.isnan(mean_loss(committed_window(0, losses=(1.0, math.nan))) or 0.0)
