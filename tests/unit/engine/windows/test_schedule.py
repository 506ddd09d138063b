import copy

import pytest
import torch
from torch import nn

from evener.engine.results import Progress
from evener.engine.schedule import Schedule


def two_groups() -> torch.optim.Optimizer:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    groups = [{"params": first.parameters()}, {"params": second.parameters(), "lr": 0.2}]
    return torch.optim.SGD(groups, lr=0.1)


def rates(optimizer: torch.optim.Optimizer) -> list[float]:
    return [group["lr"] for group in optimizer.param_groups]


def test_a_function_of_progress_scales_the_base_rate_of_each_group() -> None:
    optimizer = two_groups()
    schedule = Schedule([optimizer], lambda progress: 1 / (1 + progress.samples))
    schedule.before_update(Progress(samples=3))
    assert rates(optimizer) == pytest.approx([0.025, 0.05])
    schedule.before_update(Progress(samples=1))
    assert rates(optimizer) == pytest.approx([0.05, 0.1])


def test_it_goes_on_after_the_optimizer_has_loaded_a_state() -> None:
    # Loading makes new parameter groups; a resumed run must not train at a rate that stands still.
    optimizer = two_groups()
    schedule = Schedule([optimizer], lambda progress: 1 / (1 + progress.samples))
    schedule.before_update(Progress(samples=1))
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    schedule.before_update(Progress(samples=3))
    assert rates(optimizer) == pytest.approx([0.025, 0.05])
