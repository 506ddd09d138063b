"""Clips gradients, as docs/porting.md says."""

import torch
from torch import nn

from evener import Ddp, DdpConfig

torch.manual_seed(0)
x = torch.randn(256, 4)
dataset = torch.utils.data.TensorDataset(x, 10 * x.sum(dim=1, keepdim=True))
model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ddp = Ddp.setup(model, optimizer, config=DdpConfig(max_grad_norm=1.0))
loader = ddp.loader(dataset, batch_size=64)
for epoch in range(3):
    for features, targets in loader.epoch(epoch):
        ddp.backward(nn.functional.mse_loss(model(features), targets))
        ddp.step()
if ddp.is_main_process:
    torch.save(model.state_dict(), "model.pt")
