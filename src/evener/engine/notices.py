"""What a team tells people about ranks that cost more than they bring."""

import warnings
from collections.abc import Sequence


def parked(rank: int, speeds: Sequence[float], windows: int) -> str:
    """A rank goes on without work.

    Args:
        rank: The rank.
        speeds: Samples per second of each rank alone; 0 where none was measured.
        windows: When it is tried again.
    """
    why = f"alone it does {speeds[rank]:.3g} samples/s of the team's {sum(speeds):.3g}"
    if not speeds[rank]:  # never had a sample
        why = "by the calibration it is too slow for a single sample of a batch"
    return (
        f"rank {rank} is parked: {why}, and the exchange costs more than that brings; it is tried "
        f"again after {windows} windows or at the end of the epoch"
    )


def slow_rank_0(speeds: Sequence[float]) -> str:
    """Rank 0 should be parked, and cannot be."""
    return (
        f"rank 0 makes the team slower: alone it does {speeds[0]:.3g} samples/s of the team's "
        f"{sum(speeds):.3g}, and the exchange costs more than that brings; but it keeps the team's "
        "books and cannot be parked. Start the fastest device as rank 0 (first in devices, on the "
        "first host), or leave this one out"
    )


def warn_of_former_name(old: str, new: str) -> None:
    """Warns whoever calls a method by a name that the next release will not have.

    Args:
        old: The former name, of the method that calls this.
        new: What it is named now.
    """
    warnings.warn(
        f"{old} is named {new} now, which is what it computes; the old name goes with the next "
        "release",
        DeprecationWarning,
        stacklevel=3,
    )
