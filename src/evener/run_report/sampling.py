"""Thin out curves: means of neighbouring points, with their extremes. Pure."""

import math
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_DIGITS: Final = 6


def bucket_starts(counts: Floats, most: int) -> NDArray[np.intp]:
    """Return the first index of each of at most ``most`` buckets of nearly equal size.

    Args:
        counts: How much each value counts, 1 or more.
        most: Buckets, 1 or more.
    """
    before = np.concatenate([[0.0], np.cumsum(counts)])
    num_buckets = min(len(counts), most)
    bounds = np.arange(num_buckets) * before[-1] // max(1, num_buckets)
    return np.unique(np.searchsorted(before[:-1], bounds, side="right") - 1)


def ratio(over: Floats, under: Floats) -> Floats:
    """Return ``over / under``, and NaN where ``under`` is 0."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return np.where(under > 0, over / under, np.nan)


def band(
    over: Floats, under: Floats, low: Floats, high: Floats, *, is_single: bool
) -> dict[str, Any]:
    """Return the curve of a ratio such as samples per second, as JSON.

    Args:
        over: For each point the sum of what is divided.
        under: The sum of what it is divided by.
        low: The least ratio of a single value.
        high: The largest one.
        is_single: Whether each point is a single value.

    Returns:
        ``mean``: for each point the ratio of the sums. Where points are of several values, also
        ``low`` and ``high``.
    """
    curve: dict[str, Any] = {"mean": numbers(ratio(over, under))}
    return curve if is_single else {**curve, "low": numbers(low), "high": numbers(high)}


def numbers(values: Floats) -> list[float | None]:
    """Return an array as JSON: six digits, null for what is not finite."""
    return [number(value) for value in values.tolist()]


def number(value: float | None) -> float | None:
    """Return a number as JSON: six digits, whole where it is whole, null if it is not finite."""
    if value is None or not math.isfinite(value):
        return None
    if value == int(value) and abs(value) < 2**53:
        return int(value)
    return float(f"{value:.{_DIGITS}g}")
