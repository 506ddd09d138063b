"""The order of an epoch: no list, however long it is."""

from typing import Final

import numpy as np

from evener.data.cursor import Permutation, derive_seed

_CHUNK: Final = 4096


class EpochOrder(Permutation):
    """Gives the same indices as ``Permutation``, many times faster where many are asked for.

    Positions are asked for in ascending order, or nearly so: indices of the chunk around the last
    few are kept.

    Args:
        num_samples: Samples of the data set, at least 1.
        seed: Seed of the run.
        epoch: Epochs differ in their order.
    """

    def __init__(self, num_samples: int, seed: int, epoch: int) -> None:
        super().__init__(num_samples, seed, epoch)
        self._chunks: dict[int, list[int]] = {}

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
            values = self.shuffle(positions)
            while (outside := values >= len(self)).any():
                values[outside] = self.shuffle(values[outside])
            chunk = self._chunks[number] = values.tolist()
        return chunk[place]


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
