"""Divides a whole number in given proportions, without losing or inventing one."""

from collections.abc import Sequence
from math import lcm

from evener.errors import ConfigError


def apportion(total: int, ratios: Sequence[float]) -> tuple[int, ...]:
    """Return shares of ``total`` as near to ``ratios`` as whole numbers can be.

    The method of largest remainders; ties go to the lower rank. Exact arithmetic, hence the same on
    every machine.

    Args:
        total: What to divide, 0 or more.
        ratios: Non-negative proportions, not all 0.

    Returns:
        Whole shares that sum to ``total``; 0 where the ratio is 0.

    Raises:
        ConfigError: No ratio is positive, or one is negative or not finite.
    """
    try:
        exact = [r.as_integer_ratio() for r in ratios]
    except (ValueError, OverflowError):
        exact = []
    unit = lcm(*(denominator for _, denominator in exact))
    parts = [numerator * (unit // denominator) for numerator, denominator in exact]
    whole = sum(parts)
    if whole == 0 or min(parts) < 0:
        raise ConfigError(
            f"cannot divide {total} in proportions {list(ratios)}; give one finite number >= 0 per "
            "rank, at least one of them positive"
        )
    shares = [total * part // whole for part in parts]
    by_remainder = sorted(range(len(parts)), key=lambda i: -(total * parts[i] % whole))
    for i in by_remainder[: total - sum(shares)]:
        shares[i] += 1
    return tuple(shares)
