"""A divided update finds in the mean what is not finite, and then names whose gradient it was."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from evener import Ddp, DdpConfig, NonFiniteGradientError
from helpers.ranks import Rank, run_ranks

#: Window in which something is not finite: norms of ranks' own gradients are not taken any more.
BAD = 2


def train(rank: Rank, bad: tuple[int, ...], factor: float, name: str) -> tuple[object, ...]:
    """The error of a rank: who, which parameter, the message."""
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    config = DdpConfig(quiet=True, sharded_update="on", partition_ratios=[1.0, 1.0])
    ddp = Ddp.setup(model, optimizer, devices="cpu", precision="fp32", config=config)

    def spoil(gradient: Tensor) -> Tensor:
        return gradient + factor if ddp.window == BAD and rank.rank in bad else gradient

    model.get_parameter(name).register_hook(spoil)
    try:
        for (x,) in ddp.loader(TensorDataset(torch.randn(16, 64)), batch_size=2).epoch(0):
            ddp.backward(model(x).mean())
            result = ddp.step()
            assert result is None or bool(result.ranks[0].own_norm) == (result.window == 0)
    except NonFiniteGradientError as error:
        return ddp.window, error.rank, error.parameter, str(error)
    finally:
        ddp.close()
    return ()


@pytest.mark.parametrize("bad", [0, 1])
def test_the_rank_and_the_parameter_are_named(bad: int) -> None:
    """One rank finds it in what it has given to the other's part, one in the sum in its own."""
    for window, rank, parameter, _ in run_ranks(train, 2, (bad,), math.inf, "0.weight"):
        assert (window, rank, parameter) == (BAD, bad, "0.weight")


def test_a_sum_that_overflows_is_nobodys() -> None:
    for window, _, parameter, text in run_ranks(train, 2, (0, 1), 3e38, "0.weight"):
        assert (window, parameter) == (BAD, None)
        assert "each of them finite, overflowed" in text
