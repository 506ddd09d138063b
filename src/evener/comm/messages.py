"""Texts of errors of an exchange, the same for every communicator."""

import re
from collections.abc import Sequence


def name_ranks(ranks: Sequence[int]) -> str:
    """Return ``(1,)`` as ``"rank 1"``, ``(0, 2, 3)`` as ``"ranks 0, 2 and 3"``."""
    words = [str(r) for r in sorted(ranks)]
    if len(words) == 1:
        return f"rank {words[0]}"
    return f"ranks {', '.join(words[:-1])} and {words[-1]}"


def timeout_message(rank: int, what: str, waited_s: float, missing: Sequence[int]) -> str:
    """Return who waited in which call for which ranks, and the remedy."""
    whom = name_ranks(missing) if missing else "the others (which of them is not known)"
    return (
        f"rank {rank} waited {waited_s:.1f} s in {what!r} for {whom}: stopped, hung or slower than "
        "the deadline; look at its output, or raise the timeout"
    )


def late_message(rank: int, what: str, deadline_s: float) -> str:
    """Return the message for a rank that came after the others had given up."""
    return (
        f"rank {rank} came to {what!r} after the others had given up: their deadline was "
        f"{deadline_s:.1f} s; raise the timeout if this rank is merely slow"
    )


def closed_message(rank: int, what: str) -> str:
    """Return the operation of a rank whose other thread closed the communicator, as a message."""
    return f"rank {rank} closed this communicator while it was in {what!r}"


def lost_message(rank: int, what: str, detail: str) -> str:
    """Return the operation in which a peer was lost, as a message."""
    return (
        f"rank {rank} lost a peer in {what!r}: {detail}; the peer's own output shows why it ended. "
        "If its script came to an end: let every rank run the whole script"
    )


def name_call(label: bytes, ahead: int) -> str:
    """Name the call of another rank.

    Args:
        label: Its label as far as it has come, padded with zeros.
        ahead: By how many calls that rank is ahead of this one.
    """
    text = label.rstrip(b"\0").decode(errors="replace")
    return f"{text}, {ahead:+d} calls" if ahead else text


def mismatch_message(rank: int, words: str, others: Sequence[tuple[int, str]]) -> str:
    """Return each rank's operation, as a message.

    Args:
        rank: This rank.
        words: The operation that it is in.
        others: ``(rank, words)`` of those in another one.
    """
    theirs = ", ".join(f"rank {r} in {text}" for r, text in others)
    return (
        f"ranks are in different operations: rank {rank} in {words}, {theirs}. All must make the "
        "same calls in the same order: branch on ddp.window, never on a local counter"
    )


def first_line(error: BaseException) -> str:
    """Return the part of a message from torch that says what happened, without paths and stack."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    text = lines[0].partition(". This is typically")[0]
    return re.sub(r"^\[[^]]*/[^]]*\] ", "", text).strip()
