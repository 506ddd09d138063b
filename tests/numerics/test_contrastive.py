"""Losses that compare the samples of a micro-batch: as one process with that micro-batch size."""

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evener.comm.base import Communicator
from evener.data.order import Permutation
from evener.errors import ConfigError
from helpers.models import seeded
from helpers.teams import run_team, setup

SAMPLES, BATCH, MICRO, EPOCHS = 46, 16, 4, 3
PAIRS = torch.randn(SAMPLES, 2, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def network() -> nn.Module:
    return seeded(lambda: nn.Linear(5, 3), 0, torch.float64)


def contrast(model: nn.Module, pairs: Tensor) -> Tensor:
    """As CLIP: each half of a pair has to find the other one in its micro-batch."""
    one, other = (F.normalize(model(half), dim=-1) for half in pairs.unbind(1))
    logits, labels = one @ other.T / 0.2, torch.arange(len(pairs))
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def flatten(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def train_plainly() -> Tensor:
    """One process that accumulates over micro-batches."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for epoch in range(EPOCHS):
        order = [Permutation(SAMPLES, 0, epoch)[p] for p in range(SAMPLES)]
        for start in range(0, SAMPLES, BATCH):
            window = PAIRS[order[start : start + BATCH]]
            optimizer.zero_grad()
            for pairs in window.split(MICRO):
                (contrast(model, pairs) * len(pairs) / len(window)).backward()
            optimizer.step()
    return flatten(model)


def wandering(window: int, size: int) -> list[int]:
    first = random.Random(window).randint(0, size)
    return [first, 0, size - first] if window % 2 else [0, size - first, first]


@pytest.mark.usefixtures("both_exchanges")
@pytest.mark.parametrize(
    ("world_size", "shares"),
    [(1, (1,)), (2, (3, 2)), (3, (5, 2, 1)), (3, wandering)],
    ids=["1 rank", "2 ranks", "3 ranks", "other shares each window"],
)
def test_whole_micro_batches_are_those_of_one_process(
    world_size: int, shares: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def body(comm: Communicator) -> Tensor:
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with setup(comm, model, optimizer, shares=shares) as ddp:
            loader = ddp.loader(
                PAIRS, batch_size=BATCH, micro_batch_size=MICRO, whole_micro_batches=True
            )
            for epoch in range(EPOCHS):
                for pairs in loader.epoch(epoch):
                    ddp.backward(contrast(model, pairs))
                    ddp.step()
        return flatten(model)

    expected = train_plainly()
    for ours in run_team(world_size, body):
        assert float((ours - expected).norm() / expected.norm()) <= 1e-12
    assert "warning" not in capsys.readouterr().err  # the division by 2 belongs to the loss


def test_whole_micro_batches_need_a_size() -> None:
    model = network()
    with (
        setup(Communicator(), model, torch.optim.SGD(model.parameters(), lr=0.1)) as ddp,
        pytest.raises(ConfigError, match=r"micro_batch_size is 'auto'; give a whole number"),
    ):
        ddp.loader(PAIRS, batch_size=BATCH, whole_micro_batches=True)
