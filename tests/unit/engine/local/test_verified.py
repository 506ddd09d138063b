"""``verify_every`` where ranks make steps of their own: the consensus is compared."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

from evener.comm.base import Communicator
from evener.engine.results import WindowResult
from evener.errors import ReplicasDifferError
from helpers.models import mlp, regression_data
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
