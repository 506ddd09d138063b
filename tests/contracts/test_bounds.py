"""What a long run holds in memory does not grow with what it has seen."""

import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

from evener.comm.base import Communicator
from helpers.teams import setup


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
