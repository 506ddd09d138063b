"""The one weight rule, as numbers.

A gradient is the sum over the window of ``weight * gradient of loss``, divided by the sum of
``weight``, both over all ranks and all micro-batches. The divisor is known only after the exchange.
Until then sums are divided by a power of two near the weight that is planned, so that half
precision does not overflow; a power of two changes exponents and no digits.

All sums run from the left in rank order: the built-in ``sum()`` rounds differently from Python
3.12 on. Pure: no torch, no clock, no I/O.
"""

import math
from collections.abc import Sequence
from typing import Protocol

from evener.errors import UsageError

_LARGEST_EXPONENT = 126
"""Powers of two up to here, and their inverses, are normal numbers in float32 and bfloat16."""


class Weighed(Protocol):
    """What a rank says of its part of a window; ``WindowReport`` is one."""

    @property
    def weight(self) -> float:
        """Sum of the weights of its micro-batches."""

    @property
    def loss_sum(self) -> float:
        """Sum of weight times loss over its micro-batches."""


def check_weight(weight: float, *, owner: str) -> float:
    """Return ``weight`` if it can weigh a loss.

    Args:
        weight: Units that the loss is the mean of, such as samples or tokens.
        owner: Whose weight it is, for the message, such as ``"rank 1"``.

    Raises:
        UsageError: The weight is negative or not finite.
    """
    if not math.isfinite(weight) or weight < 0.0:
        raise UsageError(
            f"{owner} has weight={weight}: a weight is how many samples or tokens a loss is the "
            "mean of, so it must be finite and not negative. Give the count of what was averaged"
        )
    return weight


def power_of_two_near(weight: float) -> float:
    """The power of two nearest to the weight planned for a window, as every rank computes it.

    Args:
        weight: Planned weight of the window over all ranks. Between two powers the nearer counts,
            halfway the upper one.

    Returns:
        An exact power of two within 2**-126..2**126; 1.0 for a weight of 0.

    Raises:
        UsageError: The weight is negative or not finite.
    """
    check_weight(weight, owner="the planned window")
    if weight == 0.0:
        return 1.0
    mantissa, exponent = math.frexp(weight)
    if mantissa < 0.75:
        exponent -= 1
    return math.ldexp(1.0, max(-_LARGEST_EXPONENT, min(_LARGEST_EXPONENT, exponent)))


def combine(rows: Sequence[Weighed]) -> tuple[float, float] | None:
    """Weight and mean loss of a window over all ranks.

    Args:
        rows: One row a rank, in rank order.

    Returns:
        The total weight and the mean loss; ``None`` if the total weight is 0, when there is nothing
        to apply. The loss is not finite if that of a rank with weight is not.

    Raises:
        UsageError: A weight is negative or not finite, or their sum is not finite.
    """
    total = 0.0
    loss_sum = 0.0
    for rank, row in enumerate(rows):
        weight = check_weight(row.weight, owner=f"rank {rank}")
        if weight > 0.0:
            total += weight
            loss_sum += row.loss_sum
    if total == 0.0:
        return None
    return check_weight(total, owner="the window"), loss_sum / total
