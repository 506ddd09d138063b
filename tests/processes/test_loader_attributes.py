"""What scripts read on a ``DataLoader`` can be read on evener's loaders."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, SubsetRandomSampler, TensorDataset

from evener import Ddp
from helpers.ranks import Rank, run_ranks

DATA = TensorDataset(torch.arange(22.0).view(-1, 1))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([torch.zeros(1)])


def collate(samples: list[Any]) -> Any:
    return torch.stack([x for (x,) in samples])


def read(rank: Rank) -> None:
    model = nn.Linear(1, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with Ddp.setup(model, sgd, devices="cpu", quiet=True) as ddp:
        given = DataLoader(DATA, batch_size=4, drop_last=True, collate_fn=collate)
        for loader, steps in ((ddp.loader(given), 5), (ddp.eval_loader(given), 6)):
            assert loader.dataset is DATA
            assert (len(loader), loader.batch_size, loader.num_workers) == (steps, 4, 0)
            assert loader.collate_fn is collate
            assert loader.drop_last == (steps == 5)
            assert not loader.pin_memory
            with pytest.raises(AttributeError, match=r"Leave sampler\.set_epoch"):
                loader.sampler.set_epoch(0)  # type: ignore[attr-defined]
        assert ddp.loader(DATA, batch_size=4, num_workers=0).dataset is DATA
        some = DataLoader(DATA, batch_size=2, sampler=SubsetRandomSampler(range(5)))
        loader = ddp.loader(some)
        assert (loader.dataset, len(loader)) == (DATA, 3)
        rows = [ddp.gather(batch) for (batch,) in ddp.eval_loader(some)]
        assert torch.cat(rows).flatten().tolist() == list(range(5))
        stream = Stream()
        loader = ddp.loader(stream, batch_size=6)
        assert loader.dataset is stream
        assert loader.batch_size == 6 // rank.world_size
        assert loader.collate_fn is torch.utils.data.default_collate


def test_attributes_of_a_data_loader() -> None:
    run_ranks(read, 2)
