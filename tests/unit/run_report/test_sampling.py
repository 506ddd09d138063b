import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from evener.run_report.sampling import band, bucket_starts, number
from evener.run_report.windows import Windows, merge_at

values = st.lists(st.floats(0, 1e6) | st.just(float("nan")), min_size=1, max_size=60)


@given(values, st.integers(1, 20))
def test_no_extreme_is_lost_and_means_are_of_all_values(losses, most):
    over = np.array(losses)
    starts = bucket_starts(np.ones(len(losses)), most)
    assert len(starts) == min(most, len(losses))
    curve = curve_of(over, np.ones(len(losses)), starts)
    known = over[np.isfinite(over)]
    if len(starts) < len(losses) and len(known):
        lows = [v for v in curve["low"] if v is not None]
        highs = [v for v in curve["high"] if v is not None]
        np.testing.assert_allclose(min(lows), known.min(), rtol=1e-5)
        np.testing.assert_allclose(max(highs), known.max(), rtol=1e-5)
    for mean, start, end in zip(curve["mean"], starts, [*starts[1:], len(losses)], strict=True):
        inside = over[start:end]
        inside = inside[np.isfinite(inside)]
        assert (mean is None) == (len(inside) == 0)
        if mean is not None:
            np.testing.assert_allclose(mean, inside.mean(), rtol=1e-5, atol=1e-300)


def curve_of(over, under, starts):
    """The curve of windows with this weight and loss, merged from each start to the next."""
    windows = Windows()
    windows.add_lane()
    for k, (one, weight) in enumerate(zip(over / under, under, strict=True)):
        windows.add((k, k, k + 1, one, np.nan, 1), [(1, weight, 1, 0, 0, 0, 0)])
    cells = merge_at(windows.cells(), starts)
    parts = [cells[f"loss_{part}"] for part in ("over", "under", "low", "high")]
    return band(*parts, is_single=len(starts) == len(over))


def test_a_mean_is_by_weight():
    curve = curve_of(np.array([10.0, 2.0]), np.array([1.0, 9.0]), bucket_starts(np.ones(2), 1))
    assert curve["mean"] == [1.2]
    assert (curve["low"], curve["high"]) == ([number(2 / 9)], [10])


def test_few_values_are_told_as_they_are():
    starts = bucket_starts(np.ones(2), 5)
    assert curve_of(np.array([1.0, 2.0]), np.ones(2), starts) == {"mean": [1, 2]}


def test_nothing_is_a_curve_without_points():
    assert curve_of(np.zeros(0), np.zeros(0), bucket_starts(np.zeros(0), 5)) == {"mean": []}


def test_buckets_hold_as_many_windows_where_some_have_been_merged():
    assert bucket_starts(np.array([8.0, 8.0, 8.0, 1, 1, 1, 1, 1, 1, 1, 1]), 4).tolist() == [
        0,
        1,
        2,
        3,
    ]


def test_numbers_are_json():
    assert [number(v) for v in (1.0, 1 / 3, float("inf"), float("nan"), None, 1e300)] == [
        1, 0.333333, None, None, None, 1e300,
    ]  # fmt: skip
