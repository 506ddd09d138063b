"""SYNC on unequal ranks gives what one plain process gives on the same global batches.

Tolerances: float32 carries 24 bits, and a sum over the samples of a batch in another order moves
the last ones, so 1e-6 relative to the whole vector is a few roundings; float64 has 53 bits.
AdamW divides by a square root of small numbers in its first steps, which magnifies a rounding,
hence the wider bounds for parameters after 20 steps.
"""

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evener.comm.base import Communicator
from evener.data.order import Permutation
from helpers.teams import run_team, setup

SAMPLES, FEATURES, BATCH = 46, 12, 16
GRADIENT = {torch.float32: 1e-6, torch.float64: 1e-12}
PARAMETER = {torch.float32: 1e-5, torch.float64: 1e-9}


class Ragged(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Regression samples, each of which counts for 0 to 7 units."""

    def __init__(self, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(5)
        self.x = torch.randn(SAMPLES, 7, FEATURES, generator=generator, dtype=torch.float64)
        self.y = torch.randn(SAMPLES, 7, generator=generator, dtype=torch.float64)
        self.x, self.y = self.x.to(dtype), self.y.to(dtype)
        self.units = torch.randint(0, 8, (SAMPLES,), generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        mask = torch.arange(7) < self.units[index]
        return {"x": self.x[index], "y": self.y[index], "mask": mask}


ONE_AT_A_TIME = threading.Lock()
"""Ranks are threads here and share torch's random generator."""


def network(dtype: torch.dtype, seed: int = 0) -> nn.Module:
    with ONE_AT_A_TIME:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(FEATURES, 24), nn.Tanh(), nn.Linear(24, 1)).to(dtype)


def summed_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    error = F.mse_loss(model(batch["x"]).squeeze(-1), batch["y"], reduction="none")
    return (error * batch["mask"]).sum()


def second_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    error = F.l1_loss(model(batch["x"]).squeeze(-1), batch["y"], reduction="none")
    return (error * batch["mask"]).sum() * 0.3


def batch_of(data: Ragged, indices: Sequence[int]) -> dict[str, Tensor]:
    return torch.utils.data.default_collate([data[i] for i in indices])


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.detach().double().reshape(-1) for t in tensors])


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def train_plainly(
    dtype: torch.dtype,
    steps: int,
    *,
    max_grad_norm: float | None,
    losses: Sequence[Callable[[nn.Module, dict[str, Tensor]], Tensor]],
) -> tuple[nn.Module, list[Tensor], list[float]]:
    """The reference: one process, one forward over each global batch, no evener."""
    data, model = Ragged(dtype), network(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    gradients, means = [], []
    epoch = 0
    while len(gradients) < steps:
        order = Permutation(SAMPLES, 3, epoch)
        for start in range(0, SAMPLES, BATCH):
            if len(gradients) == steps:
                break
            batch = batch_of(data, [order[p] for p in range(start, min(start + BATCH, SAMPLES))])
            units = int(batch["mask"].sum())
            optimizer.zero_grad()
            total = sum(loss(model, batch) for loss in losses) / units
            total.backward()
            gradients.append(flatten([p.grad for p in model.parameters()]))
            means.append(float(total.detach()))
            if max_grad_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
            optimizer.step()
            schedule.step()
        epoch += 1
    return model, gradients, means


def train_in_team(
    communicator: Communicator,
    dtype: torch.dtype,
    steps: int,
    shares: Any,
    *,
    max_grad_norm: float | None,
    losses: Sequence[Callable[[nn.Module, dict[str, Tensor]], Tensor]],
    micro_batch_size: int,
) -> tuple[Tensor, list[Tensor], list[float]]:
    data, model = Ragged(dtype), network(dtype, seed=communicator.rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    gradients: list[Tensor] = []
    means: list[float] = []

    def keep_gradient(*_: Any) -> None:
        gradients.append(flatten([p.grad for p in model.parameters()]))

    optimizer.register_step_pre_hook(keep_gradient)
    with setup(
        communicator, model, optimizer, schedule, shares=shares, max_grad_norm=max_grad_norm
    ) as ddp:
        ddp.on_commit(lambda result: means.append(result.loss))
        loader = ddp.loader(
            data, batch_size=BATCH, seed=3, micro_batch_size=micro_batch_size, max_steps=steps
        )
        for epoch in range(-(-steps // len(loader))):
            for batch in loader.epoch(epoch):
                units = int(batch["mask"].sum())
                for loss in losses:
                    ddp.backward(loss(model, batch) / max(units, 1), weight=units)
                ddp.step()
        return flatten(list(model.parameters())), gradients, means


def wandering(window: int, size: int) -> list[int]:
    """Other shares in every window, a rank without one among them."""
    first = random.Random(window).randint(0, size)
    return [first, 0, size - first] if window % 2 else [0, size - first, first]


CASES = [
    pytest.param(1, (1,), id="1 rank"),
    pytest.param(2, (3, 1), id="2 ranks 3:1"),
    pytest.param(3, (5, 2, 1), id="3 ranks 5:2:1"),
    pytest.param(3, wandering, id="3 ranks, other shares each window"),
    pytest.param(3, (4, 0, 1), id="a rank without a share"),
    pytest.param(4, (5, 2, 1, 1), id="4 ranks"),
]


@pytest.mark.usefixtures("exchange")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize(("world_size", "shares"), CASES)
def test_gradients_parameters_and_losses(world_size: int, shares: Any, dtype: torch.dtype) -> None:
    check(world_size, shares, dtype, max_grad_norm=None, losses=[summed_loss])


@pytest.mark.usefixtures("exchange")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_two_losses_on_one_micro_batch(dtype: torch.dtype) -> None:
    check(3, (5, 2, 1), dtype, max_grad_norm=None, losses=[summed_loss, second_loss])


@pytest.mark.usefixtures("exchange")
def test_clipping_acts_on_the_mean() -> None:
    # Double precision: clipping compares norms, and the reference clips with torch's own function.
    model, gradients, _ = train_plainly(torch.float64, 20, max_grad_norm=0.05, losses=[summed_loss])
    assert max(float(g.norm()) for g in gradients) > 0.1
    results = run_team(
        3,
        lambda comm: train_in_team(
            comm,
            torch.float64,
            20,
            (5, 2, 1),
            max_grad_norm=0.05,
            losses=[summed_loss],
            micro_batch_size=4,
        ),
    )
    assert relative(results[0][0], flatten(list(model.parameters()))) <= 1e-9


def check(
    world_size: int, shares: Any, dtype: torch.dtype, *, max_grad_norm: float | None, losses: Any
) -> None:
    steps = 20
    model, gradients, means = train_plainly(
        dtype, steps, max_grad_norm=max_grad_norm, losses=losses
    )
    results = run_team(
        world_size,
        lambda comm: train_in_team(
            comm,
            dtype,
            steps,
            shares,
            max_grad_norm=max_grad_norm,
            losses=losses,
            micro_batch_size=4,
        ),
    )
    expected = flatten(list(model.parameters()))
    for parameters, own_gradients, own_means in results:
        assert len(own_gradients) == steps
        # Later gradients are taken at parameters that differ by the bound for parameters.
        assert relative(own_gradients[0], gradients[0]) <= GRADIENT[dtype]
        assert relative(parameters, expected) <= PARAMETER[dtype]
        assert own_means == pytest.approx(means, rel=1e-5)
        assert torch.equal(parameters, results[0][0])
