"""Dropout of the adapter that draws from a generator of its own, so that replicas are threads."""

import torch
from torch import Tensor, nn


class Draws:
    """Where a replica's random numbers come from.

    torch's default generator belongs to the whole process: replicas in threads would draw from it
    in whatever order they happen to run. Before ``seed`` it is the default one, for a replica that
    has its process to itself.
    """

    def __init__(self) -> None:
        self._generator: torch.Generator | None = None
        self._next: tuple[int, torch.device] | None = None

    def seed(self, seed: int, device: torch.device) -> None:
        """Goes on from ``seed`` with a generator of this replica's own."""
        self._next = seed, device

    @property
    def generator(self) -> torch.Generator | None:
        """What to draw from; made and seeded here, as not every backend of torch has generators."""
        if self._next is not None:
            seed, device = self._next
            self._next = None
            if self._generator is None or self._generator.device != device:
                self._generator = torch.Generator(device)
            self._generator.manual_seed(seed)
        return self._generator


class AdapterDropout(nn.Module):
    """Dropout with a given source of random numbers.

    Args:
        p: Part of the elements that become zero while training.
        draws: The source; shared by all such layers of a replica.
    """

    def __init__(self, p: float, draws: Draws) -> None:
        super().__init__()
        self.p = p
        self.draws = draws

    def forward(self, x: Tensor) -> Tensor:
        """Drops elements and scales up the others, while training."""
        if not self.training or self.p == 0.0:
            return x
        keep = torch.empty_like(x).bernoulli_(1.0 - self.p, generator=self.draws.generator)
        return x * keep.div_(1.0 - self.p)


def own_dropout(network: nn.Module, draws: Draws) -> None:
    """Replaces the dropout of all adapter layers by one that draws from ``draws``."""
    for name, module in network.named_modules():
        if name.endswith(".lora_dropout") and isinstance(module, nn.ModuleDict):
            for adapter, layer in list(module.items()):
                if isinstance(layer, nn.Dropout | AdapterDropout):
                    module[adapter] = AdapterDropout(layer.p, draws)
