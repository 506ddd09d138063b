"""A bug in the loop: one sample is broken."""

import torch
from torch import nn

from evener import Ddp


def check(targets):
    if targets.isnan().any():
        raise ValueError("a target is missing")


torch.manual_seed(0)
x = torch.randn(100, 4)
y = x.sum(dim=1, keepdim=True)
y[37] = float("nan")
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ddp = Ddp.setup(model, optimizer)
loader = ddp.loader(torch.utils.data.TensorDataset(x, y), batch_size=20)

for epoch in range(2):
    for features, targets in loader.epoch(epoch):
        check(targets)
        loss = nn.functional.mse_loss(model(features), targets)
        ddp.backward(loss)
        ddp.step()
