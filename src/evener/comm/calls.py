"""What ranks know of a collective call."""

from typing import NamedTuple


class Call(NamedTuple):
    """One collective call.

    Attributes:
        number: How many calls this communicator has had, this one included; equal on all ranks.
        kind: The operation, such as ``"all_reduce"``.
        what: What is exchanged, in words for a message; equal on all ranks.
        timeout_s: Seconds after which the call must have failed.
        label: ``what``, and the operation with its size: what ranks compare.
        have_met: Whether the caller guarantees that all ranks are ready; see
            ``reduce_scatter_parts``.
    """

    number: int
    kind: str
    what: str
    timeout_s: float
    label: str
    have_met: bool = False
