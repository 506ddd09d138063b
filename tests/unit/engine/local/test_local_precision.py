"""fp16 in CADENCE and ASYNC: an overflow leaves out one step of one rank; the team has a scale."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evener import Ddp, DdpConfig
from evener.comm.base import Communicator
from evener.engine.loss_scale import (
    FIRST_SCALE,
    LossScale,
)
from evener.errors import NonFiniteGradientError
from evener.planning.report import Report
from evener.team.environment import DistributedTrainConfig
from helpers.limits import PATIENCE_S
from helpers.models import mlp, regression_data
from helpers.teams import run_team

LOCK = threading.Lock()
X, Y = regression_data(160)
#: One step of each rank a window, whatever their speed.
LOCKSTEP: dict[str, Any] = {"anchor": 1, "max_anchor": 1, "max_batch_diff": 0}


def setup(
    comm: Communicator, precision: str, policy: str, **config: Any
) -> tuple[Ddp, nn.Module, Any]:
    with LOCK:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    ddp = Ddp.setup(
        model,
        optimizer,
        policy=policy,
        devices="cpu",
        precision=precision,
        environment=DistributedTrainConfig(),
        communicator=comm,
        config=DdpConfig(quiet=True, timeout_s=PATIENCE_S, **config),
    )
    return ddp, model, ddp.loader(torch.utils.data.TensorDataset(X, Y), batch_size=8)


def train(
    ddp: Ddp, model: nn.Module, loader: Any, epoch: int = 0, factor: float = 1.0
) -> Callable[[], list[Any]]:
    results: list[Any] = []
    ddp.on_commit(results.append)
    for x, y in loader.epoch(epoch):
        ddp.backward(factor * (model(x) - y).square().mean())
        ddp.step()
    return lambda: results


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def scale_of(ddp: Ddp) -> LossScale:
    return ddp.assembly.engine.options.loss_scale


@pytest.mark.parametrize("policy", ["cadence"])
def test_an_overflow_leaves_out_one_step_of_one_rank(policy: str) -> None:
    """Rank 1 overflows in two steps of its own; rank 0 goes on, and its steps count."""

    def body(comm: Communicator) -> tuple[Tensor, Any, dict[str, Any], float, list[float], int]:
        ddp, model, loader = setup(comm, "fp16", policy, **LOCKSTEP)
        number = 0
        with ddp:
            assert model(X[:2]).dtype == torch.float32
            scale_of(ddp).value = 256.0
            scale_of(ddp).reset()

            def overflow(module: nn.Module, grads: Any, _: Any) -> Any:
                nonlocal number
                number += 1
                return tuple(g * float("inf") for g in grads) if number in (3, 4) else grads

            if comm.rank == 1:  # as if an activation gradient did not fit into fp16
                model[2].register_full_backward_hook(overflow)
            results = train(ddp, model, loader)()
            weight = sum(result.ranks[1].weight for result in results)
            return (
                weights(model),
                ddp.progress,
                scale_of(ddp).state_dict(),
                weight,
                [result.loss for result in results],
                number,
            )

    (end, progress, scale, weight, losses, _), second = run_team(2, body)
    assert (progress.steps, progress.skipped, progress.samples) == (18, 2, 160)
    assert weight == 8 * (second[-1] - 2), "a step left out has no weight"
    assert scale["value"] == 256.0 / 4
    assert 0 < scale["good_steps"] < 18
    assert torch.equal(second[0], end)
    assert second[1:3] == (progress, scale)
    assert all(loss == loss for loss in losses)


@pytest.mark.parametrize("policy", ["cadence"])
def test_at_the_smallest_scale_every_rank_stops_with_the_remedy(policy: str) -> None:
    def body(comm: Communicator) -> tuple[str, bool]:
        ddp, model, loader = setup(comm, "fp16" if comm.rank else "fp32", policy, **LOCKSTEP)
        with ddp:
            if comm.rank == 1:
                model[0].weight.register_hook(lambda g: g * float("nan"))
            scale_of(ddp).value = 4.0
            scale_of(ddp).reset()
            with pytest.raises(NonFiniteGradientError) as caught:
                train(ddp, model, loader)
            assert caught.value.rank == 1
            finite = bool(weights(model).isfinite().all())
            return "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])]), finite

    first, second = run_team(2, body)
    assert first == second
    message, finite = first
    assert finite
    assert "'0.weight' is not finite on rank 1" in message
    assert "loss scale of fp16 is down to 1" in message
    assert "use precision='bf16' or 'fp32' on rank 1" in message


def report(scale: float, *, overflows: int = 0, steps: int = 10) -> Report:
    return Report(steps=steps, skipped=overflows, overflows=overflows, loss_scale=scale)


def test_all_take_the_smallest_scale_and_keep_what_they_have_learnt_since() -> None:
    scales = first, second, third = [LossScale([1, 2], rank) for rank in range(3)]
    assert (first.own, second.own) == (0.0, FIRST_SCALE)
    assert not first.shrink()
    assert [second.shrink() for _ in range(3)] == [True] * 3
    reports = [
        report(first.own),
        report(second.own, overflows=3),
        report(third.own),
    ]
    assert second.shrink(), "after the snapshot, while the average is on its way"
    for scale in scales:
        scale.agree(reports)
    assert [scale.value for scale in scales] == [FIRST_SCALE / 8] * 3
    assert (second.own, third.own, first.own) == (FIRST_SCALE / 16, FIRST_SCALE / 8, 0.0)
