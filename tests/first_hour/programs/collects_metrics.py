"""Collects the loss of every step in a list, and predictions for a metric over all samples."""

import torch
from torch import nn

from evener import Ddp

torch.manual_seed(0)
x = torch.randn(230, 4)
y = (x.sum(dim=1) > 0).long()
train_set = torch.utils.data.TensorDataset(x[:180], y[:180])
valid_set = torch.utils.data.TensorDataset(x[180:], y[180:])
model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
ddp = Ddp.setup(model, optimizer)
train_loader = ddp.loader(train_set, batch_size=36)
losses = []
ddp.on_commit(lambda result: losses.append(result.loss))
for epoch in range(3):
    for features, labels in train_loader.epoch(epoch):
        ddp.backward(nn.functional.cross_entropy(model(features), labels))
        ddp.step()

predictions, labels_seen = [], []
with ddp.evaluating():
    for features, labels in ddp.eval_loader(valid_set, batch_size=8):
        predictions.append(ddp.gather(model(features).argmax(dim=1)))
        labels_seen.append(ddp.gather(labels))
predicted, labels = torch.cat(predictions), torch.cat(labels_seen)
if ddp.is_main_process:
    torch.save(model.state_dict(), "model.pt")
    print(f"{len(losses)} losses, from {losses[0]:.3f} to {losses[-1]:.3f}")
    print(f"{int((predicted == labels).sum())} of {len(labels)} right, {predicted.tolist()}")
