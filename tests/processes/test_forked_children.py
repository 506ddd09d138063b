"""Forked children of a rank: they keep none of its connections open, and disturb nothing."""

import os
import signal
import time
from contextlib import suppress

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from evener import Ddp, DdpConfig
from evener.errors import PeerLostError
from helpers.ranks import Rank, RankTeam

NOTICED_S = 0.5
SAMPLES = 48


class Unpicklable:
    """Workers can be given it only by a fork."""

    def __init__(self) -> None:
        self.read = lambda index: torch.full((3,), float(index))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.read(index)


def join(rank: Rank, policy: str = "sync") -> tuple[Ddp, nn.Module]:
    model = nn.Linear(3, 40_000)
    config = DdpConfig(quiet=True, partition_ratios=(1.0,) * rank.world_size)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    return Ddp.setup(model, optimizer, policy=policy, devices="cpu", config=config), model


def lose_a_rank(rank: Rank, victim: int) -> tuple[float, str]:
    """Trains with workers of evener's and of the user's own, until one rank is killed."""
    own = DataLoader(
        TensorDataset(torch.arange(8.0)), num_workers=2, multiprocessing_context="fork"
    )
    ddp, model = join(rank)
    loader = ddp.loader(Unpicklable(), batch_size=6, num_workers=2)
    mine = iter(own)  # live workers until the end

    def die() -> None:
        next(mine)
        rank.send(time.monotonic())
        os.kill(os.getpid(), signal.SIGKILL)

    def train() -> None:
        for epoch in range(1000):
            for batch in loader.epoch(epoch):
                if rank.rank == victim and ddp.window >= 3:
                    die()
                ddp.backward(model(batch).mean())
                ddp.step()

    with pytest.raises(PeerLostError) as lost:
        train()
    noticed = time.monotonic()
    with suppress(PeerLostError):  # it would settle with the others
        ddp.close()
    return noticed, str(lost.value)


@pytest.mark.parametrize("victim", [0, 1])  # rank 0 serves the store
def test_a_death_is_noticed_at_once_although_its_workers_live_on(victim: int) -> None:
    with RankTeam(lose_a_rank, 3, victim) as team:
        died = team.receive(victim)
        outcomes = team.wait()
    assert outcomes[victim].died_of is signal.SIGKILL
    for outcome in outcomes:
        print(outcome.story())
        if outcome.rank != victim:
            noticed, message = outcome.value
            print(f"rank {outcome.rank} noticed after {noticed - died:.3f} s: {message}")
            assert noticed - died <= NOTICED_S
