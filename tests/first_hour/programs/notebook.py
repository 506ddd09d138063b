# %% Cells of a notebook, divided as editors divide them. They run in one process, in this order.
import torch
from torch import nn

from evener import Ddp

# %%
torch.manual_seed(0)
x = torch.randn(200, 4)
dataset = torch.utils.data.TensorDataset(x, x.sum(dim=1, keepdim=True))


# %%
def train(model, num_epochs, lr=0.1):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    with Ddp.setup(model, optimizer) as ddp:
        for epoch in range(num_epochs):
            for features, targets in ddp.loader(dataset, batch_size=40).epoch(epoch):
                ddp.backward(nn.functional.mse_loss(model(features), targets))
                ddp.step()


# %%
model = nn.Linear(4, 1)
train(model, 1)

# %% Once more, with the same model.
train(model, 2, lr=0.05)

# %%
torch.save(model.state_dict(), "model.pt")
