"""Shards of batches and files: disjoint, complete, even."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener import ConfigError, DataError, shard_batches, shard_files

WORLDS = st.integers(1, 20)


@given(st.integers(0, 500), WORLDS)
def test_batches_are_dealt_out_once_each_and_evenly(num_batches: int, world_size: int) -> None:
    shards = [shard_batches(num_batches, rank, world_size) for rank in range(world_size)]
    assert sorted(n for shard in shards for n in shard) == list(range(num_batches))
    assert all(shard == sorted(shard) for shard in shards)
    sizes = [len(shard) for shard in shards]
    assert max(sizes) - min(sizes) <= 1


@given(st.sets(st.text("abc/.0", min_size=1), min_size=1, max_size=60), WORLDS, st.randoms())
def test_files_are_dealt_out_once_each_in_whatever_order_they_are_listed(
    names: set[str], world_size: int, draw: object
) -> None:
    world_size = min(world_size, len(names))
    shards = []
    for rank in range(world_size):
        listed = sorted(names)
        draw.shuffle(listed)  # type: ignore[attr-defined]  # another order on every host
        shards.append(shard_files(listed, rank, world_size))
    assert sorted(name for shard in shards for name in shard) == sorted(names)
    assert all(shard for shard in shards)
    sizes = [len(shard) for shard in shards]
    assert max(sizes) - min(sizes) <= 1


def test_paths_stay_paths() -> None:
    assert shard_files([Path("b"), Path("a"), Path("c")], 0, 2) == [Path("a"), Path("c")]


@pytest.mark.parametrize(
    ("rank", "world_size", "said"),
    [
        (2, 2, "rank is 2, but world_size is 2"),
        (-1, 2, "rank is -1"),
        (0, 0, "world_size is 0; give a whole number from 1"),
    ],
)
def test_a_rank_that_is_not_there_is_refused(rank: int, world_size: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        shard_batches(5, rank, world_size)
    with pytest.raises(ConfigError, match=said):
        shard_files(["a", "b", "c"], rank, world_size)


def test_what_cannot_be_dealt_out_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_batches is -1"):
        shard_batches(-1, 0, 1)
    with pytest.raises(DataError, match="2 files for 3 ranks: 1 would have nothing to read"):
        shard_files(["a", "b"], 0, 3)
    with pytest.raises(DataError, match="'a' is among the files twice"):
        shard_files(["a", "b", "a"], 0, 2)
    for path in ("corpus", Path("corpus")):
        with pytest.raises(DataError, match="files is 'corpus'; give a list of files"):
            shard_files(path, 0, 2)  # type: ignore[type-var, arg-type]


@pytest.mark.parametrize("numbers", [(2.5, 0, 1), (4, 0.0, 1), (4, 0, "2"), (None, 0, 1)])
def test_numbers_that_are_not_whole_are_named(numbers):
    with pytest.raises(ConfigError, match="give a whole number"):
        shard_batches(*numbers)
