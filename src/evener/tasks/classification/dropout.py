"""Dropout of the adapter that may use a separate generator, since replicas are threads."""

import torch
from torch import Tensor, nn


class AdapterDropout(nn.Module):
    """Dropout that draws from torch's default generator until ``draw_from`` gives it another.

    The default generator belongs to the whole process: replicas in threads would draw from it in
    an undefined order.

    Args:
        p: Fraction of the elements that become zero in training.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        self._generator: torch.Generator | None = None

    def draw_from(self, generator: torch.Generator) -> None:
        """Draw from ``generator`` from now on; layers of one replica may share it."""
        self._generator = generator

    def forward(self, x: Tensor) -> Tensor:
        """Drop elements and scale the others up, in training."""
        if not self.training or self.p == 0.0:
            return x
        keep = torch.empty_like(x).bernoulli_(1.0 - self.p, generator=self._generator)
        return x * keep.div_(1.0 - self.p)


def own_dropout(network: nn.Module) -> list[AdapterDropout]:
    """Replace the dropout of all adapter layers by ``AdapterDropout``; return the new layers."""
    layers: list[AdapterDropout] = []
    for name, module in network.named_modules():
        if name.endswith(".lora_dropout") and isinstance(module, nn.ModuleDict):
            for adapter, layer in list(module.items()):
                if isinstance(layer, nn.Dropout | AdapterDropout):
                    layers.append(AdapterDropout(layer.p))
                    module[adapter] = layers[-1]
    return layers
