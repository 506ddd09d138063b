"""Clips gradients by hand between backward and step, as in a plain loop."""

import torch
from torch import nn

from evener import Ddp

torch.manual_seed(0)
x = torch.randn(256, 4)
dataset = torch.utils.data.TensorDataset(x, 10 * x.sum(dim=1, keepdim=True))
model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ddp = Ddp.setup(model, optimizer)
loader = ddp.loader(dataset, batch_size=64)
for features, targets in loader.epoch(0):
    ddp.backward(nn.functional.mse_loss(model(features), targets))
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    ddp.step()
