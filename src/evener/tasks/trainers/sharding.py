"""Who reads what, where a rank's part is fixed beforehand: batches by number, files by name.

Nothing here follows speed; ``Ddp.loader`` does. These are for loops that bring their own batches,
and for corpora of many files.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from evener.config.checks import whole_number
from evener.errors import ConfigError, DataError

_File = TypeVar("_File", str, Path)


def shard_batches(num_batches: int, rank: int, world_size: int) -> list[int]:
    """Return the batches of one rank: every ``world_size``-th, beginning with its own number.

    The ranks' lists are disjoint and together hold every batch once. Their lengths differ by 1 at
    most; ``DistributedTrainer.train_epoch`` lets a rank that has one fewer go along.

    Args:
        num_batches: Batches in all; 0 or more.
        rank: This rank.
        world_size: Number of ranks.

    Returns:
        Numbers of batches, in rising order.

    Raises:
        ConfigError: A number is not whole, or out of range.
    """
    _check(rank, world_size)
    whole_number("num_batches", num_batches, 0)
    return list(range(rank, num_batches, world_size))


def shard_files(files: Sequence[_File], rank: int, world_size: int) -> list[_File]:
    """Return the files of one rank: in order of their names, every ``world_size``-th.

    The ranks' lists are disjoint and together hold every file once, whatever order the files are
    given in: folders are listed in another order on other machines.

    Args:
        files: The same on every rank; at least one for each.
        rank: This rank.
        world_size: Number of ranks.

    Returns:
        Files, by name.

    Raises:
        ConfigError: ``rank`` or ``world_size`` is out of range.
        DataError: ``files`` is one path alone, a file is named twice, or there are fewer files than
            ranks.
    """
    _check(rank, world_size)
    if isinstance(files, str | Path):
        raise DataError(
            f"files is {str(files)!r}; give a list of files, such as sorted(Path(folder).iterdir())"
        )
    ordered = sorted(files, key=str)
    for before, after in itertools.pairwise(ordered):
        if str(before) == str(after):
            raise DataError(f"{str(before)!r} is among the files twice; name each once")
    if len(ordered) < world_size:
        raise DataError(
            f"{len(ordered)} files for {world_size} ranks: {world_size - len(ordered)} would have "
            "nothing to read; cut the text into more files, or start fewer ranks"
        )
    return ordered[rank::world_size]


def _check(rank: int, world_size: int) -> None:
    whole_number("world_size", world_size, 1)
    if whole_number("rank", rank, 0) >= world_size:
        raise ConfigError(
            f"rank is {rank}, but world_size is {world_size}; ranks count from 0 to world_size - 1"
        )
