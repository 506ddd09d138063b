"""fp16 in CADENCE and ASYNC: an overflow leaves out one step of one rank; the team has a scale."""

from typing import Any

import torch
from torch import nn

from evener import Ddp
from evener.comm.base import Communicator
from evener.engine.loss_scale import FIRST_SCALE, LossScale
from evener.engine.results import WindowResult
from evener.planning.report import Report
from helpers.loops import Numbered, flatten, train
from helpers.models import mlp
from helpers.teams import run_team, setup


def begin(comm: Communicator) -> tuple[Ddp, nn.Sequential]:
    """One step of each rank a window, whatever their speed."""
    model = mlp(3, 8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    lockstep = {"anchor": 1, "max_anchor": 1, "max_batch_diff": 0}
    ddp = setup(comm, model, optimizer, policy="cadence", precision="fp16", **lockstep)
    ddp.assembly.engine.options.loss_scale.value = 256.0
    ddp.assembly.engine.options.loss_scale.reset()
    return ddp, model


def test_an_overflow_leaves_out_one_step_of_one_rank() -> None:
    """Rank 1 overflows in two steps of its own; rank 0 goes on, and its steps count."""

    def body(comm: Communicator) -> tuple[Any, ...]:
        ddp, model = begin(comm)
        number = 0

        def overflow(module: nn.Module, grads: Any, _: Any) -> Any:
            nonlocal number
            number += 1
            return tuple(g * float("inf") for g in grads) if number in (3, 4) else grads

        if comm.rank == 1:  # as if an activation gradient did not fit into fp16
            model[2].register_full_backward_hook(overflow)
        results: list[WindowResult] = []
        with ddp:
            assert model(torch.ones(2, 3)).dtype == torch.float32
            ddp.on_commit(results.append)
            train(ddp, ddp.loader(Numbered(160), batch_size=8))
        weight = sum(result.ranks[1].weight for result in results)
        assert all(result.loss == result.loss for result in results)
        scale = ddp.assembly.engine.options.loss_scale.state_dict()
        return number, flatten(model).tolist(), ddp.progress, scale, weight

    (_, *first), (number, *second) = run_team(2, body)
    assert first == second
    _, progress, scale, weight = first
    assert (progress.steps, progress.skipped, progress.samples) == (18, 2, 160)
    assert weight == 8 * (number - 2), "a step left out has no weight"
    assert scale["value"] == 256.0 / 4
    assert 0 < scale["good_steps"] < 18


def test_all_take_the_smallest_scale_and_keep_what_they_have_learnt_since() -> None:
    scales = first, second, third = [LossScale([1, 2], rank) for rank in range(3)]
    assert (first.own, second.own) == (0.0, FIRST_SCALE)
    assert not first.shrink()
    assert [second.shrink() for _ in range(3)] == [True] * 3
    reports = [
        Report(steps=10, skipped=n, overflows=n, loss_scale=scale.own)
        for n, scale in zip((0, 3, 0), scales, strict=True)
    ]
    assert second.shrink(), "after the snapshot, while the average is on its way"
    for scale in scales:
        scale.agree(reports)
    assert [scale.value for scale in scales] == [FIRST_SCALE / 8] * 3
    assert (second.own, third.own, first.own) == (FIRST_SCALE / 16, FIRST_SCALE / 8, 0.0)
