"""fp16 with a loss scale of the team: an overflow leaves out the window, or one local step."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from evener import Ddp
from evener.comm.base import Communicator
from evener.engine.loss_scale import FIRST_SCALE, GROWTH_INTERVAL, LARGEST_SCALE, LossScale
from evener.engine.results import WindowResult
from evener.errors import ConfigError, NonFiniteGradientError
from evener.loop.precision import choose_precision
from evener.planning.report import Report
from helpers.loops import Numbered, flatten, step, train
from helpers.models import mlp
from helpers.teams import run_team, setup

#: One step of each rank a window, whatever their speed.
LOCKSTEP: dict[str, Any] = {"policy": "cadence", "anchor": 1, "max_anchor": 1, "max_batch_diff": 0}


def begin(
    comm: Communicator, precision: str, shares: Sequence[float] | None, **options: Any
) -> tuple[Ddp, Any]:
    model = mlp(3, 16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return setup(comm, model, optimizer, shares=shares, precision=precision, **options), model


def train_results(ddp: Ddp) -> list[Any]:
    loader = ddp.loader(Numbered(64), batch_size=8)
    return [result for _, x in loader.epoch(0) if (result := step(ddp, x))]


def test_an_overflow_on_one_rank_leaves_the_window_out_on_all_identically() -> None:
    def body(comm: Communicator) -> tuple[list[bool], Tensor, Any, dict[str, Any], list[Tensor]]:
        ddp, model = begin(comm, "fp16", (5, 3))
        seen: list[Tensor] = []
        with ddp:
            assert model(torch.ones(2, 3)).dtype == torch.float32
            if comm.rank == 1:  # as if an activation gradient did not fit into fp16
                model[2].register_full_backward_hook(
                    lambda module, grads, _: (
                        tuple(g * float("inf") for g in grads) if ddp.window in (2, 3) else grads
                    )
                )
            ddp.on_commit(lambda _: seen.append(flatten(model)))
            results = train_results(ddp)
            scale = ddp.assembly.engine.options.loss_scale.state_dict()
            return [r.skipped for r in results], flatten(model), ddp.progress, scale, seen

    (skipped, end, progress, scale, seen), *others = run_team(2, body)
    assert skipped == [False, False, True, True, False, False, False, False]
    assert (progress.window, progress.steps, progress.samples) == (8, 6, 64)
    assert scale == {"value": FIRST_SCALE / 4, "good_steps": 4}
    assert torch.equal(seen[1], seen[2])
    assert torch.equal(seen[1], seen[3])
    assert not torch.equal(seen[3], seen[4])
    for other in others:
        assert (other[0], other[2], other[3]) == (skipped, progress, scale)
        assert torch.equal(other[1], end)


def test_an_overflow_leaves_out_one_step_of_one_rank() -> None:
    """Rank 1 overflows in two steps of its own; rank 0 goes on, and its steps count."""

    def body(comm: Communicator) -> tuple[Any, ...]:
        ddp, model = begin(comm, "fp16", None, **LOCKSTEP)
        ddp.assembly.engine.options.loss_scale.value = 256.0
        ddp.assembly.engine.options.loss_scale.reset()
        number = 0

        def overflow(module: Any, grads: Any, _: Any) -> Any:
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


def test_the_average_is_right_for_any_mixture() -> None:
    precisions = ("fp32", "fp16", "bf16")

    def body(comm: Communicator) -> tuple[Tensor, list[float]]:
        ddp, model = begin(comm, precisions[comm.rank], (5, 2, 3))
        with ddp:
            ddp.assembly.engine.options.loss_scale.load_state_dict(
                {"value": 256.0, "good_steps": 0}
            )
            results = train_results(ddp)
            assert not any(r.skipped for r in results)
            return flatten(model), [r.grad_norm for r in results]

    def reference(comm: Communicator) -> tuple[Tensor, list[float]]:
        ddp, model = begin(comm, "fp32", (1,))
        with ddp:
            norms = [r.grad_norm for r in train_results(ddp)]
            return flatten(model), norms

    expected, expected_norms = run_team(1, reference)[0]
    for end, norms in run_team(len(precisions), body):
        # Eight steps of rounding to 8 bits (bf16) at most, on weights of 0.3.
        assert torch.linalg.vector_norm(end - expected) < 5e-3 * torch.linalg.vector_norm(expected)
        assert norms == pytest.approx(expected_norms, rel=2e-2)


@pytest.mark.parametrize(
    ("policy", "bad"), [("sync", "fp16"), ("sync", "fp32"), ("cadence", "fp16")]
)
def test_what_the_scale_cannot_explain_stops_every_rank(policy: str, bad: str) -> None:
    options = LOCKSTEP if policy == "cadence" else {}

    def body(comm: Communicator) -> str:
        precision = "fp16" if comm.rank else "fp32"
        shares = (4, 4) if policy == "sync" else None
        ddp, model = begin(comm, precision, shares, **options)
        scale = ddp.assembly.engine.options.loss_scale
        scale.value = 2.0 if policy == "sync" else 4.0
        scale.reset()
        with ddp:
            if precision == bad:
                model[0].weight.register_hook(lambda g: g * float("nan"))
            with pytest.raises(NonFiniteGradientError) as caught:
                train_results(ddp)
            assert caught.value.rank == (bad == "fp16")
            if policy == "sync":
                assert ddp.window == (bad == "fp16")
            assert flatten(model).isfinite().all()
            return "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])

    first, second = run_team(2, body)
    assert first == second
    if bad == "fp16":
        assert "'0.weight' is not finite on rank 1" in first
        assert "loss scale of fp16 is down to 1" in first
        assert "use precision='bf16' or 'fp32' on rank 1" in first
    else:
        assert "not finite on rank 0" in first
        assert "loss scale" not in first


def test_the_scale_grows_after_many_good_steps_and_has_an_end() -> None:
    scale = LossScale([1], 0)
    for _ in range(GROWTH_INTERVAL - 1):
        scale.update(overflowed=False)
    assert scale.value == FIRST_SCALE
    scale.update(overflowed=False)
    assert (scale.value, scale.good_steps) == (2 * FIRST_SCALE, 0)
    for _ in range(20 * GROWTH_INTERVAL):
        scale.update(overflowed=False)
    assert scale.value == LARGEST_SCALE
    while scale.may_shrink(1):
        scale.update(overflowed=True)
    assert scale.value == 1.0
    assert not LossScale([0], 0).may_shrink(1)


def test_without_fp16_there_is_no_scale() -> None:
    scale = LossScale([], 0)
    scale.update(overflowed=True)
    scale.load_state_dict({"value": 512.0, "good_steps": 1})
    assert scale.value == 1.0
    assert not scale.can_shrink


@pytest.mark.parametrize(
    ("bf16", "capability", "expected"),
    [(True, (8, 0), "bf16"), (False, (7, 5), "fp16"), (False, (6, 1), "fp32")],
)
def test_auto_is_the_fast_precision_of_the_device(
    monkeypatch: pytest.MonkeyPatch, bf16: bool, capability: tuple[int, int], expected: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: bf16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert choose_precision("auto", torch.device("cuda", 0)) == expected
    assert choose_precision("auto", torch.device("cpu")) == "fp32"
    with pytest.raises(ConfigError, match=r"fp8.*choose one of auto, fp32, bf16, fp16"):
        choose_precision("fp8", torch.device("cpu"))


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
