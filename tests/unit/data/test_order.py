"""The order of an epoch for many positions at once is that of one at a time."""

import pytest

from evener.data.cursor import Permutation
from evener.data.order import EpochOrder


@pytest.mark.parametrize("num_samples", [1, 2, 3, 37, 4096, 4097, 9001])
def test_it_is_the_permutation(num_samples):
    for seed, epoch in ((0, 0), (2**62 + 5, 3)):
        order = EpochOrder(num_samples, seed, epoch)
        permutation = Permutation(num_samples, seed, epoch)
        assert len(order) == num_samples
        assert [order[p] for p in range(num_samples)] == [
            permutation[p] for p in range(num_samples)
        ]


def test_chunks_far_apart_and_backwards():
    order, permutation = EpochOrder(10**9 + 7, 1, 2), Permutation(10**9 + 7, 1, 2)
    places = [0, 10**9 + 6, 5000, 10**6, 4095, 10**8, 1, 10**6 + 1, 10**9]
    assert [order[p] for p in places] == [permutation[p] for p in places]


@pytest.mark.parametrize("position", [-1, 37, 5000])
def test_outside_of_the_epoch(position):
    with pytest.raises(IndexError, match=f"position {position} is outside an epoch of 37"):
        EpochOrder(37, 0, 0)[position]
