"""The plan of a SYNC window: the samples of each rank. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """The samples that each rank computes in one window.

    Attributes:
        window: Global number of the window over the whole run, from 0; the only counter that is
            the same on every rank.
        epoch: Epoch whose permutation the positions refer to.
        start: First position of the window.
        size: Samples of the window over all ranks.
        shares: Whole samples for each rank, by rank; they sum to ``size``, which is checked where a
            plan is received.
        parked: By rank, 1 where it is parked from this window on, and 0 elsewhere; empty where the
            window follows no plan.
    """

    window: int
    epoch: int
    start: int
    size: int
    shares: tuple[int, ...]
    parked: tuple[int, ...] = ()

    @property
    def parked_ranks(self) -> frozenset[int]:
        """Return the ranks that are parked."""
        return frozenset(rank for rank, is_parked in enumerate(self.parked) if is_parked)

    @property
    def stop(self) -> int:
        """Return one past the last position of the window."""
        return self.start + self.size

    def positions(self, rank: int) -> range:
        """Return the positions of the epoch's permutation of ``rank``: ranks take adjacent slices.

        Args:
            rank: Rank of the generation that the plan is for.
        """
        first = self.start + sum(self.shares[:rank])
        return range(first, first + self.shares[rank])
