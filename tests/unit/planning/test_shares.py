"""Shares: optimal against brute force, and fair between ranks."""

import itertools
from functools import partial

import pytest
from hypothesis import given, settings
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

BOUNDED = settings(deadline=None, derandomize=True, max_examples=300, database=None)
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


@BOUNDED
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


@BOUNDED
@given(
    ranks=st.lists(st.tuples(ROUND_COSTS, SIZES), min_size=1, max_size=8),
    total=st.integers(24, 200),
    least=st.integers(0, 3),
)
def test_each_sample_goes_where_it_is_done_first(ranks, total, least):
    """Of equals the lower rank comes first. Nothing is rounded with such costs."""
    costs, sizes = zip(*ranks, strict=True)
    expected = [least] * len(ranks)
    while sum(expected) < total:
        ends = [c.seconds(n + 1, s) for n, c, s in zip(expected, costs, sizes, strict=True)]
        expected[ends.index(min(ends))] += 1
    assert fastest_shares(total, costs, sizes, least=least) == tuple(expected)


@BOUNDED
@given(
    ranks=st.lists(st.tuples(st.one_of(COSTS, ROUND_COSTS), SIZES), min_size=1, max_size=16),
    total=st.integers(0, 10_000),
)
def test_shares_sum_to_the_total_and_cannot_be_bettered_by_one_sample(ranks, total):
    costs, sizes = zip(*ranks, strict=True)
    shares = fastest_shares(total, costs, sizes)
    assert sum(shares) == total
    assert min(shares) >= 0
    assert all(type(share) is int for share in shares)
    finish = finish_s(shares, costs, sizes)
    for share, cost, size in zip(shares, costs, sizes, strict=True):
        # Whoever could do one more within the finish would relieve the last to finish, unless
        # that one is tied with another.
        last = [
            rank
            for rank, (other, c, s) in enumerate(zip(shares, costs, sizes, strict=True))
            if c.seconds(other, s) >= finish * (1 - 1e-12)
        ]
        if len(last) == 1 and total > 0:
            assert cost.seconds(share + 1, size) >= finish * (1 - 1e-9)


@BOUNDED
@given(
    costs=st.lists(st.one_of(COSTS, ROUND_COSTS), min_size=2, max_size=8),
    size=SIZES,
    total=st.integers(0, 500),
)
def test_a_faster_rank_never_gets_less(costs, size, total):
    shares = fastest_shares(total, costs, [size] * len(costs))
    for (mine, cost), (theirs, other) in itertools.permutations(zip(shares, costs, strict=True), 2):
        is_slower = cost.fixed_s > other.fixed_s or cost.window_s > other.window_s
        if not is_slower and cost.per_sample_s < other.per_sample_s:
            assert mine >= theirs


@BOUNDED
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


TEAMS = {
    "8 ranks": [CostModel(0.002 * rank, 0.001 * (rank + 1)) for rank in range(8)],
    "equal": [CostModel(0.002, 0.001)] * 1024,
    "two kinds": [CostModel(0.002, 0.001), CostModel(0.0, 0.005)] * 512,
    "unequal": [CostModel(0.002 * rank, 0.001 * rank) for rank in range(1, 1025)],
}


@pytest.mark.parametrize("costs", TEAMS.values(), ids=TEAMS)
@pytest.mark.parametrize("samples_a_rank", [0.5, 1, 64, 10_000])
@pytest.mark.parametrize("size", [8, None])
def test_what_it_costs_to_find_shares(monkeypatch, costs, samples_a_rank, size):
    """Few deadlines are tried, and few samples handed out one by one: n log n, without a clock."""
    tried = []

    def counted(*arguments):
        tried.append(by_deadline(*arguments))
        return tried[-1]

    by_deadline = shares_module._by_deadline
    monkeypatch.setattr(shares_module, "_by_deadline", counted)
    total = round(samples_a_rank * len(costs))
    assert sum(fastest_shares(total, costs, [size] * len(costs))) == total
    assert len(tried) <= 12
    reached = max((sum(one) for one in tried if sum(one) <= total), default=0)
    assert total - len(costs) <= reached


# ── without_ones ─────────────────────────────────────────────────────────────────────────────────


@BOUNDED
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


def moved_one_by_one(shares, sizes, idle):
    """Each rank with a micro-batch of one asks the others, from the largest share down."""
    result = list(shares)
    active = [rank for rank in range(len(result)) if rank not in idle]
    for rank in active:
        if not shares_module._has_one(result[rank], sizes[rank]):
            continue
        others = sorted((r for r in active if r != rank), key=lambda r: -result[r])
        for other, step in itertools.product(others, (1, -1)):
            mine, theirs = result[rank] + step, result[other] - step
            fits = mine >= 0 and theirs >= 0
            ones = (shares_module._has_one(n, sizes[r]) for n, r in ((mine, rank), (theirs, other)))
            if fits and not any(ones):
                result[rank], result[other] = mine, theirs
                break
    return tuple(result)


@BOUNDED
@given(
    ranks=st.lists(st.tuples(st.integers(0, 12), SIZES), min_size=1, max_size=8),
    idle=st.sets(st.integers(0, 7), max_size=2),
)
def test_no_more_ones_are_left_than_by_asking_everybody(ranks, idle):
    shares = [0 if rank in idle else one for rank, (one, _) in enumerate(ranks)]
    sizes = [size for _, size in ranks]
    moved = without_ones(shares, sizes, idle)
    assert sum(moved) == sum(shares)
    assert min(moved) >= 0
    for rank, (before, after) in enumerate(zip(shares, moved, strict=True)):
        assert after == before or rank not in idle

    def ones(result):
        return sum(map(shares_module._has_one, result, sizes))

    assert ones(moved) <= ones(moved_one_by_one(shares, sizes, idle))


@pytest.mark.parametrize("shares", [[1] * 1000, [9] * 1000, [9, 16] * 500, [3, 4] * 500])
def test_what_it_costs_to_avoid_ones(monkeypatch, shares):
    asked = []

    def counted(share, size):
        asked.append(share)
        return has_one(share, size)

    has_one = shares_module._has_one
    monkeypatch.setattr(shares_module, "_has_one", counted)
    assert sum(without_ones(shares, [8 if max(shares) > 8 else 2] * 1000)) == sum(shares)
    assert len(asked) <= 10 * len(shares)


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
