"""A layer that is unfrozen in the course of an epoch of local steps."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from evener.comm.base import Communicator
from helpers.models import seeded
from helpers.teams import run_team, setup


def frozen_bias(comm: Communicator, policy: str) -> tuple[Any, nn.Module, nn.Parameter]:
    model = seeded(lambda: nn.Linear(1, 1), 0, torch.float32)
    bias = model.get_parameter("bias").requires_grad_(False)
    options = {"anchor": 2, "max_anchor": 2} if policy != "sync" else {}
    ddp = setup(comm, model, torch.optim.SGD(model.parameters(), lr=0.01), policy=policy, **options)
    return ddp, model, bias


@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_a_layer_may_be_unfrozen_where_the_window_reaches_a_number(policy: str) -> None:
    """In the loop's body, in ASYNC also while an exchange is in flight on some ranks."""

    def body(comm: Communicator) -> tuple[list[float], int]:
        ddp, model, bias = frozen_bias(comm, policy)
        before = bias.item()
        data = TensorDataset(torch.arange(400.0).unsqueeze(1) / 400)
        with ddp:
            for (x,) in ddp.loader(data, batch_size=4).epoch(0):
                bias.requires_grad_(ddp.window >= 3)
                ddp.backward(model(x).square().mean())
                ddp.step()
        assert bias.item() != before
        return [p.item() for p in model.parameters()], ddp.progress.samples

    first, *others = run_team(3, body)
    assert others == [first] * 2
    assert first[1] == 400
