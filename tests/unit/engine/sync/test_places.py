"""Where ranks are in their data: agreed on before anything is computed, and told in results."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from evener.comm.base import Communicator
from evener.errors import EvenerError, UsageError
from helpers.models import seeded
from helpers.teams import run_team, setup

DATA = TensorDataset(torch.ones(40, 3))


def line() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = seeded(lambda: nn.Linear(3, 1), 0, torch.float32)
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def test_ranks_at_other_places_of_the_data_are_refused_before_anything_is_computed() -> None:
    def body(comm: Communicator) -> str:
        model, optimizer = line()
        wanted = pytest.raises(UsageError if comm.rank else EvenerError)
        with wanted as caught, setup(comm, model, optimizer, shares=(1, 1)) as ddp:
            loader = ddp.loader(DATA, batch_size=8)
            committed = [[0, 8]] if comm.rank else []
            loader.cursor.load_state_dict(loader.state_dict() | {"committed": committed})
            next(iter(loader.epoch(0)))
        return str(caught.value)

    _, said = run_team(2, body)  # the word of rank 0 counts, so rank 1 finds the difference
    assert "rank 0 plans (window, epoch, start, size) (0, 0, 0, 8), rank 1 is at" in said
    assert "(0, 0, 8, 8)" in said
    assert "resume from the same checkpoint" in said
