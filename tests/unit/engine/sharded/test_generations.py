"""A divided update while ranks are parked and called back, in fp16, and at the end of the team."""

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import TensorDataset

from evener.comm.base import Communicator
from helpers.limits import PATIENCE_S
from helpers.loops import flatten
from helpers.models import mlp, regression_data
from helpers.teams import Parks, run_team, setup

X, Y = (t.double() for t in regression_data(240))
#: See ``test_states``; more updates.
NEAR = {"rtol": 1e-8, "atol": 1e-11}


def train(
    comm: Communicator, mode: str, misfits: tuple[int, ...]
) -> tuple[Tensor, dict[str, Any], dict[int, bool]]:
    """Weights and optimizer state at the end; by window, whether the update was divided."""
    model = mlp(dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    divided = {}
    with setup(comm, model, optimizer, sharded_update=mode, verify_every=1) as ddp:
        ddp.assembly.engine.lookahead.stale_policy = Parks(ddp, misfits, 10)
        loader = ddp.loader(TensorDataset(X, Y), batch_size=12, shuffle=False)
        for x, y in loader.epoch(0):
            divided[ddp.window] = ddp.assembly.state.sharded.is_on
            ddp.backward(F.mse_loss(model(x), y))
            ddp.step()
        for x, y in loader.epoch(1):
            ddp.backward(F.mse_loss(model(x), y))
            ddp.step()
    return flatten(model), optimizer.state_dict(), divided


@pytest.mark.parametrize(("world_size", "misfits"), [(4, (1,)), (3, (1, 2))])
def test_states_are_divided_anew_among_those_who_are_present(
    world_size: int, misfits: tuple[int, ...]
) -> None:
    replicated = run_team(world_size, lambda comm: train(comm, "off", misfits))
    ranks = run_team(world_size, lambda comm: train(comm, "on", misfits))
    alone = len(misfits) == world_size - 1
    for rank, (own, state, divided) in enumerate(ranks):
        away = set(range(20)) - divided.keys()
        assert bool(away) == (rank in misfits)
        torch.testing.assert_close(own, replicated[rank][0], **NEAR)
        assert torch.equal(own, ranks[0][0])
        for number, values in state["state"].items():
            for name, value in values.items():
                other = replicated[rank][1]["state"][number][name]
                torch.testing.assert_close(value, other, **NEAR)
        lonely = {window for window, is_on in divided.items() if not is_on}
        assert bool(lonely) == (alone and rank not in misfits)


def test_a_rank_that_does_not_come_to_close_costs_the_others_no_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("evener.loop.loop.CLOSING_S", 0.5)

    def body(comm: Communicator) -> None:
        model = mlp(dtype=torch.float64)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        ddp = setup(comm, model, optimizer, shares=[1, 1], sharded_update="on")
        for x, y in ddp.loader(TensorDataset(X, Y), batch_size=24).epoch(0):
            ddp.backward(F.mse_loss(model(x), y))
            ddp.step()
        if comm.rank == 1:
            ddp.close()
            with pytest.raises(Exception, match="the other parts are lost"):
                optimizer.state_dict()
        else:
            closed.wait(PATIENCE_S)
            ddp.close()
        closed.set()

    closed = threading.Event()
    run_team(2, body)
