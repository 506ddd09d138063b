"""The weight rule: however a window is cut up, the result is that of one process."""

import itertools
import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evener.averaging.weights import (
    check_weight,
    combine,
    power_of_two_near,
)
from evener.errors import UsageError
from evener.planning.report import Report

BOUNDED = settings(deadline=None, derandomize=True, max_examples=200, database=None)
BAD_WEIGHTS = [-1.0, -1e-300, math.nan, math.inf, -math.inf]


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


@BOUNDED
@given(weight=st.floats(1e-30, 1e30))
def test_no_other_power_of_two_is_nearer(weight):
    power = power_of_two_near(weight)
    assert math.frexp(power)[0] == 0.5
    distance = abs(Fraction(power) - Fraction(weight))
    assert distance <= abs(Fraction(power) * 2 - Fraction(weight))
    assert distance <= abs(Fraction(power) / 2 - Fraction(weight))


@pytest.mark.parametrize("weight", BAD_WEIGHTS)
def test_bad_weights_are_named(weight):
    named = rf"weight={weight}".replace("+", r"\+")
    with pytest.raises(UsageError, match=f"planned window has {named}"):
        power_of_two_near(weight)
    with pytest.raises(UsageError, match=f"rank 1 has {named}"):
        combine([Report(weight=1.0), Report(weight=weight)])
    with pytest.raises(UsageError, match=f"micro-batch 3 has {named}"):
        check_weight(weight, owner="micro-batch 3")


WEIGHTED_LOSSES = st.lists(
    st.tuples(st.integers(0, 1000).map(float), st.floats(-1e3, 1e3)), min_size=1, max_size=24
)


@BOUNDED
@given(micro_batches=WEIGHTED_LOSSES, cuts=st.lists(st.integers(0, 24), max_size=5))
def test_any_partition_gives_the_mean_of_one_process(micro_batches, cuts):
    bounds = [0, *sorted(min(cut, len(micro_batches)) for cut in cuts), len(micro_batches)]
    rows = []
    for start, stop in itertools.pairwise(bounds):
        part = micro_batches[start:stop]
        rows.append(
            Report(
                weight=math.fsum(weight for weight, _ in part),
                loss_sum=math.fsum(weight * loss for weight, loss in part),
            )
        )
    total = math.fsum(weight for weight, _ in micro_batches)
    combined = combine(rows)
    if total == 0:
        assert combined is None
        return
    assert combined is not None
    expected = math.fsum(weight * loss for weight, loss in micro_batches) / total
    assert combined[0] == total
    assert combined[1] == pytest.approx(expected, rel=1e-12, abs=1e-9)


@BOUNDED
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


def test_ranks_without_weight_do_not_count():
    idle = Report(weight=0.0, loss_sum=math.nan)
    assert combine([idle, Report(weight=2.0, loss_sum=6.0), idle]) == (2.0, 3.0)


def test_a_loss_that_is_not_finite_is_not_hidden():
    combined = combine([Report(weight=1.0, loss_sum=1.0), Report(weight=1.0, loss_sum=math.inf)])
    assert combined == (2.0, math.inf)


def test_nothing_to_apply():
    assert combine([]) is None
    assert combine([Report(), Report()]) is None


def test_a_total_that_overflows_is_refused():
    with pytest.raises(UsageError, match="the window has weight=inf"):
        combine([Report(weight=1e308), Report(weight=1e308)])


def test_sums_run_from_the_left():
    # From the left the 1 is lost; exact or compensated sums, as of sum() in Python 3.12, keep it.
    rows = [Report(weight=weight) for weight in (2.0**53, 1.0, 1.0)]
    assert combine(rows) == (2.0**53, 0.0)
