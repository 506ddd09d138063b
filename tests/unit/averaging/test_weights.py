"""The power of two that gradients are divided by until their divisor is known."""

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.averaging.weights import power_of_two_near


@pytest.mark.parametrize(
    ("weight", "power"),
    [
        (0.0, 1.0),
        (1.0, 1.0),
        (1.49, 1.0),
        (1.5, 2.0),
        (2.9, 2.0),
        (3.0, 4.0),
        (512.0, 512.0),
        (767.0, 512.0),
        (768.0, 1024.0),
        (0.3, 0.25),
        (1e300, 2.0**126),
        (1e-300, 2.0**-126),
    ],
)
def test_power_of_two_by_example(weight, power):
    assert power_of_two_near(weight) == power


@given(weight=st.floats(1e-30, 1e30))
def test_no_other_power_of_two_is_nearer(weight):
    power = power_of_two_near(weight)
    assert math.frexp(power)[0] == 0.5
    distance = abs(Fraction(power) - Fraction(weight))
    assert distance <= abs(Fraction(power) * 2 - Fraction(weight))
    assert distance <= abs(Fraction(power) / 2 - Fraction(weight))


@given(
    parts=st.lists(st.tuples(st.floats(0.5, 1e4), st.floats(-10, 10)), min_size=1, max_size=20),
    planned=st.floats(0, 1e6),
)
def test_dividing_early_by_a_power_of_two_changes_nothing(parts, planned):
    scale = power_of_two_near(planned)
    summed = math.fsum(weight / scale * gradient for weight, gradient in parts)
    total = math.fsum(weight for weight, _ in parts)
    expected = math.fsum(weight * gradient for weight, gradient in parts) / total
    assert summed * (scale / total) == pytest.approx(expected, rel=1e-12, abs=1e-12)
