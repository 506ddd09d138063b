"""``verify_every`` and ``gradient_buckets`` in a loop of one's own."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from evener.comm.base import Communicator
from evener.errors import ConfigError, ReplicasDifferError
from helpers.models import mlp, regression_data
from helpers.teams import run_team, setup

X, Y = regression_data(24)
BUCKETS = [("inner", ["0.bias", "2.weight"]), ("first", ["0.weight"])]


def train(
    comm: Communicator,
    committed: list[int],
    spoil: Callable[[int, nn.Module], None] = lambda *_: None,
    **config: object,
) -> Tensor:
    """Three windows of 8 samples; returns the parameters."""
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    shares = [4, 3, 1][: comm.world_size]
    with setup(comm, model, optimizer, shares=shares, **config) as ddp:
        ddp.on_commit(lambda result: committed.append(result.window))
        loader = ddp.loader(TensorDataset(X, Y), batch_size=8, shuffle=False)
        for x, y in loader.epoch(0):
            ddp.backward(F.mse_loss(model(x), y))
            if result := ddp.step():
                spoil(result.window, model)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_a_window_after_which_replicas_differ_is_not_committed() -> None:
    def program(comm: Communicator) -> list[int]:
        def spoil(window: int, model: nn.Module) -> None:
            if window == 0 and comm.rank == 1:
                model.get_parameter("2.bias").data[1] += 1e-3

        committed: list[int] = []
        said = r"after window 1, parameter '2\.bias' of rank 1 is not that of rank 0"
        with pytest.raises(ReplicasDifferError, match=said):
            train(comm, committed, spoil, verify_every=2)
        return committed

    assert run_team(3, program) == [[0], [0], [0]]


@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_buckets_change_no_result(max_norm: float | None) -> None:
    plain = run_team(3, lambda comm: train(comm, [], max_grad_norm=max_norm))
    options = {"max_grad_norm": max_norm, "gradient_buckets": BUCKETS, "verify_every": 1}
    cut = run_team(3, lambda comm: train(comm, [], **options))
    for vector in cut:
        assert torch.equal(vector, cut[0])
        # Clipping sums squares in the order of the buffers.
        torch.testing.assert_close(vector, plain[0], rtol=1e-5 if max_norm else 0, atol=0)


def test_a_bucket_of_another_model_is_refused() -> None:
    def program(comm: Communicator) -> None:
        with pytest.raises(ConfigError, match=r"'head' names the parameter 'head\.weight'"):
            train(comm, [], gradient_buckets=[("head", ["head.weight"])])

    run_team(2, program)
