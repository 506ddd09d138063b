"""Divides a whole number in given proportions, without losing or inventing one."""

from collections.abc import Sequence
from fractions import Fraction

from evener.errors import ConfigError


def apportion(total: int, ratios: Sequence[float]) -> tuple[int, ...]:
    """Shares of ``total`` as near to ``ratios`` as whole numbers can be.

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
        exact = [Fraction(r) for r in ratios]
    except (ValueError, OverflowError):
        exact = []
    if not exact or min(exact) < 0 or sum(exact) == 0:
        raise ConfigError(
            f"cannot divide {total} in proportions {list(ratios)}; give one finite number >= 0 per "
            "rank, at least one of them positive"
        )
    whole = sum(exact)
    quotas = [total * e / whole for e in exact]
    shares = [int(q) for q in quotas]
    by_remainder = sorted(range(len(quotas)), key=lambda i: (shares[i] - quotas[i], i))
    for i in by_remainder[: total - sum(shares)]:
        shares[i] += 1
    return tuple(shares)
