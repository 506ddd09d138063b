"""A learning-rate schedule with warm-up, one step per batch."""

import torch
from torch import nn

from evener import Ddp

torch.manual_seed(0)
x = torch.randn(256, 4)
dataset = torch.utils.data.TensorDataset(x, x.sum(dim=1, keepdim=True))
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=24)
ddp = Ddp.setup(model, optimizer, scheduler)
loader = ddp.loader(dataset, batch_size=32)
for epoch in range(3):
    for features, targets in loader.epoch(epoch):
        ddp.backward(nn.functional.mse_loss(model(features), targets))
        ddp.step()
if ddp.is_main_process:
    torch.save(model.state_dict(), "model.pt")
    print(f"last learning rate {scheduler.get_last_lr()[0]:.3e}")
