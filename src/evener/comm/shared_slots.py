"""Views of what all ranks have in shared memory, and sums over them."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import final

import torch
from torch import Tensor

#: Bytes that one addition works on, over all ranks: they stay in the cache of a core until the sum
#: is written to all slots.
_CACHED_BYTES = 1 << 20
_ALIGNMENT_BYTES = 64


@final
class Slots:
    """One tensor of each rank, of one size and dtype, cut into what this rank has to add up.

    An element is summed by one rank, in rank order, and copied from there: so all ranks get the
    same bits, in whatever order they run.
    """

    def __init__(self, slots: Sequence[Tensor], rank: int, *, equal_parts: bool) -> None:
        """Cut the tensors.

        Args:
            slots: 1-D, by rank.
            rank: This rank.
            equal_parts: Whether parts must be equal; else they are cut at cache lines.
        """
        self._rank = rank
        size = slots[0].numel()
        unit = 1 if equal_parts else _ALIGNMENT_BYTES // slots[0].element_size()
        units = -(-size // unit)
        first, last = (units * r // len(slots) * unit for r in (rank, rank + 1))
        step = max(unit, _CACHED_BYTES // len(slots) // slots[0].element_size())
        bounds = [*range(first, min(last, size), step), min(last, size)]
        self._pieces = [[slot[a:b] for slot in slots] for a, b in pairwise(bounds)]
        # The first two can be added in place; a later rank's own numbers are still needed then.
        self._scratch = slots[0].new_empty(step if equal_parts and rank > 1 else 0)

    def sum_for_all(self) -> None:
        """Sum this rank's part, and write it to all slots."""
        for first, *others in self._pieces:
            for other in others:
                first.add_(other)
            for other in others:
                other.copy_(first)

    def sum_for_owner(self) -> None:
        """Sum this rank's part, and write it to this rank's slot alone."""
        for piece in self._pieces:
            own = piece[self._rank]
            total = self._scratch[: own.numel()] if self._rank > 1 else own
            torch.add(piece[0], piece[1], out=total)
            for other in piece[2:]:
                total.add_(other)
            if total is not own:
                own.copy_(total)


def steps(size: int, step: int) -> Iterator[tuple[int, int]]:
    """Return the first and last-plus-one element of each step through ``size`` elements."""
    for start in range(0, size, step):
        yield start, min(start + step, size)
