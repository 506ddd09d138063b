"""Gradient accumulation by hand: a step after every fourth batch."""

import torch
from torch import nn

from evener import Ddp

torch.manual_seed(0)
x = torch.randn(256, 4)
dataset = torch.utils.data.TensorDataset(x, x.sum(dim=1, keepdim=True))
model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ddp = Ddp.setup(model, optimizer)
loader = ddp.loader(dataset, batch_size=16)
for i, (features, targets) in enumerate(loader.epoch(0)):
    ddp.backward(nn.functional.mse_loss(model(features), targets) / 4)
    if (i + 1) % 4 == 0:
        ddp.step()
