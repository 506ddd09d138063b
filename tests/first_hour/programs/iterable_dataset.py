"""A stream, which has no `__len__`; each rank reads a part of its own, as evener's message says."""

from itertools import islice

import torch
from torch import nn
from torch.utils.data import IterableDataset

from evener import Ddp


class Stream(IterableDataset):
    """Lines of a file that is too large to be indexed."""

    def __init__(self, part, num_parts):
        self.part, self.num_parts = part, num_parts

    def read(self):
        generator = torch.Generator().manual_seed(1)
        for _ in range(180):
            x = torch.randn(4, generator=generator)
            yield x, x.sum()[None]

    def __iter__(self):
        return islice(self.read(), self.part, None, self.num_parts)


torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ddp = Ddp.setup(model, optimizer)
loader = ddp.loader(Stream(ddp.rank, ddp.world_size), batch_size=18)
for epoch in range(2):
    for features, targets in loader:
        loss = nn.functional.mse_loss(model(features), targets)
        ddp.backward(loss)
        ddp.step()
if ddp.is_main_process:
    torch.save(model.state_dict(), "model.pt")
    print(f"{ddp.window} steps")
