"""Finds ranks that read equal batches, and so do the same work, in a run's first windows."""

import math
from collections.abc import Sequence
from functools import partial
from itertools import combinations

from evener.planning.report import Report

#: Windows after which the user is told.
WINDOWS = 3


class EqualBatches:
    """Finds ranks that read the same batches, where ``ddp.loader`` does not hand them out.

    evener does not see such a batch. It sees the loss and the norm of the gradient before
    averaging, which each rank has computed anyway. Both are equal, window after window, only if the
    batches are equal.
    """

    def __init__(self) -> None:
        self._num_windows = 0
        self._pairs: set[tuple[int, int]] | None = None

    def see(self, reports: Sequence[Report]) -> str:
        """Compare the ranks' batches in one of the first windows; later windows have no effect.

        Args:
            reports: By rank.

        Returns:
            The warning about ranks that were equal to another one in each of the first windows,
            once; empty otherwise.
        """
        found = {
            rank: (report.loss_sum / report.weight, report.own_norm)
            for rank, report in enumerate(reports)
            if report.weight and report.own_norm
        }
        if self._num_windows == WINDOWS or self._pairs == set() or len(found) < 2:
            return ""
        self._num_windows += 1
        equal = {
            (one, other)
            for one, other in combinations(sorted(found), 2)
            # Devices of different kinds round differently.
            if all(map(partial(math.isclose, rel_tol=1e-5), found[one], found[other]))
        }
        self._pairs = equal if self._pairs is None else self._pairs & equal
        if self._num_windows < WINDOWS or not self._pairs:
            return ""
        *ranks, last = sorted({rank for pair in self._pairs for rank in pair})
        return (
            f"ranks {', '.join(map(str, ranks))} and {last} had the same loss and the same "
            f"gradient in each of the first {WINDOWS} windows: they read equal batches, and do the "
            "same work at the same time. Remedy: ddp.loader(dataset, batch_size=...) in place of "
            "the DataLoader hands each sample to one rank; or let each rank read a part of its "
            "own, by ddp.rank and ddp.world_size, such as with torch's DistributedSampler"
        )
