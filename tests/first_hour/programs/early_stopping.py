"""Stops when the validation loss has not improved for two epochs, and keeps the best weights."""

import copy

import torch
from torch import nn

from evener import Ddp

torch.manual_seed(0)
x = torch.randn(200, 6)
y = x[:, :1] + 0.5 * torch.randn(200, 1)
train_set = torch.utils.data.TensorDataset(x[:40], y[:40])
valid_set = torch.utils.data.TensorDataset(x[40:], y[40:])
model = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
ddp = Ddp.setup(model, optimizer)
train_loader = ddp.loader(train_set, batch_size=20)
valid_loader = ddp.eval_loader(valid_set, batch_size=32)

best, best_state, bad_epochs = float("inf"), None, 0
for epoch in range(100):
    model.train()
    for features, targets in train_loader.epoch(epoch):
        ddp.backward(nn.functional.mse_loss(model(features), targets))
        ddp.step()
    model.eval()
    total = count = 0
    with torch.no_grad():
        for features, targets in valid_loader:
            total += nn.functional.mse_loss(model(features), targets, reduction="sum").item()
            count += len(features)
    valid_loss = ddp.weighted_mean(total / max(count, 1), weight=count)
    if valid_loss < best:
        best, best_state, bad_epochs = valid_loss, copy.deepcopy(model.state_dict()), 0
    else:
        bad_epochs += 1
        if bad_epochs == 2:
            break
if ddp.is_main_process:
    print(f"stopped in epoch {epoch}")
    torch.save(best_state, "model.pt")
