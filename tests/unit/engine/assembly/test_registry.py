"""Registered objects: their state travels to ranks that were away, and is named when missing."""

import threading
from typing import Any

import torch
from torch import nn

from evener.comm.base import Communicator
from evener.comm.flat import FlatBuffers
from evener.engine.registry import Registry
from evener.engine.schedule import Schedule
from evener.engine.transfer import transfer_state
from helpers.teams import run_team

LOCK = threading.Lock()


class Counter:
    """Holds what JSON cannot say."""

    def __init__(self, rank: int) -> None:
        self.state: dict[str, Any] = {
            "best": float("inf") if rank == 0 else 0.0,
            "history": [torch.full((2,), float(rank)), (rank, None)],
            3: "three",
        }

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_a_rank_that_was_away_takes_the_registered_states_over() -> None:
    def body(comm: Communicator) -> tuple[dict[str, Any], Any]:
        with LOCK:
            torch.manual_seed(comm.rank)
            model = nn.Linear(2, 1)
        optimizer = torch.optim.Adam(model.parameters())
        registry, counter = Registry(), Counter(comm.rank)
        registry.add("counter", counter)
        average = torch.optim.swa_utils.AveragedModel(model)
        registry.add("average", average)
        counters = transfer_state(
            comm,
            model,
            FlatBuffers(list(model.named_parameters()), comm.world_size),
            [optimizer],
            Schedule([optimizer], None),
            registry,
            {"window": 7 if comm.rank == 0 else 0},
            receives=comm.rank == 1,
        )
        assert counters == {"window": 7}
        return counter.state, average.state_dict()["module.weight"]

    (first, first_average), (second, second_average) = run_team(2, body)
    assert second["best"] == first["best"] == float("inf")
    assert torch.equal(second["history"][0], torch.zeros(2))
    assert second["history"][1] == (0, None)
    assert second[3] == "three"
    assert torch.equal(first_average, second_average)
