"""When a silent rank is named: windows decide, and a floor."""

import pytest

from evener.planning.silence import FIRST_S, FLOOR_S, silence_deadline_s


def test_before_windows_are_known_a_long_deadline_counts():
    assert silence_deadline_s([]) == silence_deadline_s([0.1, 0.1]) == FIRST_S
    assert silence_deadline_s([0.1] * 3) == FLOOR_S < FIRST_S


def test_the_deadline_of_long_windows_is_their_median_and_eight_deviations():
    assert silence_deadline_s([58.0, 60.0, 62.0, 61.0, 59.0]) == pytest.approx(60.0 + 8 * 1.0)


def test_one_hung_window_does_not_raise_the_deadline():
    assert silence_deadline_s([20.0] * 9 + [500.0]) == 20.0
