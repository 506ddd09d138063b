"""Options on the command line."""

import argparse

import torch
from torch import nn

from evener import Ddp

parser = argparse.ArgumentParser(description="Trains a small network.")
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--hidden", type=int, required=True)
args = parser.parse_args()

torch.manual_seed(0)
x = torch.randn(200, 4)
dataset = torch.utils.data.TensorDataset(x, x.sin().sum(dim=1, keepdim=True))
model = nn.Sequential(nn.Linear(4, args.hidden), nn.ReLU(), nn.Linear(args.hidden, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
ddp = Ddp.setup(model, optimizer)
loader = ddp.loader(dataset, batch_size=50)
for epoch in range(args.epochs):
    for features, targets in loader.epoch(epoch):
        ddp.backward(nn.functional.mse_loss(model(features), targets))
        ddp.step()
if ddp.is_main_process:
    torch.save(model.state_dict(), "model.pt")
    print(args)
