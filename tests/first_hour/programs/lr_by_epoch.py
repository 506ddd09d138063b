"""A scheduler that the loop steps by hand after each epoch, as in a plain script."""

import torch
from torch import nn

from evener import Ddp

torch.manual_seed(0)
x = torch.randn(256, 4)
dataset = torch.utils.data.TensorDataset(x, x.sum(dim=1, keepdim=True))
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
ddp = Ddp.setup(model, optimizer)
loader = ddp.loader(dataset, batch_size=32)
for epoch in range(3):
    for features, targets in loader.epoch(epoch):
        ddp.backward(nn.functional.mse_loss(model(features), targets))
        ddp.step()
    scheduler.step()
    if ddp.rank == 0:
        print(f"epoch {epoch}: next learning rate {scheduler.get_last_lr()[0]}")
if ddp.rank == 0:
    torch.save(model.state_dict(), "model.pt")
