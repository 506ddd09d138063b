import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from evener.run_report.sampling import band, bucket_ends, bucket_starts, number

values = st.lists(st.floats(0, 1e6) | st.just(float("nan")), min_size=1, max_size=60)


@given(values, st.integers(1, 20))
def test_no_extreme_is_lost_and_means_are_of_all_values(losses, most):
    over, under = np.array(losses), np.ones(len(losses))
    starts = bucket_starts(len(losses), most)
    assert len(starts) == min(most, len(losses))
    curve = band(over, under, starts)
    known = over[np.isfinite(over)]
    if len(starts) < len(losses) and len(known):
        lows = [v for v in curve["low"] if v is not None]
        highs = [v for v in curve["high"] if v is not None]
        np.testing.assert_allclose(min(lows), known.min(), rtol=1e-5)
        np.testing.assert_allclose(max(highs), known.max(), rtol=1e-5)
    for mean, start, end in zip(
        curve["mean"], starts, bucket_ends(starts, len(losses)), strict=True
    ):
        inside = over[start : end + 1]
        inside = inside[np.isfinite(inside)]
        assert (mean is None) == (len(inside) == 0)
        if mean is not None:
            np.testing.assert_allclose(mean, inside.mean(), rtol=1e-5, atol=1e-300)


def test_a_mean_is_by_weight():
    curve = band(np.array([10.0, 2.0]), np.array([1.0, 9.0]), bucket_starts(2, 1))
    assert curve["mean"] == [1.2]
    assert (curve["low"], curve["high"]) == ([number(2 / 9)], [10])


def test_few_values_are_told_as_they_are():
    assert band(np.array([1.0, 2.0]), np.ones(2), bucket_starts(2, 5)) == {"mean": [1, 2]}


def test_nothing_is_a_curve_without_points():
    assert band(np.zeros(0), np.zeros(0), bucket_starts(0, 5)) == {"mean": []}


def test_numbers_are_json():
    assert [number(v) for v in (1.0, 1 / 3, float("inf"), float("nan"), None, 1e300)] == [
        1, 0.333333, None, None, None, 1e300,
    ]  # fmt: skip
