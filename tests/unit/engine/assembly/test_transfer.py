"""A rank that was away takes over, bit for bit, what another one holds."""

import threading
from typing import Any

import pytest
import torch
from torch import nn

from evener.averaging.buffers import BufferAverager
from evener.averaging.sharded_update import ShardedUpdate
from evener.comm.base import Communicator
from evener.comm.flat import FlatBuffers
from evener.engine.schedule import Schedule
from evener.engine.training_state import TrainingState
from helpers.teams import run_team

LOCK = threading.Lock()


class Counter:
    """Holds what JSON cannot say."""

    def __init__(self, rank: int) -> None:
        self.state: dict[str, Any] = {
            "best": float("inf") if rank == 0 else -0.0,
            "history": [torch.full((2,), float(rank)), (rank, None)],
            3: "three",
        }

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def flattened(value: Any) -> list[Any]:
    """What a state holds, in order, with tensors as lists."""
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), value.tolist()]
    if isinstance(value, dict):
        return [part for key, one in value.items() for part in (key, *flattened(one))]
    if isinstance(value, list | tuple):
        return [type(value).__name__, *(part for one in value for part in flattened(one))]
    return [repr(value)]


@pytest.mark.parametrize("source", [0, 2])
def test_ranks_that_were_away_take_over_all_that_another_holds(source: int) -> None:
    def body(comm: Communicator) -> list[Any]:
        with LOCK:
            torch.manual_seed(comm.rank)
            model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
            inputs = torch.randn(4, 2)
        optimizers = [
            torch.optim.Adam(model[0].parameters(), lr=0.1),
            torch.optim.SGD(model[1].parameters(), lr=0.1),
        ]
        scheduler = torch.optim.lr_scheduler.StepLR(optimizers[0], step_size=1, gamma=0.5)
        counter = Counter(comm.rank)
        average = torch.optim.swa_utils.AveragedModel(model)
        flat = FlatBuffers(list(model.named_parameters()), 1)
        schedule = Schedule(optimizers, scheduler)
        for _ in range(comm.rank + 1):
            model(inputs).square().sum().backward()
            for optimizer in optimizers:
                optimizer.step()
            scheduler.step()
        whole = ShardedUpdate(flat, optimizers, is_wanted=False, is_must=False)
        buffers = BufferAverager(model, comm)
        state = TrainingState(model, flat, buffers, optimizers, schedule, whole)
        state.register("counter", counter)
        state.register("average", average)
        counters = {"rank": comm.rank, "least": float("-inf"), "place": (1, None)}
        receives = comm.rank != source
        found = state.send(comm, counters, source=source, receives=receives)
        assert found == {"rank": source, "least": float("-inf"), "place": (1, None)}
        return flattened(
            [
                [model.state_dict(), schedule.state_dict()],
                [optimizer.state_dict() for optimizer in optimizers],
                [counter.state, average.state_dict()],
            ]
        )

    ranks = run_team(3, body)
    assert ranks[0] == ranks[1] == ranks[2]
