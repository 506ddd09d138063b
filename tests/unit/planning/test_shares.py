"""Shares: optimal against brute force, and fair between ranks."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evener.errors import ConfigError
from evener.planning import shares as shares_module
from evener.planning.shares import (
    equal_shares,
    fastest_shares,
    finish_s,
    without_ones,
    worth_keeping,
)
from evener.planning.speed import CostModel

BOUNDED = settings(deadline=None, derandomize=True, max_examples=300, database=None)
COSTS = st.builds(CostModel, fixed_s=st.floats(0, 2), per_sample_s=st.floats(0.01, 1))
# Round numbers make exact ties, where rounding in the search would show.
ROUND_COSTS = st.builds(
    CostModel,
    fixed_s=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    per_sample_s=st.sampled_from([0.125, 0.25, 0.5, 1.0]),
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
    least = [floor if floor * len(ranks) <= total else 0] * len(ranks)
    shares = fastest_shares(total, costs, sizes, least)
    assert sum(shares) == total
    assert all(share >= bound for share, bound in zip(shares, least, strict=True))
    best = min(
        finish_s(other, costs, sizes)
        for other in all_shares(total, len(ranks))
        if all(share >= bound for share, bound in zip(other, least, strict=True))
    )
    assert finish_s(shares, costs, sizes) <= best * (1 + 1e-12)


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
        if cost.fixed_s <= other.fixed_s and cost.per_sample_s < other.per_sample_s:
            assert mine >= theirs


@BOUNDED
@given(total=st.integers(0, 300), world_size=st.integers(1, 9), size=SIZES)
def test_equal_ranks_get_equal_shares(total, world_size, size):
    cost = CostModel(0.0, 0.1)
    shares = fastest_shares(total, [cost] * world_size, [size] * world_size)
    assert shares == equal_shares(total, world_size)
    assert max(shares) - min(shares) <= 1
    assert sorted(shares, reverse=True) == list(shares)


def test_by_example():
    slow, fast = CostModel(0.0, 3.0), CostModel(0.0, 1.0)
    assert fastest_shares(32, [fast, slow], [8, 8]) == (24, 8)
    assert fastest_shares(1, [slow, fast], [8, 8]) == (0, 1)
    assert fastest_shares(2, [slow, fast], [8, 8]) == (0, 2)
    assert fastest_shares(0, [slow, fast], [8, 8]) == (0, 0)
    assert fastest_shares(2, [slow, fast], [8, 8], [1, 1]) == (1, 1)
    # A third micro-batch would cost rank 0 ten more seconds than the sample that it is opened for.
    assert fastest_shares(17, [CostModel(10.0, 0.1), fast], [4, 4]) == (4, 13)


def test_the_least_shares_must_fit():
    with pytest.raises(ConfigError, match=r"\[2, 2\] do not fit into 3 samples"):
        fastest_shares(3, [CostModel(0, 1)] * 2, [None, None], [2, 2])


@pytest.mark.parametrize("total", [8, 512, 100_000])
def test_few_deadlines_are_tried(monkeypatch, total):
    # What planning a window costs, without a clock: about 0.1 ms for 8 ranks.
    tried = []

    def counted(ranks, most, deadline_s):
        tried.append(deadline_s)
        return by_deadline(ranks, most, deadline_s)

    by_deadline = shares_module._by_deadline
    monkeypatch.setattr(shares_module, "_by_deadline", counted)
    costs = [CostModel(0.002 * rank, 0.001 * (rank + 1)) for rank in range(8)]
    shares = fastest_shares(total, costs, [8] * 8)
    assert sum(shares) == total
    assert len(tried) <= 30


# ── worth_keeping ────────────────────────────────────────────────────────────────────────────────

FAST, SLOW, USELESS = CostModel(0.001, 0.01), CostModel(0.003, 0.03), CostModel(0.1, 1.0)


def test_a_rank_that_costs_more_than_it_brings_is_left_out():
    assert worth_keeping(32, [FAST, USELESS], [8, 8], 0.1) == (True, False)
    assert worth_keeping(32, [USELESS, FAST], [8, 8], 0.1) == (False, True)


def test_a_slow_rank_that_helps_is_kept():
    assert worth_keeping(32, [FAST, SLOW], [8, 8], 0.01) == (True, True)
    assert worth_keeping(32, [SLOW, FAST], [8, 8], 0.0) == (True, True)
    assert worth_keeping(32, [FAST, SLOW], [8, 8], 10.0) == (True, False)


def test_among_three():
    assert worth_keeping(64, [SLOW, FAST, SLOW], [8, 8, 8], 0.02) == (True, True, True)
    assert worth_keeping(64, [SLOW, FAST, SLOW], [8, 8, 8], 10.0) == (False, True, False)
    assert worth_keeping(64, [FAST], [8], 10.0) == (True,)


def test_a_choice_stays_within_five_percent():
    # Alone 1.0 s; together 0.5 s and the exchange.
    costs, sizes = [CostModel(0.0, 0.01)] * 2, [None, None]
    for exchange_s, kept, expected in [
        (0.49, (True, True), (True, True)),
        (0.51, (True, True), (True, True)),
        (0.60, (True, True), (True, False)),
        (0.49, (True, False), (True, False)),
        (0.40, (True, False), (True, True)),
        (0.40, (False, True), (True, True)),
        (0.60, (False, True), (False, True)),
        (0.60, (False, False), (True, False)),
    ]:
        assert worth_keeping(100, costs, sizes, exchange_s, kept) == expected


@BOUNDED
@given(
    ranks=st.lists(st.tuples(COSTS, SIZES), min_size=1, max_size=5),
    total=st.integers(1, 200),
    exchange_s=st.floats(0, 20),
)
def test_never_predicted_slower_than_the_fastest_rank_alone(ranks, total, exchange_s):
    costs, sizes = zip(*ranks, strict=True)
    kept = worth_keeping(total, costs, sizes, exchange_s)
    chosen = [rank for rank in range(len(ranks)) if kept[rank]]
    assert chosen
    chosen_costs, chosen_sizes = [costs[r] for r in chosen], [sizes[r] for r in chosen]
    shares = fastest_shares(total, chosen_costs, chosen_sizes)
    window_s = finish_s(shares, chosen_costs, chosen_sizes) + exchange_s * (len(chosen) > 1)
    alone_s = min(cost.seconds(total, size) for cost, size in ranks)
    assert window_s <= alone_s / 0.95 * (1 + 1e-9)


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
    ("shares", "sizes", "min_share", "expected"),
    [
        ((7, 1), (8, 8), 0, (6, 2)),
        ((7, 1), (8, 8), 1, (6, 2)),
        ((1, 1), (8, 8), 0, (2, 0)),
        ((1, 1), (8, 8), 1, (1, 1)),
        ((3, 5), (2, 8), 0, (4, 4)),  # 3 in micro-batches of 2 would leave one
        ((3, 5), (1, 8), 0, (3, 5)),  # the user wants ones
        ((1,), (8,), 0, (1,)),
    ],
)
def test_micro_batches_of_one_are_avoided(shares, sizes, min_share, expected):
    assert without_ones(shares, sizes, min_share=min_share) == expected
