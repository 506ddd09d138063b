"""How large the pieces are in which gradients travel during backward, and whether it pays. Pure."""

from typing import Final, NamedTuple

_MOST_PIECES: Final = 64
_LEAST_GAIN: Final = 0.02
"""A choice must be predicted to save this part of backward and exchange; timing is not better."""


class ExchangeCost(NamedTuple):
    """What an exchange costs the rank that is slowest in it, as timed once.

    Attributes:
        byte_s: Seconds for each byte of a tensor that is summed.
        call_s: Seconds of a call that sums next to nothing.
        processor_part: By which part backward is slower meanwhile, as an exchange needs processors,
            too; see ``processor_part``.
    """

    byte_s: float
    call_s: float
    processor_part: float = 0.0


class Pieces(NamedTuple):
    """A choice, with what was predicted for it.

    Attributes:
        num_bytes: Of one piece; 0 to exchange all when backward is over.
        seconds: From the beginning of backward to the end of the exchange.
        after_s: The same for an exchange after backward.
    """

    num_bytes: int
    seconds: float
    after_s: float


def processor_part(needed: float, left: float) -> float:
    """Return by which part backward is slower while an exchange is under way.

    Args:
        needed: Cores that backward keeps busy, on average.
        left: Cores that the exchange leaves to it.
    """
    return 0.0 if needed <= 0.0 else min(max((needed - left) / needed, 0.0), 1.0)


def choose_pieces(num_bytes: int, backward_s: float, cost: ExchangeCost) -> Pieces:
    """Choose the size of pieces by which backward and exchange are over first.

    The exchange of n pieces takes ``X = byte_s · num_bytes + n · call_s``, and ``processor_part``
    of that time is taken from backward. Pieces leave at even distances while backward computes, one
    after another. If backward takes longer than the exchange, the last piece is what remains after
    it. Otherwise the exchange begins with the first piece, and remains to its end. So both are over
    after the larger of ``backward_s + processor_part · X + (1 - processor_part) · (X / n)`` and
    ``backward_s / n + X``.

    Args:
        num_bytes: Of all gradients, above 0.
        backward_s: Seconds of the backward during which they leave, on the rank where it is
            shortest.
        cost: Of an exchange.
    """
    byte_s, call_s, part = cost
    after_s = backward_s + byte_s * num_bytes + call_s
    best = Pieces(0, after_s * (1 - _LEAST_GAIN), after_s)
    count = 1
    while count <= _MOST_PIECES:
        exchange_s = byte_s * num_bytes + count * call_s
        at_compute_s = backward_s + part * exchange_s + (1 - part) * exchange_s / count
        seconds = max(at_compute_s, backward_s / count + exchange_s)
        if seconds < best.seconds:
            best = Pieces(-(-num_bytes // count), seconds, after_s)
        count *= 2
    return best if best.num_bytes else best._replace(seconds=after_s)


def describe(chosen: Pieces, backward_s: float) -> str:
    """Return a line that says how gradients travel, and why.

    Args:
        chosen: What is done.
        backward_s: As given to ``choose_pieces``.
    """
    exchange_ms = 1e3 * (chosen.after_s - backward_s)
    facts = f"backward takes {1e3 * backward_s:.3g} ms, the exchange {exchange_ms:.3g} ms"
    if not chosen.num_bytes:
        return f"gradients travel after backward: {facts}, and little of it would be hidden"
    return (
        f"gradients travel during backward, in pieces of {chosen.num_bytes / 1e6:.2g} MB: {facts}"
    )
