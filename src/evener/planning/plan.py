"""The plan of a SYNC window: the samples of each rank. Pure."""

from dataclasses import dataclass

from evener.errors import ProtocolError
from evener.notebook import html_table


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

        Raises:
            ProtocolError: The plan has no such rank.
        """
        if not 0 <= rank < len(self.shares):
            raise ProtocolError(
                f"plan of window {self.window} is for {len(self.shares)} ranks; rank {rank} has no "
                "place in it"
            )
        first = self.start + sum(self.shares[:rank])
        return range(first, first + self.shares[rank])

    def _repr_html_(self) -> str:
        parts = ((rank, self.positions(rank)) for rank in range(len(self.shares)))
        rows = [
            (
                rank,
                f"{len(own):,}",
                f"{len(own) / self.size if self.size else 0:.1%}",
                f"[{own.start:,}, {own.stop:,})",
            )
            for rank, own in parts
        ]
        title = f"window {self.window:,}: {self.size:,} samples of epoch {self.epoch}"
        return html_table(title, ["rank", "samples", "share", "positions"], rows)
