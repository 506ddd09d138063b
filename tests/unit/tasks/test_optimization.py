import pytest
from torch import nn

from evener.config.runs import OptimizerConfig
from evener.engine.results import Progress
from evener.tasks.optimization import WarmupCosine, apply_settings, make_optimizer


def test_matrices_decay_and_vectors_do_not() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2), nn.Linear(2, 1))
    model[2].weight.requires_grad_(False)
    optimizer = make_optimizer(model, OptimizerConfig(lr=0.5, weight_decay=0.2))
    matrices, vectors = optimizer.param_groups
    assert [id(p) for p in matrices["params"]] == [id(model[0].weight)]
    assert [id(p) for p in vectors["params"]] == [
        id(p) for p in (model[0].bias, model[1].weight, model[1].bias, model[2].bias)
    ]
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.2, 0.0)
    assert matrices["lr"] == vectors["lr"] == 0.5


def test_present_settings_go_before_those_of_a_checkpoint() -> None:
    model = nn.Linear(3, 2)
    before = make_optimizer(model, OptimizerConfig(lr=0.5, weight_decay=0.2, betas=(0.5, 0.6)))
    now = OptimizerConfig(lr=0.1, weight_decay=0.3, betas=(0.7, 0.8), eps=1e-4)
    optimizer = make_optimizer(model, now)
    optimizer.load_state_dict(before.state_dict())
    apply_settings(optimizer, now)
    for group, decay in zip(optimizer.param_groups, (0.3, 0.0), strict=True):
        assert (group["lr"], group["initial_lr"], group["eps"]) == (0.1, 0.1, 1e-4)
        assert (group["betas"], group["weight_decay"]) == ((0.7, 0.8), decay)


def test_the_rate_rises_with_tokens_and_falls_along_a_cosine() -> None:
    schedule = WarmupCosine(OptimizerConfig(warmup=0.2, min_lr_ratio=0.1), "weight")
    schedule.set_total(1000.0)
    factors = [schedule(Progress(weight=weight)) for weight in (0, 100, 200, 600, 1000, 2000)]
    assert factors == pytest.approx([1e-3, 0.5, 1.0, 0.55, 0.1, 0.1])


def test_no_warm_up_begins_at_the_top() -> None:
    schedule = WarmupCosine(OptimizerConfig(warmup=0.0), "weight")
    assert schedule(Progress()) == 1.0


def test_nothing_but_warm_up_rises_to_the_end() -> None:
    schedule = WarmupCosine(OptimizerConfig(warmup=1.0), "weight")
    schedule.set_total(10.0)
    assert schedule(Progress(weight=5)) == 0.5
    assert schedule(Progress(weight=10)) == 1.0
