"""A user's script on an elastic team of threads: what it does besides training windows."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from evener import Ddp, WindowResult
from helpers.elastic import ElasticThreads, Kill, ThreadMembership
from helpers.elastic_runs import BATCH, DATA, MICRO_BATCH, begin

AtCommit = Callable[[Ddp, WindowResult], None]

EPOCHS = 4
HELD_OUT = DATA[:13]


class Average:
    """An average of the weights over windows, which the script registers."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.mean = {name: p.detach().clone() for name, p in model.named_parameters()}

    def update(self) -> None:
        for name, parameter in self.model.named_parameters():
            self.mean[name].lerp_(parameter.detach(), 0.1)

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self.mean)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.mean = {name: tensor.clone() for name, tensor in state.items()}


class Scale:
    """A number that the script has found before its loop, and registers for workers that join."""

    def __init__(self, value: float) -> None:
        self.value = value

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.value = state["value"]


class Finding(NamedTuple):
    """What a worker has at its end."""

    scale: float
    losses: dict[int, float]
    alone: dict[int, float]
    epochs: list[int]
    state: list[Tensor]


def script(membership: ThreadMembership, at_commit: AtCommit) -> Finding:
    """Averages a number before the loop, evaluates, and keeps an average of weights."""
    with begin(membership, seed=membership.number + 1) as ddp:
        model = ddp.assembly.model
        scale = Scale(ddp.weighted_mean(membership.number + 1.0))
        ddp.register("scale", scale)
        average = Average(model)
        ddp.register("average", average)

        def commit(result: WindowResult) -> None:
            average.update()
            at_commit(ddp, result)

        ddp.on_commit(commit)
        loader = ddp.loader(DATA, batch_size=BATCH, seed=3, micro_batch_size=MICRO_BATCH)
        losses, alone, trained = {}, {}, set()
        for epoch in ddp.epochs(EPOCHS):
            for x, y in loader.epoch(epoch):
                trained.add(epoch)
                ddp.backward(((model(x) - y) ** 2).mean() * scale.value)
                ddp.step()
            losses[epoch] = evaluate(ddp, model)
            if epoch in trained:
                alone[epoch] = evaluate_alone(ddp, model)
            average.update()
        kept = [*model.state_dict().values(), *average.mean.values()]
        state = [tensor.detach().clone() for tensor in kept]
        return Finding(scale.value, losses, alone, sorted(trained), state)


def evaluate(ddp: Ddp, model: nn.Module) -> float:
    """The mean loss of the held-out samples, each of which counts once."""
    total = count = 0.0
    with ddp.evaluating():
        for x, y in ddp.eval_loader(HELD_OUT, batch_size=2):
            total += float(((model(x) - y) ** 2).sum())
            count += len(x)
    return ddp.weighted_mean(total / count, count)


def evaluate_alone(ddp: Ddp, model: nn.Module) -> float:
    x, y = (torch.stack(part) for part in zip(*HELD_OUT, strict=True))
    with ddp.evaluating():
        return float(((model(x) - y) ** 2).mean())


def run_script(
    founders: int,
    kills: Sequence[Kill] = (),
    *,
    joins_after: int | None = None,
    at_commit: AtCommit = lambda ddp, result: None,
) -> tuple[ElasticThreads, dict[str, Finding]]:
    """Run it; return the team, and what each member has that has come to the end.

    Args:
        founders: Members of the first generation.
        kills: Where members die.
        joins_after: Commit of this window starts another worker, and waits until it is there.
        at_commit: Called on every rank.
    """
    team = ElasticThreads(founders, kills=kills)

    def body(membership: ThreadMembership) -> Finding:
        def commit(ddp: Ddp, result: WindowResult) -> None:
            if joins_after == result.window and ddp.is_main_process:
                team.add("j", body)
            at_commit(ddp, result)

        return script(membership, commit)

    return team, team.run_to_end(body)
