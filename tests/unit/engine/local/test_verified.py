"""``verify_every`` where ranks make steps of their own: the consensus is compared."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from evener.comm.base import Communicator
from evener.ddp import Ddp
from evener.engine.consensus import Replica
from evener.engine.results import WindowResult
from evener.errors import ReplicasDifferError
from helpers.models import mlp, regression_data, seeded
from helpers.teams import run_team, setup

X, Y = regression_data(120)
#: Windows of few steps, however fast or slow this machine is just now.
SHORT = {"anchor": 1, "max_anchor": 1, "max_batch_diff": 1}


def train(comm: Communicator, policy: str, *, spoil: bool) -> int:
    """Trains an epoch; returns how many windows were committed."""
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    committed = []
    with setup(comm, model, optimizer, policy=policy, verify_every=1, **SHORT) as ddp:

        def on_commit(result: WindowResult) -> None:
            committed.append(result.window)
            if spoil and comm.rank == 1 and result.window == 0:
                replica = ddp.assembly.engine.consensus  # type: ignore[attr-defined]
                replica.consensus[0][0] += 1e-3

        ddp.on_commit(on_commit)
        for x, y in ddp.loader(TensorDataset(X, Y), batch_size=2).epoch(0):
            ddp.backward(F.mse_loss(model(x), y))
            ddp.step()
    return len(committed)


@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_working_copies_may_differ_and_the_consensus_may_not(policy: str) -> None:
    assert min(run_team(2, lambda comm: train(comm, policy, spoil=False))) > 5

    def program(comm: Communicator) -> tuple[int, str]:
        with pytest.raises(ReplicasDifferError) as caught:
            train(comm, policy, spoil=True)
        return caught.value.rank, caught.value.parameter

    # The first elements of the buffer are those of the last parameter.
    assert run_team(2, program) == [(1, "2.bias")] * 2


def normed() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 4))


def replica_of(ddp: Ddp) -> Replica:
    replica = ddp.assembly.engine.consensus  # type: ignore[attr-defined]
    assert isinstance(replica, Replica)
    return replica


def walk(
    comm: Communicator, policy: str, on_commit: Callable[[Ddp, WindowResult], Any], every: int
) -> None:
    model = seeded(normed, 0, torch.float32)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with setup(comm, model, optimizer, policy=policy, verify_every=every, **SHORT) as ddp:
        ddp.on_commit(lambda result: on_commit(ddp, result))
        loader = ddp.loader(TensorDataset(X, Y), batch_size=2, max_steps=30)
        for epoch in range(2):
            for x, y in loader.epoch(epoch):
                ddp.backward(F.mse_loss(model(x), y))
                ddp.step()


def spoil_parameter(ddp: Ddp) -> None:
    replica_of(ddp).consensus[0][0] += 1e-3


@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_a_checkpoint_is_not_written_of_a_consensus_that_differs(
    policy: str, tmp_path: Path
) -> None:
    def program(comm: Communicator) -> None:
        def save(ddp: Ddp, result: WindowResult) -> None:
            if result.window == 1 and comm.rank == 1:
                spoil_parameter(ddp)
            if result.window < 2:
                ddp.save(tmp_path / f"window-{result.window}")

        with pytest.raises(ReplicasDifferError, match=r"after window 1, parameter '1\.bias'"):
            walk(comm, policy, save, 1000)

    run_team(2, program)
    assert [path.name for path in tmp_path.iterdir()] == ["window-0"]
