# %% Cells of a notebook, divided as editors divide them. They run in one process, in this order.
import torch
from torch import nn

from evener import Ddp

# %% data and model
torch.manual_seed(0)
x = torch.randn(200, 4)
dataset = torch.utils.data.TensorDataset(x, x.sum(dim=1, keepdim=True))
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

# %% setup
ddp = Ddp.setup(model, optimizer)
loader = ddp.loader(dataset, batch_size=40)

# %% fails: a typo
for epoch in range(3):
    for features, targets in loader.epoch(epoch):
        ddp.backward(nn.functional.mse_loss(model(feature), targets))  # noqa: F821
        ddp.step()

# %% without the typo
for epoch in range(3):
    for features, targets in loader.epoch(epoch):
        ddp.backward(nn.functional.mse_loss(model(features), targets))
        ddp.step()

# %% two epochs more
for epoch in range(3, 5):
    for features, targets in loader.epoch(epoch):
        ddp.backward(nn.functional.mse_loss(model(features), targets))
        ddp.step()
