"""What loops of tests train with: numbered samples, one layer, and steps that can be counted."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from evener import Ddp, WindowResult
from helpers.models import seeded

#: Of ``OneStep``; a power of two, so that sums of steps are exact.
STEP_SIZE = 2.0**-6


class Numbered(Dataset[tuple[int, Tensor]]):
    """Samples of three numbers that know their index."""

    def __init__(self, size: int, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(size, 3, generator=generator).to(dtype)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        return index, self.x[index]


def linear(
    dtype: torch.dtype = torch.float32, *, lr: float = 0.01
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A layer for ``Numbered`` with an optimizer, the same on all ranks."""
    model = seeded(lambda: nn.Linear(3, 1), 0, dtype)
    return model, torch.optim.SGD(model.parameters(), lr=lr)


def step(ddp: Ddp, x: Tensor) -> WindowResult | None:
    ddp.backward(ddp.assembly.model(x).square().mean())
    return ddp.step()


def train(ddp: Ddp, loader: Any, epochs: Iterable[int] = (0,)) -> list[int]:
    """Train; return the samples that this rank has seen."""
    seen: list[int] = []
    for epoch in epochs:
        for ids, x in loader.epoch(epoch):
            seen += ids.tolist()
            step(ddp, x)
    return seen


def flatten(*models: nn.Module) -> Tensor:
    """A copy of all parameters, one after another."""
    return torch.cat([p.detach().flatten() for m in models for p in m.parameters()])


class OneStep(nn.Module):
    """Each step moves the weight by ``-STEP_SIZE``, whatever the batch; a buffer counts steps."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.norm = nn.BatchNorm1d(3, affine=False, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight.sum() + 0.0 * self.norm(x).sum()

    def check(self, windows: Sequence[WindowResult]) -> None:
        """Compare with what windows of local steps must come to.

        A window in which rank r does ``n_r`` steps of equal weight moves the consensus by
        ``-STEP_SIZE * sum(n_r * n_r) / sum(n_r)``. If a step had been lost or counted twice, the
        sum would differ.
        """
        counts = [[record.steps for record in result.ranks] for result in windows]
        moved = -STEP_SIZE * sum(sum(n * n for n in own) / sum(own) for own in counts if sum(own))
        assert abs(self.weight.item() - moved) <= 1e-9 * abs(moved)
        assert int(self.norm.num_batches_tracked) == sum(map(sum, counts))
