import math

import pytest

from evener.observe.events import mean_loss, wait_fraction
from helpers.event_cases import committed_window


def test_wait_is_a_part_of_the_time_of_all_rows() -> None:
    assert wait_fraction(committed_window(0)["ranks"]) == pytest.approx(0.1)
    assert wait_fraction([]) == 0.0


def test_mean_loss_is_by_weight_over_ranks_with_work() -> None:
    assert mean_loss(committed_window(0, samples=(6, 4), losses=(1.0, 2.0))) == pytest.approx(1.4)
    assert mean_loss(committed_window(0, samples=(6, 0), losses=(1.0, None))) == 1.0
    assert mean_loss(committed_window(0, samples=(0, 0), losses=(None, None))) is None
    assert mean_loss(committed_window(0, losses=(1.0, None))) is None, "it was not finite"
    assert math.isnan(mean_loss(committed_window(0, losses=(1.0, math.nan))) or 0.0)
