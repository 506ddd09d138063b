"""Gradient accumulation: a batch of 64 in pieces of 8."""

import torch
from torch import nn

from evener import Ddp

torch.manual_seed(0)
x = torch.randn(250, 4)
dataset = torch.utils.data.TensorDataset(x, x.sum(dim=1, keepdim=True))
model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
ddp = Ddp.setup(model, optimizer)
loader = ddp.loader(dataset, batch_size=64, micro_batch_size=8)
steps = 0
for epoch in range(2):
    for features, targets in loader.epoch(epoch):
        ddp.backward(nn.functional.mse_loss(model(features), targets))
        if ddp.step():
            steps += 1
if ddp.is_main_process:
    torch.save(model.state_dict(), "model.pt")
    print(f"{ddp.window} steps")
