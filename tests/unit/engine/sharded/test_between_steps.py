"""What users do with the model and the optimizer between steps leaves a divided update right."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from evener import Ddp
from evener.comm.base import Communicator
from helpers.models import regression_data, seeded
from helpers.teams import run_team, setup

X, Y = (t.double() for t in regression_data(48))
#: See ``test_same_update``.
NEAR = {"rtol": 1e-9, "atol": 1e-12}


def images() -> nn.Sequential:
    """A model with a parameter that memory formats lay out otherwise."""

    def make() -> nn.Module:
        unflatten = nn.Unflatten(1, (2, 2, 2))
        return nn.Sequential(unflatten, nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(3, 4))

    model = seeded(make, 0, torch.float64)
    assert isinstance(model, nn.Sequential)
    return model


def train(ddp: Ddp, model: nn.Module, epoch: int = 0) -> None:
    for x, y in ddp.loader(TensorDataset(X, Y), batch_size=8, shuffle=False).epoch(epoch):
        ddp.backward(F.mse_loss(model(x), y))
        ddp.step()


def moments(state: dict[str, Any]) -> list[Tensor]:
    return [one["exp_avg"] for one in state["state"].values()]


@pytest.mark.parametrize("loads", [False, True])
def test_another_memory_format_leaves_states_in_order(loads: bool) -> None:
    """The state is read, or given, before the step after which parameters lie as before."""

    def body(comm: Communicator, mode: str) -> tuple[list[Tensor], list[Tensor]]:
        model = images()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        with setup(comm, model, optimizer, shares=[3, 1], sharded_update=mode) as ddp:
            train(ddp, model)
            before = copy.deepcopy(optimizer.state_dict())
            model.to(memory_format=torch.channels_last)
            if loads:
                optimizer.load_state_dict(before)
            for mine, theirs in zip(moments(optimizer.state_dict()), moments(before), strict=True):
                assert torch.equal(mine, theirs)
            train(ddp, model, 1)
        return [p.detach() for p in model.parameters()], moments(optimizer.state_dict())

    replicated, *_ = run_team(2, lambda comm: body(comm, "off"))
    for found in run_team(2, lambda comm: body(comm, "on")):
        torch.testing.assert_close(found, replicated, **NEAR)
