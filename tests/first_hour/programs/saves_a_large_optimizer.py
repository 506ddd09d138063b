"""`optimizer.state_dict()` on rank 0, of a model that is large enough for a sharded update."""

import torch
from torch import nn

from evener import Ddp

torch.manual_seed(0)
x = torch.randn(64, 8)
dataset = torch.utils.data.TensorDataset(x, x.sum(dim=1, keepdim=True))
model = nn.Sequential(nn.Linear(8, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.Linear(1024, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
ddp = Ddp.setup(model, optimizer)
loader = ddp.loader(dataset, batch_size=32)
for epoch in range(2):
    for features, targets in loader.epoch(epoch):
        ddp.backward(nn.functional.mse_loss(model(features), targets))
        ddp.step()
    if ddp.rank == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "last.pt")
