"""`sys.exit()` in the loop of batches, after three steps."""

import sys

import torch
from torch import nn

from evener import Ddp

torch.manual_seed(0)
x = torch.randn(256, 4)
dataset = torch.utils.data.TensorDataset(x, x.sum(dim=1, keepdim=True))
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ddp = Ddp.setup(model, optimizer)
loader = ddp.loader(dataset, batch_size=64)
for epoch in range(100):
    for features, targets in loader.epoch(epoch):
        ddp.backward(nn.functional.mse_loss(model(features), targets))
        ddp.step()
        if ddp.window == 3:
            if ddp.is_main_process:
                torch.save(model.state_dict(), "model.pt")
                print("three steps are enough")
            sys.exit()
