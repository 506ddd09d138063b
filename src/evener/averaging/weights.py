"""The one weight rule, as numbers.

A gradient is the sum over the window of ``weight * gradient of loss``, divided by the sum of
``weight``, both over all ranks and all micro-batches. The divisor is known only after the exchange.
Until then sums are divided by a power of two near the weight of the window before, so that half
precision does not overflow; a power of two changes exponents and no digits.

Pure: no torch, no clock, no I/O.
"""

import math

_LARGEST_EXPONENT = 126
"""Powers of two up to here, and their inverses, are normal numbers in float32 and bfloat16."""


def power_of_two_near(weight: float) -> float:
    """Return the power of two nearest to the weight expected of a window; equal on all ranks.

    Args:
        weight: Expected weight of the window over all ranks. Between two powers the nearer counts,
            halfway the upper one.

    Returns:
        An exact power of two within 2**-126..2**126; 1.0 for a weight of 0.
    """
    if weight == 0.0:
        return 1.0
    mantissa, exponent = math.frexp(weight)
    if mantissa < 0.75:
        exponent -= 1
    return math.ldexp(1.0, max(-_LARGEST_EXPONENT, min(_LARGEST_EXPONENT, exponent)))
