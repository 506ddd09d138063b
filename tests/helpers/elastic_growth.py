"""A run in which a team grows from one rank to two, to four, and shrinks to one again."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from evener import Ddp, WindowResult

BATCH, EPOCHS, COUNT = 8, 3, 64
#: From a window on, how many ranks there are to be while the first one is there.
SIZES = {3: 2, 7: 4}
#: By window, the numbers of those that die with it: nobody of those who began is left.
DEATHS = {12: (0,), 17: (1, 2)}
#: The first positions of all windows.
STARTS = [*range(0, COUNT, BATCH)] * EPOCHS


class Grown(NamedTuple):
    """What a rank has at its end.

    Attributes:
        starts: First positions of the windows that it has seen committed.
        sizes: How many ranks there were at the commit of each.
        samples: How many it was handed.
        state: Of the model.
        loss: The held-out loss.
    """

    starts: list[int]
    sizes: list[int]
    samples: int
    state: list[Tensor]
    loss: float


def make_model(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=0.02)


def samples(seed: int) -> list[tuple[Tensor, Tensor]]:
    inputs = torch.randn(COUNT, 3, generator=torch.Generator().manual_seed(seed))
    return [(x, (x.sum() + x[0] * x[1]).reshape(1)) for x in inputs]


def train(ddp: Ddp, at_commit: Callable[[WindowResult], None] = lambda result: None) -> Grown:
    model, starts, sizes, handed_out = ddp.assembly.model, [], [], 0

    def commit(result: WindowResult) -> None:
        starts.append(result.committed[0])
        sizes.append(len(ddp.assembly.team.members))
        at_commit(result)

    ddp.on_commit(commit)
    loader = ddp.loader(samples(0), batch_size=BATCH, seed=3, micro_batch_size=2)
    for epoch in ddp.epochs(EPOCHS):
        for x, y in loader.epoch(epoch):
            handed_out += len(x)
            ddp.backward(((model(x) - y) ** 2).mean())
            ddp.step()
    with torch.no_grad():
        losses = [float((model(x) - y) ** 2) for x, y in samples(1)]
    state = [tensor.detach().clone() for tensor in model.state_dict().values()]
    return Grown(starts, sizes, handed_out, state, sum(losses) / len(losses))


def check(last: Grown, alone: Grown) -> None:
    """The rank that was there last has the state and the loss of one that was always alone."""
    assert alone.starts == STARTS
    assert last.starts == STARTS[len(STARTS) - len(last.starts) :]
    assert last.samples > 0
    for found, expected in zip(last.state, alone.state, strict=True):
        torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-5)
    assert abs(last.loss - alone.loss) <= 1e-5
