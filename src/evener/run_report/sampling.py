"""Fewer points for the same curve: means of neighbours, and their extremes beside them. Pure."""

import math
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_DIGITS: Final = 6


def bucket_starts(count: int, most: int) -> NDArray[np.intp]:
    """Return the first index of each of at most ``most`` buckets of nearly equal size.

    Args:
        count: Values to be put into buckets, 0 or more.
        most: Buckets, 1 or more.
    """
    return np.arange(min(count, most), dtype=np.intp) * count // max(1, min(count, most))


def bucket_ends(starts: NDArray[np.intp], count: int) -> NDArray[np.intp]:
    """Return the last index of each bucket."""
    return np.append(starts[1:], count)[: len(starts)] - 1


def sums(values: Floats, starts: NDArray[np.intp]) -> Floats:
    """Return the sum of each bucket."""
    return np.add.reduceat(values, starts) if len(starts) else np.zeros(0)


def ratio(over: Floats, under: Floats) -> Floats:
    """Return ``over / under``, and NaN where ``under`` is 0."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return np.where(under > 0, over / under, np.nan)


def band(over: Floats, under: Floats, starts: NDArray[np.intp]) -> dict[str, Any]:
    """Return the curve of a ratio such as samples per second, as JSON.

    Args:
        over: What is divided, for each value; NaN where it is unknown.
        under: What it is divided by, above 0 where the value counts.
        starts: Where buckets begin.

    Returns:
        ``mean``: for each bucket the ratio of the sums. Where buckets hold several values, also
        ``low`` and ``high``: the least and the largest ratio of a single value in it.
    """
    counts = np.isfinite(over) & (under > 0)
    over, under = np.where(counts, over, 0.0), np.where(counts, under, 0.0)
    curve: dict[str, Any] = {"mean": numbers(ratio(sums(over, starts), sums(under, starts)))}
    if len(starts) < len(over):
        single = ratio(over, under)
        curve["low"] = numbers(np.fmin.reduceat(single, starts))
        curve["high"] = numbers(np.fmax.reduceat(single, starts))
    return curve


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
