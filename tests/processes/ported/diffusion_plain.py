"""A denoising diffusion model with an average of its weights, for one process, without evener.

Noise and noise level of a sample follow from its number and the epoch, so that they are the same on
whatever rank it is computed.
"""

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

NUM_SAMPLES, BATCH_SIZE, EPOCHS, LEVELS = 54, 16, 4, 20


class Points(torch.utils.data.Dataset[tuple[Tensor, Tensor, Tensor]]):
    """Points on a spiral, each with noise (8,) and a noise level."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        draws = torch.Generator().manual_seed(index)
        angle = torch.tensor(index / NUM_SAMPLES * 6.3)
        point = torch.stack([(k + 1) / 4 * torch.sin((k + 1) * angle) for k in range(8)])
        return point, torch.randn(8, generator=draws), torch.randint(LEVELS, (), generator=draws)


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.level = nn.Embedding(LEVELS, 8)
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.SiLU(), nn.Linear(32, 8))

    def forward(self, x: Tensor, level: Tensor) -> Tensor:
        return self.layers(x + self.level(level))


class EMA:
    """An average of a model's weights, as diffusion scripts keep it for sampling."""

    def __init__(self, model: nn.Module) -> None:
        self.model = copy.deepcopy(model).requires_grad_(False)
        self.updates = 0

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        self.updates += 1
        decay = min(0.99, (1 + self.updates) / (10 + self.updates))
        for mean, parameter in zip(self.model.parameters(), model.parameters(), strict=True):
            mean.lerp_(parameter, 1 - decay)

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.updates = state["updates"]


@torch.no_grad()
def clamp(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.clamp_(-0.3, 0.3)


def make() -> tuple[Denoiser, torch.optim.Optimizer, EMA]:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = Denoiser()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, EMA(model)


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    point, noise, level = batch
    kept = torch.cos(level / LEVELS * 1.5)[:, None]
    return F.mse_loss(model(kept * point + (1 - kept**2).sqrt() * noise, level), noise)


def results(model: nn.Module, ema: EMA) -> dict[str, Tensor]:
    parts = {"model": model, "ema": ema.model}
    found = {name: nn.utils.parameters_to_vector(p.parameters()) for name, p in parts.items()}
    return {name: vector.detach() for name, vector in found.items()}


def train(orders: Iterable[list[int]]) -> dict[str, Tensor]:
    """Train on the samples in these orders, one for each epoch."""
    model, optimizer, ema = make()
    for order in orders:
        batches = [order[i : i + BATCH_SIZE] for i in range(0, NUM_SAMPLES, BATCH_SIZE)]
        for batch in torch.utils.data.DataLoader(Points(), batch_sampler=batches):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
            clamp(model)
            ema.update(model)
    return results(model, ema)
