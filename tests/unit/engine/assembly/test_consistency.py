"""Ranks that would drift apart without a word are refused when they introduce themselves."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import StepLR

from evener.comm.base import Communicator
from evener.engine.results import Progress
from evener.errors import ConfigError
from evener.loop.consistency import check_consistency
from helpers.teams import run_team, setup

Part = tuple[nn.Module, Any, dict[str, Any]]


def net(channels: int = 4) -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4))
    model.register_buffer("seen", torch.zeros(channels))
    return model


def with_sgd(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    return model, SGD(model.parameters(), lr=0.1)


def start(of_rank: Callable[[int], Part]) -> list[int]:
    def body(comm: Communicator) -> int:
        model, optimizer, options = of_rank(comm.rank)
        with setup(comm, model, optimizer, **options) as ddp:
            return ddp.world_size

    return run_team(2, body)


def refused(of_rank: Callable[[int], Part], said: str) -> None:
    with pytest.raises(ConfigError, match=f"rank 1.*{said}.*; give every rank the same"):
        start(of_rank)


def halve(progress: Progress) -> float:
    return 0.5**progress.steps


#: An option, its values on both ranks, and what is said.
OPTIONS: list[tuple[str, Any, str]] = [
    ("max_grad_norm", (1.0, None), "option.max_grad_norm: None instead of 1.0"),
    ("policy", ("cadence", "async"), "policy: 'async' instead of 'cadence'"),
    ("partition_ratios", ((1, 2), (2, 1)), "partition_ratios.0: 2.0 instead of 1.0"),
]

#: What rank 1 has beside an AdamW over all parameters with a learning rate of 0.1.
OPTIMIZERS: list[tuple[Callable[[Any], Any], str]] = [
    (lambda m: Adam(m.parameters(), lr=0.1), "optimizer.0.class: 'Adam' instead of 'AdamW'"),
    (lambda m: AdamW(m.parameters(), lr=torch.tensor(0.25)), "groups.0.lr: 0.25 instead of 0.1"),
    (lambda m: AdamW(m.parameters(), lr=0.1, betas=(0.9, 0.9)), "betas.1: 0.9 instead"),
    (
        lambda m: AdamW([m[1].weight, m[0].weight, m[0].bias, m[1].bias], lr=0.1),
        r"groups.0.params.0: '1\.weight' instead of '0\.weight'",
    ),
    (
        lambda m: AdamW([{"params": part.parameters()} for part in m], lr=0.1),
        r"groups.0.params.2: None instead of '1\.weight'",
    ),
]

#: What rank 1 has beside a StepLR.
SCHEDULERS: list[tuple[Callable[[Any], Any], str]] = [
    (lambda o: None, "scheduler.0.class: 'NoneType' instead of 'StepLR'"),
    (lambda o: halve, "scheduler.0.class: 'halve' instead of 'StepLR'"),
    (lambda o: [StepLR(o, 5)] * 2, "scheduler.1.class: 'StepLR' instead of None"),
    (lambda o: StepLR(o, 5, gamma=0.5), "scheduler.0.gamma: 0.5 instead of 0.1"),
]


def test_what_differs_is_named_with_both_values() -> None:
    def with_option(name: str, values: Any) -> Callable[[int], Part]:
        return lambda rank: (*with_sgd(net()), {name: values[rank]})

    def with_optimizer(other: Any) -> Callable[[int], Part]:
        def of_rank(rank: int) -> Part:
            model = net()
            return model, other(model) if rank else AdamW(model.parameters(), lr=0.1), {}

        return of_rank

    def with_scheduler(other: Any) -> Callable[[int], Part]:
        def of_rank(rank: int) -> Part:
            model, optimizer = with_sgd(net())
            made = other(optimizer) if rank else StepLR(optimizer, 5)
            return model, optimizer, {"scheduler": made}

        return of_rank

    for name, values, said in OPTIONS:
        refused(with_option(name, values), said)
    for other, said in OPTIMIZERS:
        refused(with_optimizer(other), said)
    for other, said in SCHEDULERS:
        refused(with_scheduler(other), said)
    refused(
        lambda rank: (*with_sgd(net(4 + rank)), {}),
        r"buffer.0: 'seen \[5\] .* instead of 'seen \[4\]",
    )
    refused(
        lambda rank: (*with_sgd(nn.Sequential(*(nn.Linear(2, 2) for _ in range(2 + rank)))), {}),
        r"parameter.4: '2.weight \[2, 2\] torch.float32' instead of None",
    )


def test_what_is_a_rank_s_own_business_may_differ() -> None:
    def of_rank(rank: int) -> Part:
        model = net()
        options = {"emulate_slow": {1: 2.0}, "stop_when": (lambda: False) if rank else None}
        return model, Adam(model.parameters(), foreach=bool(rank)), options

    assert start(of_rank) == [2, 2]


def test_a_model_is_in_one_team_at_a_time() -> None:
    model = net()
    first = SGD(model.parameters(), lr=0.1)
    ddp = setup(Communicator(), model, first)
    with pytest.raises(ConfigError, match=r"this Sequential is in a team already.*ddp\.close\(\)"):
        setup(Communicator(), model, SGD(model.parameters(), lr=0.1))
    ddp.close()
    setup(Communicator(), model, first).close()


def test_the_ranks_that_differ_are_named_where_rank_0_is_not_there() -> None:
    alike = {"version.torch": "2"}
    check_consistency({1: alike, 3: alike})
    with pytest.raises(ConfigError, match=r"^rank 3 and rank 1 differ in version\.torch: '3'"):
        check_consistency({1: alike, 2: alike, 3: {"version.torch": "3"}})
