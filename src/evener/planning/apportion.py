"""Divides a whole number in given proportions, without losing or inventing one."""

import math
from collections.abc import Sequence


def apportion(total: int, ratios: Sequence[float]) -> tuple[int, ...]:
    """Return shares of ``total`` as near to ``ratios`` as whole numbers can be.

    The method of largest remainders; ties go to the lower rank.

    Args:
        total: What to divide, 0 or more.
        ratios: Non-negative proportions, not all 0.

    Returns:
        Whole shares that sum to ``total``; 0 where the ratio is 0.
    """
    whole = math.fsum(ratios)
    exact = [total * ratio / whole for ratio in ratios]
    shares = [int(part) for part in exact]
    by_remainder = sorted(range(len(shares)), key=lambda rank: shares[rank] - exact[rank])
    for rank in by_remainder[: total - sum(shares)]:
        shares[rank] += 1
    return tuple(shares)
