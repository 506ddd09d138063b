"""``verify_every`` and ``gradient_buckets`` in a loop of one's own."""

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from evener.comm.base import Communicator
from evener.errors import ReplicasDifferError
from helpers.loops import flatten
from helpers.models import mlp, regression_data, seeded
from helpers.teams import run_team, setup

X, Y = regression_data(24)


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
    return flatten(model)


@pytest.mark.parametrize(
    ("every", "written_after", "found_after", "name"),
    [
        (2, 0, 1, "2.bias"),
        # After the last window of an epoch; where that was compared before, or was not due.
        (1, 2, 2, "0.bias"),
        (1000, 2, 2, "0.bias"),
    ],
)
def test_a_window_after_which_replicas_differ_is_not_committed(
    every: int, written_after: int, found_after: int, name: str
) -> None:
    said = f"after window {found_after}, parameter '{re.escape(name)}' of rank 1 is not that of"

    def program(comm: Communicator) -> list[int]:
        def spoil(window: int, model: nn.Module) -> None:
            if window == written_after and comm.rank == 1:
                model.get_parameter(name).data[1] += 1e-3

        committed: list[int] = []
        with pytest.raises(ReplicasDifferError, match=said):
            train(comm, committed, spoil, verify_every=every)
        return committed

    assert run_team(3, program) == [[*range(found_after)]] * 3


def test_a_loop_without_a_loader_is_compared_when_it_is_closed() -> None:
    def program(comm: Communicator) -> int:
        model = mlp()
        ddp = setup(comm, model, torch.optim.SGD(model.parameters(), lr=0.1), verify_every=3)
        for _ in range(4):
            ddp.backward(model(X).square().mean())
            ddp.step()
        if comm.rank == 0:
            model.get_parameter("0.weight").data[0, 0] += 1e-3
        with pytest.raises(ReplicasDifferError) as caught:
            ddp.close()
        return caught.value.window

    assert run_team(2, program) == [3, 3]


class Keeper(nn.Module):
    """Buffers of all kinds: statistics, sums, counters, flags, and what never changes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.steady = nn.InstanceNorm1d(2, track_running_stats=True)
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8, bias=False)
        self.second.weight = self.first.weight  # tied
        self.frozen = nn.Linear(8, 4).requires_grad_(False)
        self.low, self.high = nn.Linear(8, 2, bias=False), nn.Linear(2, 4, bias=False)
        self.register_buffer("sums", torch.zeros(2, dtype=torch.float64))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int32))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("scale", torch.ones(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.sums += x.detach().mean()
            self.calls += 1
            self.seen = self.seen | (x[0, :3] > 0)
        hidden = self.second(self.first(self.norm(x)).tanh()) * self.scale
        hidden = self.steady(hidden.view(-1, 2, 4)).reshape(-1, 8)
        return self.frozen(hidden) + self.high(self.low(hidden))


def keep(
    comm: Communicator,
    every: int,
    spoil: Callable[[int, nn.Module], None] = lambda *_: None,
    shares: tuple[int, ...] = (4, 2, 0),
) -> nn.Module:
    """Two epochs; rank 2 has no share in any window."""
    model = seeded(Keeper, 0, torch.float32)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)
    with setup(comm, model, optimizer, shares=shares[: comm.world_size], verify_every=every) as ddp:
        loader = ddp.loader(TensorDataset(X, Y), batch_size=8)
        # Whatever a rank writes in it is its own until the next window is averaged.
        ddp.on_commit(lambda _: model(X[: 3 + comm.rank]).sum())
        for epoch in range(2):
            for x, y in loader.epoch(epoch):
                ddp.backward(F.mse_loss(model(x), y))
                if result := ddp.step():
                    spoil(result.window, model)
    return model


def test_what_is_made_equal_is_found_equal() -> None:
    run_team(3, lambda comm: keep(comm, every=1000))


@pytest.mark.parametrize("name", ["norm.running_mean", "calls"])
def test_a_buffer_that_is_written_without_a_mark_halts_all_ranks(name: str) -> None:
    """Where nothing else has written since, so that nothing makes it equal again."""

    def program(comm: Communicator) -> str:
        def spoil(window: int, model: nn.Module) -> None:
            model.eval()  # from here on no buffer is averaged
            if window == 3 and comm.rank == 1:
                model.get_buffer(name).data.view(-1)[0] += 1

        with pytest.raises(ReplicasDifferError) as caught:
            keep(comm, 1, spoil, shares=(1, 1, 1))
        assert (caught.value.rank, caught.value.window) == (1, 3)
        assert f"after window 3, buffer {name!r} of rank 1 is not that of rank 0" in str(
            caught.value
        )
        return caught.value.parameter

    assert run_team(3, program) == [name] * 3
