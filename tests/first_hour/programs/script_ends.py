"""No `with`, no `close()`, no `main()`: the script simply ends."""

import torch
from torch import nn

from evener import Ddp

torch.manual_seed(0)
x = torch.randn(300, 8)
y = x @ torch.randn(8, 1)
dataset = torch.utils.data.TensorDataset(x, y)

model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
ddp = Ddp.setup(model, optimizer)
loader = ddp.loader(dataset, batch_size=32)

for epoch in range(3):
    for features, targets in loader.epoch(epoch):
        loss = nn.functional.mse_loss(model(features), targets)
        ddp.backward(loss)
        ddp.step()

if ddp.is_main_process:
    torch.save(model.state_dict(), "model.pt")
    print("done")
