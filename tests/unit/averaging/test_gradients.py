"""Averaging gradients: what is refused before anything is exchanged."""

import math

import pytest
import torch
from torch import nn

from evener.averaging.gradients import GradientAverager
from evener.comm.base import SingleCommunicator
from evener.comm.flat import FlatBuffers
from evener.errors import UsageError


@pytest.mark.parametrize(
    ("total", "message"),
    [
        (0.0, "a window of weight 0 has no mean gradient"),
        (-1.0, r"the window has weight=-1\.0"),
        (math.inf, "the window has weight=inf"),
        (math.nan, "the window has weight=nan"),
    ],
)
def test_a_total_that_cannot_divide_is_refused(total: float, message: str) -> None:
    model = nn.Linear(2, 1)
    flat = FlatBuffers(list(model.named_parameters()), world_size=1)
    averager = GradientAverager(flat, SingleCommunicator())
    model(torch.ones(1, 2)).sum().backward()
    averager.gather()
    with pytest.raises(UsageError, match=message):
        averager.average(1.0, total, what="window 0")
