"""Gradients travel during backward, and a rank dies, raises or simply ends meanwhile."""

import signal
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evener import Ddp, DdpConfig, PeerLostError
from evener.protocol.formation import Deadlines
from helpers.coordinators import serving
from helpers.elastic_ranks import WINDOWS, come_late, die_at, set_up, train
from helpers.limits import PATIENCE_S
from helpers.ranks import Rank, RankTeam, run_ranks_to_end


def train_elastic(rank: Rank, address: str, point: str) -> Any:
    pids, what = rank.receive(), "gradients of window 2, piece"
    if rank.rank == 1:
        die_at(point, what)
    elif rank.rank == 0 and point == "inside":
        come_late(what, pids[1])
    ddp, model = set_up(rank, address, "1:3", overlap="on")
    with ddp:
        return train(ddp, model, lambda result: None)


@pytest.mark.parametrize("point", ["before", "inside", "after"])
def test_a_member_dies_while_pieces_travel_and_the_others_redo_the_window(point: str) -> None:
    with (
        serving(1, 3, Deadlines(gather_s=60.0)) as address,
        RankTeam(train_elastic, 3, address, point) as team,
    ):
        for rank in range(3):
            team.send(rank, team.pids)
        outcomes = team.wait()
    told = [outcome.story() for outcome in outcomes]
    assert [o.died_of for o in outcomes if not o.returned] == [signal.SIGKILL], told
    (windows, state), *others = [outcome.value for outcome in outcomes if outcome.returned]
    assert windows == WINDOWS
    assert others == [(windows, state)]


class Raises(torch.autograd.Function):
    """The identity, whose backward raises if it is told to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, error: BaseException | None) -> Tensor:
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if ctx.error is not None:
            raise ctx.error
        return grads[0], None


def train_until_an_error(rank: Rank, how: str) -> str:
    """Rank 1's third backward raises, or its script ends there, when its last layer has left."""
    first, last = nn.Linear(3, 3), nn.Linear(3, 3)
    model = nn.Sequential(first, last)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    config = DdpConfig(overlap="on", quiet=True, timeout_s=PATIENCE_S)
    ddp = Ddp.setup(model, optimizer, devices="cpu", config=config)
    started_s = 0.0
    try:
        for x in ddp.loader([torch.ones(3)] * 60, batch_size=12):
            is_last = ddp.window == 3
            started_s = time.monotonic()
            error = KeyError("of the user") if is_last and rank.rank == 1 else None
            ddp.backward(last(Raises.apply(first(x), error)).mean())
            ddp.step()
    except PeerLostError as lost:
        assert time.monotonic() - started_s < PATIENCE_S / 4
        return str(lost)
    except KeyError:
        if how == "raises":
            raise
    return "ended"


@pytest.mark.parametrize("how", ["raises", "ends"])
def test_the_others_are_told_who_is_lost(how: str) -> None:
    zero, one, two = run_ranks_to_end(train_until_an_error, 3, how)
    for other in (zero, two):
        assert other.returned, other.story()
        assert "rank 1" in other.value
    assert one.returned == (how == "ends"), one.story()
