"""Averaging gradients: norms, and a part of the optimizer state that ranks cannot divide."""

import math

import pytest
import torch
from torch import nn

from evener.averaging.norms import norm_of
from evener.averaging.sharded_update import ShardedUpdate
from evener.comm.base import Communicator
from evener.comm.flat import FlatBuffers
from helpers.teams import run_team


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_of_a_long_buffer_keeps_its_digits(dtype: torch.dtype) -> None:
    values = torch.randn(2**24 + 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    short = values[: 2**10 + 3]
    exact = math.hypot(values.double().norm().item(), short.double().norm().item())
    # Sums of 2**16 squares in float32, in any order, and one of 2**8 such sums.
    assert norm_of([[values, short]]) == pytest.approx(exact, rel=1e-5)
    values[-1] = math.inf
    assert norm_of([[values]]) == math.inf


def test_a_part_that_ranks_cannot_divide_keeps_its_state() -> None:
    """As when ranks of a team of more than eight are parked: buffers were padded for all of it."""

    def body(comm: Communicator) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(15, 3, bias=False), nn.Linear(3, 5, bias=False))
        model[1].requires_grad_(False)
        optimizer = torch.optim.Adagrad(model.parameters(), initial_accumulator_value=0.25)
        flat = FlatBuffers(list(model.named_parameters()), 2, comm=comm, is_divided=True)
        sharded = ShardedUpdate(flat, [optimizer], is_wanted=True, is_required=False)
        sharded.divide(comm)
        assert sharded.is_on
        model[1].requires_grad_(True)
        flat.attach_grads()
        assert flat.groups[-1].data.numel() % comm.world_size
        assert sharded.state_dict(0, keeps=True)["state"].keys() == {0, 1}
        sharded.join_if_needed([])
        assert not sharded.is_on
        return optimizer.state[model[1].weight]["sum"]

    for found in run_team(3, body):
        assert torch.equal(found, torch.full((5, 3), 0.25))
