"""What a long run holds in memory does not grow with what it has seen."""

import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

from evener import CollectiveMismatchError
from evener.comm.base import Communicator
from helpers.ranks import Rank, run_ranks
from helpers.teams import setup

MIB = 2**20


def peak_bytes(call: Callable[[], Any]) -> int:
    """Most memory that Python (not torch) holds at a time during a call."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


class Backwards(Sampler[int]):
    """Draws without holding anything."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count - 1, -1, -1))


def test_an_epoch_of_a_sampler_costs_its_indices_of_8_bytes() -> None:
    count = 200_000
    data = TensorDataset(torch.zeros(count, 1))
    model = nn.Linear(1, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with setup(Communicator(), model, sgd) as ddp:
        loader = ddp.loader(DataLoader(data, batch_size=4, sampler=Backwards(count)))
        epoch = loader.epoch(0)
        assert peak_bytes(lambda: next(epoch)) < 2.5 * 8 * count
        epoch.close()


def test_bytes_of_all_ranks_are_no_list_of_numbers() -> None:
    payload = bytes(range(256)) * (MIB // 256)
    comm = Communicator()
    gathered: list[bytes] = []
    peak = peak_bytes(lambda: gathered.extend(comm.all_gather_bytes(payload, what="bytes")))
    assert gathered == [payload]
    assert peak < 4 * MIB


def forget(rank: Rank) -> None:
    with rank.connect() as comm:
        for count in (3000, 4000, *range(5000, 5300)):
            comm.all_reduce(torch.ones(count), what="a sum")
        with pytest.raises(CollectiveMismatchError, match=r"of [34]000 .* of [34]000"):
            comm.all_reduce(torch.ones(3000 + 1000 * rank.rank), what="a sum")


def test_sizes_that_were_exchanged_long_ago_are_forgotten_and_compared_anew() -> None:
    run_ranks(forget, 2)
