"""The size of pieces in which gradients are exchanged during backward, if that is faster. Pure."""

from typing import Final, NamedTuple

_MOST_PIECES: Final = 64
_LEAST_GAIN: Final = 0.02
"""Least fraction of backward and exchange that must be saved; timings are not more exact."""

_MORE_GAIN: Final = 0.01
"""More pieces must save this part: each also takes time from the thread that computes."""


class ExchangeCost(NamedTuple):
    """The measured cost of an exchange for the slowest rank.

    Attributes:
        byte_s: Seconds for each byte of a tensor that is summed.
        call_s: Seconds of a call that sums a tiny tensor.
        processor_part: Fraction by which backward is slower meanwhile, as an exchange needs
            processors, too; see ``processor_part``.
    """

    byte_s: float
    call_s: float
    processor_part: float = 0.0


class Pieces(NamedTuple):
    """A choice, with its predicted time.

    Attributes:
        num_bytes: Size of a piece; 0 to exchange all after backward.
        seconds: From the beginning of backward to the end of the exchange.
        after_s: The same for an exchange after backward.
    """

    num_bytes: int
    seconds: float
    after_s: float


def processor_part(needed: float, left: float) -> float:
    """Return the fraction by which backward is slower during an exchange.

    Args:
        needed: Cores that backward keeps busy, on average.
        left: Cores that the exchange does not use.
    """
    return 0.0 if needed <= 0.0 else min(max((needed - left) / needed, 0.0), 1.0)


def choose_pieces(num_bytes: int, backward_s: float, cost: ExchangeCost) -> Pieces:
    """Choose the size of pieces with which backward and exchange end first.

    The exchange of n pieces takes ``X = byte_s · num_bytes + n · call_s``, and ``processor_part``
    of that time is taken from backward. Pieces are sent one after another, at equal intervals
    during backward. If backward takes longer than the exchange, only the last piece remains after
    it. Otherwise the exchange begins with the first piece, and its end is what counts. So both end
    after the larger of ``backward_s + processor_part · X + (1 - processor_part) · (X / n)`` and
    ``backward_s / n + X``.

    Args:
        num_bytes: Size of all gradients, above 0.
        backward_s: Seconds of the backward during which they are sent, on the rank on which it is
            shortest.
        cost: Cost of an exchange.
    """
    byte_s, call_s, part = cost
    after_s = backward_s + byte_s * num_bytes + call_s
    best = Pieces(0, after_s, after_s)
    count = 1
    while count <= _MOST_PIECES:
        exchange_s = byte_s * num_bytes + count * call_s
        at_compute_s = backward_s + part * exchange_s + (1 - part) * exchange_s / count
        seconds = max(at_compute_s, backward_s / count + exchange_s)
        least = _MORE_GAIN if best.num_bytes else _LEAST_GAIN
        if seconds < best.seconds * (1 - least):
            best = Pieces(-(-num_bytes // count), seconds, after_s)
        count *= 2
    return best


def describe(chosen: Pieces, backward_s: float) -> str:
    """Describe in a line when gradients are exchanged, and why.

    Args:
        chosen: The choice.
        backward_s: As given to ``choose_pieces``.
    """
    exchange_ms = 1e3 * (chosen.after_s - backward_s)
    facts = f"backward takes {1e3 * backward_s:.3g} ms, the exchange {exchange_ms:.3g} ms"
    if not chosen.num_bytes:
        return f"gradients travel after backward: {facts}, and little of it would be hidden"
    return (
        f"gradients travel during backward, in pieces of {chosen.num_bytes / 1e6:.2g} MB: {facts}"
    )
