"""The sharded update gives what one process, and the replicated update, give."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from evener.comm.base import Communicator
from helpers.models import mlp, regression_data
from helpers.teams import run_team, setup

X, Y = (t.double() for t in regression_data(48))
MAKERS: dict[str, Callable[[Any], Optimizer]] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.5),
    "rprop": lambda p: torch.optim.Rprop(p),
}
# Float64: a mean over ranks is rounded otherwise than one over all samples, and 12 updates,
# which divide by roots of small means, magnify that by some orders. Rprop follows signs alone.
NEAR = {"rtol": 1e-9, "atol": 1e-12}


def train(
    comm: Communicator, make: Callable[[Any], Optimizer], mode: str
) -> tuple[list[Tensor], dict[str, Any], dict[str, Any]]:
    """Two epochs; returns parameters, and the optimizer's state in the team and after it."""
    model = mlp().double()
    optimizer = make(model.parameters())
    shares = [4, 3, 1][: comm.world_size]
    with setup(
        comm, model, optimizer, shares=shares, sharded_update=mode, max_grad_norm=0.5
    ) as ddp:
        loader = ddp.loader(TensorDataset(X, Y), batch_size=8, shuffle=False)
        for epoch in range(2):
            for x, y in loader.epoch(epoch):
                ddp.backward(F.mse_loss(model(x), y))
                ddp.step()
        inside = optimizer.state_dict()
    return [p.detach() for p in model.parameters()], inside, optimizer.state_dict()


def same_state(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert mine["param_groups"] == theirs["param_groups"]
    assert list(mine["state"]) == list(theirs["state"])
    for number, state in mine["state"].items():
        assert list(state) == list(theirs["state"][number])
        for name, value in state.items():
            other = theirs["state"][number][name]
            torch.testing.assert_close(value, other, **NEAR)
            assert value is None or value.stride() == other.stride()


@pytest.mark.parametrize("name", MAKERS)
def test_it_equals_one_process_and_the_replicated_update(name: str) -> None:
    make = MAKERS[name]
    ((alone, _, _),) = run_team(1, lambda comm: train(comm, make, "on"))
    replicated, *_ = run_team(3, lambda comm: train(comm, make, "off"))
    ranks = run_team(3, lambda comm: train(comm, make, "on"))
    for parameters, inside, after in ranks:
        for mine, theirs, one in zip(parameters, replicated[0], alone, strict=True):
            torch.testing.assert_close(mine, theirs, **NEAR)
            if name != "rprop":
                torch.testing.assert_close(mine, one, **NEAR)
        same_state(inside, replicated[1])
        same_state(after, replicated[1])
    for parameters, *_ in ranks:
        assert all(map(torch.equal, parameters, ranks[0][0])), "the same bits on all ranks"
