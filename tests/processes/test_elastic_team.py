"""An elastic team of processes with a coordinator: one is killed, the others continue."""

import os
import signal
from collections import Counter
from typing import Any

import pytest

from evener import Ddp, DdpConfig, WindowResult
from evener.protocol.formation import Deadlines
from helpers.coordinators import serving
from helpers.elastic_runs import EPOCHS, NUM_SAMPLES, loop
from helpers.ranks import Rank, run_ranks_to_end


def train(rank: Rank, address: str, policy: str) -> tuple[list[tuple[int, Any]], list[float]]:
    import torch
    from torch import nn

    os.environ |= {
        "EVENER_COORDINATOR": address,
        "EVENER_MEMBER": f"w{rank.rank}",
        "EVENER_ELASTIC": "1:3",
    }
    torch.manual_seed(rank.rank)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)

    def die(result: WindowResult) -> None:
        if rank.rank == 1 and result.window == (2 if policy == "sync" else 1):
            os.kill(os.getpid(), signal.SIGKILL)

    config = DdpConfig(quiet=True)
    with Ddp.setup(model, optimizer, policy=policy, devices="cpu", config=config) as ddp:
        trained = loop(ddp, model, die)
    parameters = [float(tensor.double().sum()) for tensor in trained.state]
    ranges = [(r.epoch, r.ranges or (r.committed,)) for r in trained.committed]
    return ranges, parameters


# SYNC is killed at named points in test_elastic_failpoints.py.
@pytest.mark.parametrize(
    "policy", [pytest.param("sync", marks=pytest.mark.long), "cadence", "async"]
)
def test_two_of_three_continue_when_one_is_killed(policy: str) -> None:
    with serving(1, 3, Deadlines(gather_s=60.0)) as address:
        outcomes = run_ranks_to_end(train, 3, address, policy)
    assert outcomes[1].died_of is signal.SIGKILL, outcomes[1].story()
    survivors = [outcomes[0], outcomes[2]]
    assert all(outcome.returned for outcome in survivors), [o.story() for o in survivors]
    first, second = (outcome.value for outcome in survivors)
    assert first == second
    positions = Counter(
        (epoch, position)
        for epoch, ranges in first[0]
        for start, stop in ranges
        for position in range(start, stop)
    )
    assert positions == {(e, p): 1 for e in range(EPOCHS) for p in range(NUM_SAMPLES)}
