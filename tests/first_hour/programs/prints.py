"""Prints on every rank, in the loop and after it."""

import torch
from torch import nn

from evener import Ddp

torch.manual_seed(0)
x = torch.randn(96, 4)
dataset = torch.utils.data.TensorDataset(x, x.sum(dim=1, keepdim=True))
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ddp = Ddp.setup(model, optimizer)
print(f"hello from rank {ddp.rank} of {ddp.world_size}")
loader = ddp.loader(dataset, batch_size=24)
seen = 0
for epoch in range(2):
    for features, targets in loader.epoch(epoch):
        loss = nn.functional.mse_loss(model(features), targets)
        ddp.backward(loss)
        ddp.step()
        seen += len(features)
        print("epoch", epoch, "loss", f"{loss.item():.4f}")
print(f"rank {ddp.rank} has seen {seen} samples", flush=True)
if ddp.is_main_process:
    torch.save(model.state_dict(), "model.pt")
