"""Shares: optimal against brute force, and fair between ranks."""

import itertools
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.planning import shares as shares_module
from evener.planning.shares import (
    apportion,
    finish_s,
    in_whole_micro_batches,
    without_ones,
)
from evener.planning.speed import CostModel

fastest_shares = partial(shares_module.fastest_shares, least=0, idle=())

COSTS = st.builds(
    CostModel, fixed_s=st.floats(0, 2), per_sample_s=st.floats(0.01, 1), window_s=st.just(0.0)
)
# Round numbers make exact ties, where rounding in the search would show.
ROUND_COSTS = st.builds(
    CostModel,
    fixed_s=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    per_sample_s=st.sampled_from([0.125, 0.25, 0.5, 1.0]),
    window_s=st.sampled_from([0.0, 0.5]),
)
SIZES = st.one_of(st.none(), st.integers(1, 9))


def all_shares(total, world_size):
    for bars in itertools.combinations(range(total + world_size - 1), world_size - 1):
        edges = (-1, *bars, total + world_size - 1)
        yield tuple(right - left - 1 for left, right in itertools.pairwise(edges))


@given(
    ranks=st.lists(st.tuples(st.one_of(COSTS, ROUND_COSTS), SIZES), min_size=1, max_size=4),
    total=st.integers(0, 18),
    floor=st.integers(0, 2),
)
def test_no_other_shares_finish_earlier(ranks, total, floor):
    costs, sizes = zip(*ranks, strict=True)
    least = floor if floor * len(ranks) <= total else 0
    shares = fastest_shares(total, costs, sizes, least=least)
    assert sum(shares) == total
    assert min(shares) >= least
    best = min(
        finish_s(other, costs, sizes)
        for other in all_shares(total, len(ranks))
        if min(other) >= least
    )
    assert finish_s(shares, costs, sizes) <= best * (1 + 1e-12)


@given(total=st.integers(0, 300), world_size=st.integers(1, 9), size=SIZES)
def test_equal_ranks_get_equal_shares(total, world_size, size):
    cost = CostModel(0.0, 0.1)
    shares = fastest_shares(total, [cost] * world_size, [size] * world_size)
    assert shares == apportion(total, [1.0] * world_size)
    assert max(shares) - min(shares) <= 1
    assert sorted(shares, reverse=True) == list(shares)


def test_by_example():
    slow, fast = CostModel(0.0, 3.0), CostModel(0.0, 1.0)
    assert fastest_shares(32, [fast, slow], [8, 8]) == (24, 8)
    assert fastest_shares(1, [slow, fast], [8, 8]) == (0, 1)
    assert fastest_shares(2, [slow, fast], [8, 8]) == (0, 2)
    assert fastest_shares(0, [slow, fast], [8, 8]) == (0, 0)
    assert fastest_shares(2, [slow, fast], [8, 8], least=1) == (1, 1)
    assert fastest_shares(4, [slow, fast, fast], [8, 8, 8], idle={1}) == (1, 0, 3)
    # A third micro-batch would cost rank 0 ten more seconds than the sample that it is opened for.
    assert fastest_shares(17, [CostModel(10.0, 0.1), fast], [4, 4]) == (4, 13)


# ── without_ones ─────────────────────────────────────────────────────────────────────────────────


@given(
    shares=st.lists(st.integers(0, 6), min_size=1, max_size=5),
    idle=st.sets(st.integers(0, 4), max_size=2),
)
def test_no_rank_gets_one_sample_where_another_can_take_or_give_one(shares, idle):
    shares = [0 if rank in idle else share for rank, share in enumerate(shares)]
    sizes = [None] * len(shares)
    moved = without_ones(shares, sizes, idle)
    assert sum(moved) == sum(shares)
    assert all(moved[rank] == 0 for rank in idle if rank < len(shares))
    active = len(shares) - len([rank for rank in idle if rank < len(shares)])
    if sum(shares) > 1 and active:
        assert 1 not in moved
    if 1 not in shares:
        assert moved == tuple(shares)


@pytest.mark.parametrize(
    ("shares", "sizes", "expected"),
    [
        ((7, 1), (8, 8), (6, 2)),
        ((1, 1), (8, 8), (2, 0)),
        ((3, 5), (2, 8), (4, 4)),  # 3 in micro-batches of 2 would leave one
        ((3, 5), (1, 8), (3, 5)),  # the user wants ones
        ((1,), (8,), (1,)),
    ],
)
def test_micro_batches_of_one_are_avoided(shares, sizes, expected):
    assert without_ones(shares, sizes) == expected


# ── in_whole_micro_batches ───────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("shares", "size", "expected"),
    [
        ((22, 21, 21), 16, (32, 16, 16)),
        ((40, 24), 16, (48, 16)),
        ((0, 30, 0), 8, (0, 30, 0)),
        ((20, 0, 10), 8, (16, 0, 14)),  # what remains comes last, as in one process
        ((2, 3), 8, (0, 5)),
        ((64, 1), 1, (64, 1)),
    ],
)
def test_shares_of_whole_micro_batches(shares, size, expected):
    assert in_whole_micro_batches(shares, size) == expected
