"""Functions, and `if __name__ == "__main__"`; worker processes load the data."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from evener import Ddp


class Points(Dataset):
    def __init__(self, count):
        generator = torch.Generator().manual_seed(1)
        self.points = torch.randn(count, 2, generator=generator)

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        point = self.points[index]
        return point, int(point.norm() > 1)


def build_model():
    return nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))


def train(num_epochs=2):
    torch.manual_seed(0)
    model = build_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    ddp = Ddp.setup(model, optimizer)
    loader = ddp.loader(Points(200), batch_size=20, num_workers=2)
    for epoch in range(num_epochs):
        for points, labels in loader.epoch(epoch):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(points), labels)
            ddp.backward(loss)
            ddp.step()
    if ddp.is_main_process:
        torch.save(model.state_dict(), "model.pt")


if __name__ == "__main__":
    train()
