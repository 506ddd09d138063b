"""The order of an epoch: no list, however long it is."""

import math
from typing import Any, Final

import numpy as np

from evener.data.cursor import derive_seed

_CHUNK: Final = 4096

_NUM_ROUNDS: Final = 8
"""Feistel rounds; below six, neighbouring positions of small data sets stay correlated."""

_MASK_64: Final = 2**64 - 1
_MIX_1: Final = 0xBF58476D1CE4E5B9
_MIX_2: Final = 0x94D049BB133111EB
"""Odd multipliers with good diffusion, known from the splitmix64 generator."""


class Permutation:
    """A seeded shuffle of ``range(num_samples)`` that holds no list.

    A position is split into two digits of about ``sqrt(num_samples)`` values each. An alternating
    Feistel network adds to one digit, in turn, a keyed hash of the other: each round can be undone,
    so the whole is a bijection. The digits span slightly more than ``num_samples`` values; what
    falls outside is sent through again until it is inside, which keeps it a bijection.

    Positions are asked for in ascending order, or nearly so: indices of the chunk around the last
    few are kept.

    Args:
        num_samples: Samples of the data set, at least 1.
        seed: Seed of the run.
        epoch: Epochs differ in their order.
    """

    def __init__(self, num_samples: int, seed: int, epoch: int) -> None:
        self._num_samples = num_samples
        self._rows = math.isqrt(num_samples - 1) + 1
        self._columns = -(-num_samples // self._rows)
        keys = [derive_seed("permutation", seed, epoch, number) for number in range(_NUM_ROUNDS)]
        self._key_pairs = tuple(zip(keys[::2], keys[1::2], strict=True))
        self._chunks: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, position: int) -> int:
        """Return the sample index; ``IndexError`` outside ``[0, num_samples)``."""
        number, place = divmod(position, _CHUNK)
        if (chunk := self._chunks.get(number)) is None:
            if not 0 <= position < len(self):
                raise IndexError(f"position {position} is outside an epoch of {len(self)}")
            if len(self._chunks) > 3:
                del self._chunks[min(self._chunks)]
            first = number * _CHUNK
            positions = np.arange(first, min(first + _CHUNK, len(self)), dtype=np.uint64)
            values = self._shuffle(positions)
            while (outside := values >= len(self)).any():
                values[outside] = self._shuffle(values[outside])
            chunk = self._chunks[number] = values.tolist()
        return chunk[place]

    def _shuffle(self, values: Any) -> Any:
        """Pass once over ``[0, rows * columns)``, a bijection of it."""
        rows, columns = self._rows, self._columns
        row, column = divmod(values, columns)
        for row_key, column_key in self._key_pairs:
            mixed = (column ^ row_key) * _MIX_1 & _MASK_64
            mixed = (mixed ^ (mixed >> 32)) * _MIX_2 & _MASK_64
            row = (row + (mixed >> 32)) % rows
            mixed = (row ^ column_key) * _MIX_1 & _MASK_64
            mixed = (mixed ^ (mixed >> 32)) * _MIX_2 & _MASK_64
            column = (column + (mixed >> 32)) % columns
        return row * columns + column


class Draws:
    """Indices drawn with replacement; each follows from its position, so they cost no memory.

    Scripts that train for a number of steps ask for as many as 10**10 draws.

    Args:
        num_draws: Positions of an epoch.
        num_samples: Samples of the data set, at least 1.
        seed: Seed of the run.
        epoch: Epochs differ in their draws.
    """

    def __init__(self, num_draws: int, num_samples: int, seed: int, epoch: int) -> None:
        self._num_draws = num_draws
        self._num_samples = num_samples
        self._key = ("draw", seed, epoch)

    def __len__(self) -> int:
        return self._num_draws

    def __getitem__(self, position: int) -> int:
        """Return the sample index; ``IndexError`` outside ``[0, num_draws)``."""
        if not 0 <= position < self._num_draws:
            raise IndexError(f"position {position} is outside an epoch of {self._num_draws}")
        return derive_seed(*self._key, position) % self._num_samples
