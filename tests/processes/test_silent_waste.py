"""Work that brings nothing is a warning, on standard error, whatever ``quiet`` says."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from evener import Ddp, DdpConfig
from helpers.ranks import Rank, RankTeam

DATA = TensorDataset(torch.randn(24, 3, generator=torch.Generator().manual_seed(1)))


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Any:
        return (x for (x,) in DATA)


def train(rank: Rank, kind: str) -> int:
    torch.manual_seed(0)  # the same on every rank, as scripts do
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # A rank gives a weight only where it has a share: in every window, however fast it is.
    config = DdpConfig(partition_ratios=(1, 1) if kind == "no weight" else None)
    with Ddp.setup(model, optimizer, devices="cpu", config=config, quiet=True) as ddp:
        batches: Any = DataLoader(DATA, batch_size=4, shuffle=True)
        if kind == "parts":
            sampler = DistributedSampler(DATA, rank.world_size, rank.rank)
            batches = DataLoader(DATA, batch_size=4, sampler=sampler)
        elif kind == "stream":
            batches = ddp.loader(Stream(), batch_size=8)
        elif kind in ("weights", "no weight"):
            batches = ddp.loader(DATA, batch_size=4)
        for batch in batches:
            (x,) = batch if isinstance(batch, list) else (batch,)
            weight = 0 if kind == "no weight" and rank.rank == 1 else len(x)
            ddp.backward(model(x).square().mean(), weight=weight)
            ddp.step()
        return ddp.window


def said(kind: str, world_size: int) -> list[str]:
    """The warnings of all ranks, without that about a loop that has no ``ddp.loader``."""
    with RankTeam(train, world_size, kind) as team:
        outcomes = team.wait()
    assert all(outcome.returned for outcome in outcomes), outcomes
    lines = [line for o in outcomes for line in o.output.splitlines()]
    return [line for line in lines if "warning" in line and "Not guaranteed" not in line]


@pytest.mark.parametrize(("kind", "world_size"), [("plain", 2), ("plain", 3), ("stream", 2)])
def test_ranks_that_read_equal_batches_are_told_once(kind: str, world_size: int) -> None:
    (warning,) = said(kind, world_size)
    names = {2: "ranks 0 and 1 had", 3: "ranks 0, 1 and 2 had"}[world_size]
    assert f"warning: {names} the same loss and the same gradient in each of the first 3" in warning
    assert "ddp.loader(dataset, batch_size=...)" in warning


def test_ranks_that_read_parts_of_their_own_are_told_nothing() -> None:
    assert said("parts", 2) == []
    assert said("weights", 2) == []
    assert said("plain", 1) == []


def test_a_rank_whose_weight_is_always_0_is_told() -> None:
    (warning,) = said("no weight", 2)
    assert "rank 1 gave ddp.backward a weight of 0 in each of its first 3 windows" in warning
