"""`torch.save` on rank 0 after each epoch; started again, it resumes from there."""

import os

import torch
from torch import nn

from evener import Ddp

EPOCHS = int(os.environ.get("EPOCHS", "4"))

torch.manual_seed(0)
x = torch.randn(240, 4)
dataset = torch.utils.data.TensorDataset(x, x.sum(dim=1, keepdim=True))
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
first = 0
if os.path.exists("checkpoint.pt"):
    checkpoint = torch.load("checkpoint.pt")
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    first = checkpoint["epoch"] + 1

ddp = Ddp.setup(model, optimizer)
loader = ddp.loader(dataset, batch_size=48)
for epoch in range(first, EPOCHS):
    for features, targets in loader.epoch(epoch):
        ddp.backward(nn.functional.mse_loss(model(features), targets))
        ddp.step()
    if ddp.rank == 0:
        checkpoint = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "epoch": epoch,
        }
        torch.save(checkpoint, "checkpoint.pt")
if ddp.rank == 0:
    torch.save(model.state_dict(), "model.pt")
