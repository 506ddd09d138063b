"""The order of an epoch is a shuffle that costs no memory."""

import itertools
import tracemalloc
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.data.order import Permutation


def indices(order: Permutation, ranges: Iterable[range]) -> list[int]:
    return [order[position] for part in ranges for position in part]


@given(num_samples=st.integers(1, 3000), seed=st.integers(), epoch=st.integers(0, 10**6))
def test_permutation_is_a_bijection_for_any_seed(num_samples, seed, epoch):
    order = Permutation(num_samples, seed, epoch)
    assert sorted(map(order.__getitem__, range(num_samples))) == list(range(num_samples))


def test_permutation_holds_no_list():
    tracemalloc.start()
    try:
        order = Permutation(10**9, seed=0, epoch=0)
        indices(order, [range(100), range(10**9 - 100, 10**9)])
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 2**20


def test_permutation_is_the_same_everywhere_and_for_ever():
    # Checkpoints rely on it: another order would repeat and miss samples after a resume.
    order = indices(Permutation(10, seed=0, epoch=0), [range(10)])
    assert order == [9, 1, 6, 2, 5, 3, 4, 8, 0, 7]
    order = indices(Permutation(7, seed=1, epoch=3), [range(7)])
    assert order == [5, 3, 6, 0, 4, 1, 2]
    order = indices(Permutation(10**9, seed=42, epoch=5), [range(3), range(10**9 - 2, 10**9)])
    assert order == [345205008, 454387685, 674016042, 607247561, 243067759]


def test_epochs_and_seeds_differ():
    orders = [
        tuple(indices(Permutation(50, seed, epoch), [range(50)]))
        for seed, epoch in itertools.product(range(5), range(20))
    ]
    assert len(set(orders)) == 100


@pytest.mark.parametrize("num_samples", [5, 16])
def test_every_sample_is_as_likely_everywhere(num_samples):
    # Pearson's statistic over 1000 seeds; its standard deviation is sqrt(2 * freedom), so five of
    # them are passed by chance once in millions of tries, and the test is deterministic anyway.
    num_seeds = 1000
    counts = [[0] * num_samples for _ in range(num_samples)]
    steps = [0] * num_samples
    for seed in range(num_seeds):
        order = indices(Permutation(num_samples, seed, 0), [range(num_samples)])
        for position, index in enumerate(order):
            counts[position][index] += 1
        for before, after in itertools.pairwise(order):
            steps[(after - before) % num_samples] += 1
    expected = num_seeds / num_samples
    statistic = sum((count - expected) ** 2 / expected for row in counts for count in row)
    freedom = (num_samples - 1) ** 2
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5
    statistic = sum((count - num_seeds) ** 2 / num_seeds for count in steps[1:])
    freedom = num_samples - 2
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("position", [-1, 5, 5000, 10**30])
def test_position_outside_the_epoch(position):
    with pytest.raises(IndexError, match="outside an epoch of 5"):
        Permutation(5, 0, 0)[position]
