"""Ranks leave, stop, average and find numbers that are not finite, at random: all end alike.

Either every rank ends with the same model and counters, or every rank has an error.
"""

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from evener.comm.base import Communicator
from evener.errors import EvenerError
from helpers.loops import flatten
from helpers.models import mlp, regression_data
from helpers.teams import run_team, setup

X, Y = regression_data(60)


@dataclass(frozen=True)
class Script:
    """What one rank does in its loop, by window."""

    breaks: int
    stops: int
    bad: int
    averages: int


def draw(seed: int) -> tuple[str, list[Script], dict[str, Any]]:
    """A policy, a script for each of two or three ranks, and the options of all."""
    chance = random.Random(seed)
    policy = chance.choice(["sync", "cadence", "async"])
    never = 99

    def at(likely: float) -> int:
        return chance.randrange(5) if chance.random() < likely else never

    together = at(0.4)  # where all break, which SYNC asks for
    scripts = [
        Script(
            breaks=together if policy == "sync" else at(0.4),
            stops=at(0.2),
            bad=at(0.2),
            # In ASYNC only the deadline finds a rank that averages alone.
            averages=at(0.1 if policy != "async" else 0.0),
        )
        for _ in range(chance.choice([2, 3]))
    ]
    options: dict[str, Any] = {"non_finite": chance.choice(["skip", "raise"])}
    if policy == "sync":
        options["shares"] = [chance.randrange(3) for _ in scripts[1:]] + [1]
    else:
        options |= {"anchor": 1, "max_anchor": 1, "max_batch_diff": 1}
    return policy, scripts, options


def run(seed: int) -> None:
    policy, scripts, options = draw(seed)

    def body(comm: Communicator) -> Any:
        script, model = scripts[comm.rank], mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        try:
            with setup(comm, model, optimizer, policy=policy, **options) as ddp:
                loader = ddp.loader(TensorDataset(X, Y), batch_size=6)
                for epoch in range(2):
                    for x, y in loader.epoch(epoch):
                        here = ddp.window - 5 * epoch
                        if here == script.breaks:
                            break
                        if here == script.stops:
                            ddp.stop()
                        if here == script.averages:
                            ddp.weighted_mean(1.0)
                        loss = (model(x) - y).square().mean()
                        ddp.backward(loss * float("nan") if here == script.bad else loss)
                        ddp.step()
                    ddp.weighted_mean(1.0)
                counters = ddp.window, ddp.progress.steps, ddp.progress.samples, ddp.stopping
        except EvenerError as error:
            return type(error)
        return counters, flatten(model).numpy().tobytes()

    ends = run_team(len(scripts), body)
    failed = [isinstance(end, type) for end in ends]
    assert all(failed) or not any(failed), ends
    assert any(failed) or len(set(ends)) == 1, [end[0] for end in ends]


@pytest.mark.parametrize("seed", range(40))
def test_all_end_alike(seed: int) -> None:
    run(seed)


@pytest.mark.long
@pytest.mark.parametrize("tens", range(30))
def test_all_end_alike_in_many_more_loops(tens: int) -> None:
    for seed in range(100 + 10 * tens, 110 + 10 * tens):
        run(seed)
