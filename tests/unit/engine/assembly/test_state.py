"""Saving and loading a team, precision, and every optimizer."""

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evener.comm.base import Communicator
from evener.errors import ConfigError
from helpers.teams import run_team, setup

LOCK = threading.Lock()
SAMPLES, BATCH = 41, 6


class Numbered(torch.utils.data.Dataset[tuple[int, Tensor]]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return index, torch.randn(4, generator=generator, dtype=torch.float64)


def network() -> nn.Module:
    with LOCK:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def train(
    comm: Communicator,
    windows: int,
    *,
    load: Path | None = None,
    save: Path | None = None,
    epochs: int = 2,
    make: Callable[[Any], torch.optim.Optimizer] | None = None,
    shares: Any = None,
) -> tuple[Tensor, list[int], int]:
    model = network()
    optimizer = (make or (lambda p: torch.optim.AdamW(p, lr=0.05)))(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
    seen: list[int] = []
    weights = shares or tuple(range(comm.world_size, 0, -1))
    with setup(comm, model, optimizer, schedule, shares=weights) as ddp:
        loader = ddp.loader(Numbered(), batch_size=BATCH, max_steps=windows)
        if load is not None:
            ddp.load(load)
        for epoch in range(epochs):
            for ids, x in loader.epoch(epoch):
                seen.extend(ids.tolist())
                ddp.backward(model(x).square().mean())
                ddp.step()
        if save is not None:
            ddp.save(save)
        return torch.cat([p.detach().flatten() for p in model.parameters()]), seen, ddp.window


def test_a_run_goes_on_where_it_was_saved_on_another_number_of_ranks(tmp_path: Path) -> None:
    whole, _, _ = train(Communicator(), 14)
    first = run_team(1, lambda c: train(c, 4, save=tmp_path / "a"))
    second = run_team(3, lambda c: train(c, 9, load=tmp_path / "a", save=tmp_path / "b"))
    third = run_team(2, lambda c: train(c, 14, load=tmp_path / "b"))
    assert [part[0][2] for part in (first, second, third)] == [4, 9, 14]
    seen = Counter(i for part in (first, second, third) for _, ids, _ in part for i in ids)
    assert seen == dict.fromkeys(range(SAMPLES), 2)
    for parameters, _, _ in third:
        # float64; sums over ranks are formed in another order
        assert float((parameters - whole).norm() / whole.norm()) < 1e-12


def test_an_optimizer_that_repeats_the_loss_is_refused_by_name() -> None:
    model = network()
    with pytest.raises(ConfigError, match="LBFGS"):
        setup(Communicator(), model, torch.optim.LBFGS(model.parameters()))


def test_bf16_runs_the_forward_pass_under_autocast_and_keeps_float32_elsewhere() -> None:
    from evener import Ddp, DdpConfig
    from evener.team.environment import DistributedTrainConfig

    inner: list[torch.dtype] = []
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    model[0].register_forward_hook(lambda m, a, out: inner.append(out.dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = DdpConfig(quiet=True)
    with Ddp.setup(
        model, optimizer, precision="bf16", config=config, environment=DistributedTrainConfig()
    ) as ddp:
        loader = ddp.loader(Numbered(), batch_size=8)
        for _, x in loader.epoch(0):
            output = model(x.float())
            assert output.dtype == torch.float32
            ddp.backward(output.square().mean())
            ddp.step()
        assert not torch.is_autocast_enabled("cpu")
    assert set(inner) == {torch.bfloat16}
    assert all(p.dtype == torch.float32 for p in model.parameters())
    inner.clear()
    model(torch.ones(2, 4))
    assert inner == [torch.float32]  # hooks are gone


def test_an_unknown_precision_backend_policy_or_device_is_named() -> None:
    from evener.ddp import Ddp
    from evener.team.environment import DistributedTrainConfig

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    alone = DistributedTrainConfig()
    for argument, value in (
        ("precision", "fp8"),
        ("policy", "sometimes"),
        ("devices", "tpu"),
    ):
        with pytest.raises(ConfigError, match=value):
            Ddp.setup(model, optimizer, environment=alone, **{argument: value})
