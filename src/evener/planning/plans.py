"""The plans of windows: the samples or the local steps of each rank. Pure."""

from dataclasses import dataclass

from evener.planning.guard import Verdict


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """The samples that each rank computes in one window.

    Attributes:
        window: Global number of the window over the whole run, from 0; the only counter that is
            the same on every rank.
        epoch: Epoch whose permutation the positions refer to.
        start: First position of the window.
        size: Samples of the window over all ranks.
        shares: Whole samples for each rank, by rank; they sum to ``size``, which is checked when a
            plan is received.
        parked: By rank, 1 if it is parked from this window on, else 0; may be empty if none is.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPlan:
    """The work of each rank until the next averaging.

    Attributes:
        window: Global number of the window.
        epoch: Epoch of its samples.
        window_s: Seconds from the last average until ranks should stop; ``inf`` if only counts
            close the window. It is above 0, which is checked when a plan is received.
        blocking: Whether ranks wait for the average of this window at its end, also in ASYNC.
        steps: Local steps expected of each rank.
        most: Most local steps of a rank; with ``blocking`` off, also its most steps of the next
            window before the average of this one is applied.
        queues: Batches in each rank's queue at the beginning of the window.
        least: Local steps that a rank makes regardless of the time, up to its ``most``.
        anchor: The anchor of the plan.
        verdict: The verdict of the divergence guard.
    """

    window: int
    epoch: int
    window_s: float
    blocking: bool
    steps: tuple[int, ...]
    most: tuple[int, ...]
    queues: tuple[int, ...]
    least: int = 0
    anchor: int = 1
    verdict: Verdict = Verdict.STABLE

    @property
    def total_steps(self) -> int:
        """Return the local steps expected of all ranks."""
        return sum(self.steps)
