"""Loops of newcomers that differ from one another only after a usual beginning."""

BEGIN = """\
import torch
from torch import nn
from torch.nn import functional as F

from evener import Ddp

torch.manual_seed(0)
x = torch.randn(512, 4)
dataset = torch.utils.data.TensorDataset(x, x.sum(dim=1, keepdim=True))
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ddp = Ddp.setup(model, optimizer)
loader = ddp.loader(dataset, batch_size=64)
"""

LOOPS = {
    "clips_by_hand": """\
for features, targets in loader.epoch(0):
    ddp.backward(F.mse_loss(model(features), targets))
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    ddp.step()
""",
    "steps_by_hand": """\
for features, targets in loader.epoch(0):
    optimizer.zero_grad()
    ddp.backward(F.mse_loss(model(features), targets))
    optimizer.step()
""",
    "accumulates_by_hand": """\
for i, (features, targets) in enumerate(loader.epoch(0)):
    ddp.backward(F.mse_loss(model(features), targets) / 4)
    if (i + 1) % 4 == 0:
        ddp.step()
""",
    "saves_on_one_rank": """\
for epoch in range(3):
    for features, targets in loader.epoch(epoch):
        ddp.backward(F.mse_loss(model(features), targets))
        ddp.step()
    if ddp.is_main_process:
        ddp.save("checkpoint")
""",
    "stops_on_rank_0": """\
for epoch in range(50):
    for features, targets in loader.epoch(epoch):
        ddp.backward(F.mse_loss(model(features), targets))
        ddp.step()
    if ddp.rank == 0 and F.mse_loss(model(x), dataset.tensors[1]) < 0.1:
        print(f"stopped in epoch {epoch}")
        break
""",
    "trains_for_ever": """\
for epoch in range(1_000_000_000):
    for features, targets in loader.epoch(epoch):
        ddp.backward(F.mse_loss(model(features), targets))
        ddp.step()
    if epoch == 0:
        print(f"rank {ddp.rank} is training", flush=True)
""",
    "saves_when_interrupted": """\
try:
    for epoch in range(1_000_000_000):
        for features, targets in loader.epoch(epoch):
            ddp.backward(F.mse_loss(model(features), targets))
            ddp.step()
        if epoch == 0:
            print(f"rank {ddp.rank} is training", flush=True)
except KeyboardInterrupt:
    print("interrupted", flush=True)
if ddp.rank == 0:
    torch.save(model.state_dict(), "model.pt")
    print("saved")
""",
}
