"""Refuses ranks that would draw other samples: their shares would not make one epoch."""

from collections.abc import Mapping, Sequence

from evener.data.cursor import Cursor
from evener.errors import UsageError

#: Numbers in what a rank says of its data.
DATA_LENGTH = 3


def data_row(cursor: Cursor, batch_size: int) -> list[float]:
    """What must be the same on every rank: samples, ``batch_size`` and seed."""
    return [float(cursor.num_samples), float(batch_size), float(cursor.seed % 2**53)]


def refuse_other_data(own_rank: int, said: Mapping[int, Sequence[float]]) -> None:
    """Compares what ranks say of their data.

    Args:
        own_rank: This rank.
        said: ``data_row`` of each rank that takes part, this one included.

    Raises:
        UsageError: Names the first rank that differs from this one, and both data sets.
    """
    own = [*said[own_rank]]
    for rank, other in said.items():
        if [*other] != own:
            raise UsageError(
                f"rank {rank} trains on {_in_words(other)}, rank {own_rank} on {_in_words(own)}; "
                "give every rank the same data set, batch_size and seed"
            )


def _in_words(row: Sequence[float]) -> str:
    num_samples, batch_size, seed = (int(number) for number in row)
    return f"{num_samples} samples with batch_size {batch_size} and seed {seed}"
