"""Asks at the terminal how long to train."""

import torch
from torch import nn

from evener import Ddp

num_epochs = int(input("How many epochs? "))

torch.manual_seed(0)
x = torch.randn(128, 4)
dataset = torch.utils.data.TensorDataset(x, x.sum(dim=1, keepdim=True))
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ddp = Ddp.setup(model, optimizer)
loader = ddp.loader(dataset, batch_size=32)
for epoch in range(num_epochs):
    for features, targets in loader.epoch(epoch):
        ddp.backward(nn.functional.mse_loss(model(features), targets))
        ddp.step()
if ddp.is_main_process:
    torch.save(model.state_dict(), "model.pt")
    print(f"trained for {num_epochs} epochs")
