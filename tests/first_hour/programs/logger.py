"""An experiment tracker with `init`, `log` and `finish`, as Weights & Biases has them."""

import json

import torch
from torch import nn

from evener import Ddp


class Tracker:
    """Stands for `wandb`: one process may write a run."""

    def __init__(self, project):
        self.file = open(f"{project}.jsonl", "x")

    def log(self, numbers, step):
        self.file.write(json.dumps({"step": step, **numbers}) + "\n")

    def finish(self):
        self.file.close()


torch.manual_seed(0)
x = torch.randn(256, 4)
dataset = torch.utils.data.TensorDataset(x, x.sum(dim=1, keepdim=True))
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ddp = Ddp.setup(model, optimizer)
tracker = Tracker("linear") if ddp.rank == 0 else None
loader = ddp.loader(dataset, batch_size=64)


def log(result):
    if tracker:
        tracker.log({"loss": result.loss, "lr": result.lr}, step=result.window)


ddp.on_commit(log)
for epoch in range(3):
    for features, targets in loader.epoch(epoch):
        ddp.backward(nn.functional.mse_loss(model(features), targets))
        ddp.step()
if tracker:
    tracker.finish()
    torch.save(model.state_dict(), "model.pt")
