"""Mixed precision: the user's own bf16 autocast around forward and loss."""

import torch
from torch import nn

from evener import Ddp

torch.manual_seed(0)
x = torch.randn(256, 8)
dataset = torch.utils.data.TensorDataset(x, x.sum(dim=1, keepdim=True))
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
ddp = Ddp.setup(model, optimizer)
loader = ddp.loader(dataset, batch_size=64)
for epoch in range(3):
    for features, targets in loader.epoch(epoch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.mse_loss(model(features), targets)
        ddp.backward(loss)
        ddp.step()
if ddp.is_main_process:
    torch.save(model.state_dict(), "model.pt")
