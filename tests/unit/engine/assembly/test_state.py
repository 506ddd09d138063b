"""A run that is saved and goes on with another number of ranks."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from evener.comm.base import Communicator
from evener.errors import ConfigError
from helpers.loops import Numbered, flatten, linear, train
from helpers.models import mlp
from helpers.teams import run_team, setup

SAMPLES, BATCH = 41, 6


def test_a_run_goes_on_where_it_was_saved_on_another_number_of_ranks(tmp_path: Path) -> None:
    def session(comm: Communicator, windows: int, load: Any, save: Any) -> tuple[Tensor, list[int]]:
        model = mlp(3, 8, 1, dtype=torch.float64)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
        shares = tuple(range(comm.world_size, 0, -1))
        data = Numbered(SAMPLES, torch.float64)
        with setup(comm, model, optimizer, schedule, shares=shares) as ddp:
            loader = ddp.loader(data, batch_size=BATCH, max_steps=windows)
            if load is not None:
                ddp.load(tmp_path / load)
            seen = train(ddp, loader, range(2))
            if save is not None:
                ddp.save(tmp_path / save)
            assert ddp.window == windows
        return flatten(model), seen

    whole, _ = session(Communicator(), 14, None, None)
    first = run_team(1, lambda comm: session(comm, 4, None, "a"))
    second = run_team(3, lambda comm: session(comm, 9, "a", "b"))
    third = run_team(2, lambda comm: session(comm, 14, "b", None))
    seen = Counter(i for part in (first, second, third) for _, ids in part for i in ids)
    assert seen == dict.fromkeys(range(SAMPLES), 2)
    for parameters, _ in third:
        # float64; sums over ranks are formed in another order
        assert float((parameters - whole).norm() / whole.norm()) < 1e-12


def test_an_optimizer_that_repeats_the_loss_is_refused_by_name() -> None:
    model, _ = linear()
    with pytest.raises(ConfigError, match="LBFGS"):
        setup(Communicator(), model, torch.optim.LBFGS(model.parameters()))
