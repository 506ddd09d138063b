"""How reports of a window are combined: however it is cut up, the result is that of one process."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.errors import UsageError
from evener.planning.report import Report
from evener.protocol.machine import check_weight, combine

BAD_WEIGHTS = [-1.0, -1e-300, math.nan, math.inf, -math.inf]


def combined(*reports: Report) -> tuple[float, float]:
    return combine(dict(enumerate(reports)))


@pytest.mark.parametrize("weight", BAD_WEIGHTS)
def test_bad_weights_are_named(weight):
    named = rf"weight={weight}".replace("+", r"\+")
    with pytest.raises(UsageError, match=f"rank 1 has {named}"):
        combined(Report(weight=1.0), Report(weight=weight))
    with pytest.raises(UsageError, match=f"rank 5 has {named}"):
        combine({2: Report(weight=1.0), 5: Report(weight=weight)})
    with pytest.raises(UsageError, match=f"micro-batch 3 has {named}"):
        check_weight(weight, owner="micro-batch 3")


WEIGHTED_LOSSES = st.lists(
    st.tuples(st.integers(0, 1000).map(float), st.floats(-1e3, 1e3)), min_size=1, max_size=24
)


@given(micro_batches=WEIGHTED_LOSSES, cuts=st.lists(st.integers(0, 24), max_size=5))
def test_any_partition_gives_the_mean_of_one_process(micro_batches, cuts):
    bounds = [0, *sorted(min(cut, len(micro_batches)) for cut in cuts), len(micro_batches)]
    reports = []
    for start, stop in itertools.pairwise(bounds):
        part = micro_batches[start:stop]
        reports.append(
            Report(
                weight=math.fsum(weight for weight, _ in part),
                loss_sum=math.fsum(weight * loss for weight, loss in part),
            )
        )
    total = math.fsum(weight for weight, _ in micro_batches)
    weight, loss = combined(*reports)
    assert weight == total
    if total == 0:
        assert math.isnan(loss)
        return
    expected = math.fsum(weight * loss for weight, loss in micro_batches) / total
    assert loss == pytest.approx(expected, rel=1e-12, abs=1e-9)


def test_a_loss_that_is_not_finite_is_not_hidden():
    found = combined(Report(weight=1.0, loss_sum=1.0), Report(weight=1.0, loss_sum=math.inf))
    assert found == (2.0, math.inf)


def test_a_total_that_overflows_is_refused():
    with pytest.raises(UsageError, match="the window has weight=inf"):
        combined(Report(weight=1e308), Report(weight=1e308))


def test_sums_run_from_the_left():
    # From the left the 1 is lost; exact or compensated sums, as of sum() in Python 3.12, keep it.
    assert combined(*(Report(weight=w) for w in (2.0**53, 1.0, 1.0))) == (2.0**53, 0.0)
