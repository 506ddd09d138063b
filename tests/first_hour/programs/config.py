"""A configuration of dataclasses and dictionaries, such as Hydra gives a `main` function."""

import functools
from dataclasses import asdict, dataclass, field

import torch
from torch import nn

from evener import Ddp


@dataclass
class OptimizerConfig:
    name: str = "AdamW"
    options: dict = field(default_factory=lambda: {"lr": 1e-2, "weight_decay": 0.1})


@dataclass
class Config:
    seed: int = 0
    epochs: int = 2
    loader: dict = field(default_factory=lambda: {"batch_size": 30})
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)


def with_config(task):
    @functools.wraps(task)
    def run():
        return task(Config())

    return run


@with_config
def main(config):
    torch.manual_seed(config.seed)
    x = torch.randn(150, 4)
    dataset = torch.utils.data.TensorDataset(x, x.sum(dim=1, keepdim=True))
    model = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 1))
    optimizer_class = getattr(torch.optim, config.optimizer.name)
    optimizer = optimizer_class(model.parameters(), **config.optimizer.options)
    with Ddp.setup(model, optimizer) as ddp:
        loader = ddp.loader(dataset, **config.loader)
        for epoch in range(config.epochs):
            for features, targets in loader.epoch(epoch):
                ddp.backward(nn.functional.mse_loss(model(features), targets))
                ddp.step()
        if ddp.is_main_process:
            torch.save(model.state_dict(), "model.pt")
            print(asdict(config))


if __name__ == "__main__":
    main()
