"""`model.eval()` and an evaluation on rank 0 alone, between epochs."""

import torch
from torch import nn

from evener import Ddp

torch.manual_seed(0)
x = torch.randn(300, 4)
y = (x.sum(dim=1) > 0).long()
train_set = torch.utils.data.TensorDataset(x[:240], y[:240])
model = nn.Sequential(nn.Linear(4, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ddp = Ddp.setup(model, optimizer)
loader = ddp.loader(train_set, batch_size=40)
for epoch in range(3):
    for features, labels in loader.epoch(epoch):
        ddp.backward(nn.functional.cross_entropy(model(features), labels))
        ddp.step()
    if ddp.rank == 0:
        model.eval()
        with torch.no_grad():
            right = (model(x[240:]).argmax(dim=1) == y[240:]).sum()
        model.train()
        print(f"epoch {epoch}: {int(right)} of 60 right")
if ddp.rank == 0:
    torch.save(model.state_dict(), "model.pt")
