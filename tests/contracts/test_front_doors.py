"""An option is taken, and refused, alike at every front door: ``Ddp.setup``, the builder, YAML."""

from typing import Any

import pytest
import torch
from torch import nn

from evener import (
    ConfigError,
    Ddp,
    DdpConfig,
    DivergenceGuard,
    ElChe,
    Verdict,
    WorkerError,
)
from evener.team.placement import devices_of_host
from helpers.configurations import load_run_config


def setup(policy: str = "sync", **options: Any) -> Ddp:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Ddp.setup(
        model, optimizer, policy=policy, devices="cpu", config=DdpConfig(quiet=True, **options)
    )


def build(**options: Any) -> Any:
    given: dict[str, Any] = {
        "dataset": torch.utils.data.TensorDataset(torch.randn(16, 2)),
        "batch_size": 4,
        "num_epochs": 1,
        "devices": ["cpu"],
        "quiet": True,
        **options,
    }
    return Ddp.builder(
        lambda device: nn.Linear(2, 1),
        lambda params: torch.optim.SGD(params, lr=0.1),
        lambda model, batch: model(batch[0]).square().mean(),
        **given,
    )


# ── options that act in local steps only ─────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("anchor", 10),  # what is said counts, even where it is the default
        ("max_anchor", 0),
        ("overhead_target", 0.2),
        ("max_batch_diff", 0),
        ("divergence_guard", "none"),
        ("divergence_guard", None),
        ("divergence_threshold", 0.05),
        ("divergence_factor", 0.5),
        ("lr_scale_ratio", 1.0),
    ],
)
def test_an_option_of_local_steps_is_refused_in_sync(option: str, value: Any) -> None:
    words = rf"{option} is {value!r}, but has no effect with policy 'sync'.*leave it out"
    with pytest.raises(ConfigError, match=words):
        setup(**{option: value})
    with pytest.raises(ConfigError, match=words):
        build(**{option: value}).run()
    setup("cadence", **{option: value}).close()


@pytest.mark.parametrize("target", [0.0, 0.6])
def test_an_overhead_target_out_of_range_is_refused_everywhere(target: float) -> None:
    with pytest.raises(ConfigError, match=f"overhead_target is {target}"):
        load_run_config(None, [f"overhead_target={target}"])
    with pytest.raises(ConfigError, match=f"overhead_target is {target}"):
        DdpConfig(overhead_target=target)
    with pytest.raises(ConfigError, match=f"overhead_target is {target}"):
        build(policy="cadence", overhead_target=target).run()
    with pytest.raises(ConfigError, match=f"overhead_target is {target}"):
        ElChe(2, 10).with_overhead_target(target)


def test_a_largest_anchor_of_0_and_no_guard_are_taken_everywhere() -> None:
    assert load_run_config(None, ["max_anchor=0", "divergence_guard=false"]).max_anchor == 0
    config = DdpConfig(anchor=7, max_anchor=0)
    cadence = config.make_cadence(1)
    cadence.report_timing([1000.0], [7], 900.0)
    assert cadence.anchor == 7
    build(policy="cadence", max_anchor=0).no_divergence_guard().run().join()


# ── a guard of the user's ────────────────────────────────────────────────────────────────────────


class Careful(DivergenceGuard):
    """Judges as it is told."""

    def __init__(self, answer: Any = Verdict.NUDGE_DOWN) -> None:
        self.answer, self.seen = answer, []

    def report(self, divergence: float) -> Any:
        self.seen.append(divergence)
        return self.answer


def test_a_guard_of_the_users_is_asked_for_each_window() -> None:
    guard = Careful()
    handle = build(policy="cadence", anchor=2, max_anchor=2, divergence_guard=guard).run()
    handle.join()
    assert len(guard.seen) >= 2
    assert all(value >= 0 for value in guard.seen)


@pytest.mark.parametrize("answer", ["hold on", (Verdict.NUDGE_DOWN, 1.5), (Verdict.STABLE, None)])
def test_a_guard_that_returns_no_verdict_is_named(answer: Any) -> None:
    handle = build(policy="cadence", divergence_guard=Careful(answer)).run()
    with pytest.raises(WorkerError, match=r"Careful.report returned .*; return an evener.Verdict"):
        handle.join()
    with pytest.raises(ConfigError, match=r"divergence_guard is <class .*derived from evener.Div"):
        DdpConfig(divergence_guard=Careful)  # type: ignore[arg-type]


# ── hints ────────────────────────────────────────────────────────────────────────────────────────


def test_a_hint_may_say_who_is_slow() -> None:
    config = DdpConfig(quiet=True).with_speed_hint(slow_rank=1, ratio=2.3)
    fast, slow = config.hinted_speeds(2) or ()
    assert fast / slow == pytest.approx(2.3)
    assert config.quiet
    assert DdpConfig(speed_hint={1: 0.5}).hinted_speeds(3) == (1.0, 0.5, 1.0)
    for arguments, words in (
        ({"slow_rank": 1, "ratio": 0.5}, "ratio is 0.5; give how many times as fast the other"),
        ({"slow_rank": -1, "ratio": 2.0}, "slow_rank is -1; give a whole number from 0"),
    ):
        with pytest.raises(ConfigError, match=words):
            DdpConfig().with_speed_hint(**arguments)
    assert load_run_config(None, ["speed_hint=[1.0, 2]"]).speed_hint == [1, 2]
    with pytest.raises(ConfigError, match=r"speed_hint is \[1, 2\]: floDl reads these as"):
        load_run_config(None, ["speed_hint=[1, 2]"])
    assert load_run_config(None, ["speed_hint={1: 0.5}"]).speed_hint == {1: 0.5}


# ── what stands where ────────────────────────────────────────────────────────────────────────────


def make_model(device: torch.device | None = None) -> nn.Module:
    return nn.Linear(2, 1)


def make_optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


MODEL = make_model()
OPTIMIZER = make_optimizer(MODEL.parameters())
RIGHT = r"Ddp\.setup\(model, torch\.optim\.AdamW\(model\.parameters\(\)\), scheduler\)"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((MODEL, make_model, make_optimizer), f"optimizer is function; .*{RIGHT}.*Ddp.builder"),
        ((MODEL, lambda device: MODEL, torch.optim.SGD), f"optimizer is function; .*{RIGHT}"),
        ((MODEL, torch.optim.SGD), f"optimizer is the class SGD; .*{RIGHT}"),
        ((MODEL, MODEL), f"optimizer is Linear; .*{RIGHT}"),
        ((MODEL, MODEL.parameters()), f"optimizer is generator; .*{RIGHT}"),
        ((make_model, OPTIMIZER), f"model is function; .*{RIGHT}"),
        ((nn.Linear, OPTIMIZER), f"model is the class Linear; .*{RIGHT}"),
        ((OPTIMIZER, MODEL), f"model is SGD; .*{RIGHT}"),
        ((MODEL, OPTIMIZER, OPTIMIZER), f"scheduler is SGD; .*{RIGHT}"),
    ],
)
def test_arguments_in_another_order_get_the_call_that_is_right(
    arguments: tuple[Any, ...], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        Ddp.setup(*arguments, devices="cpu", quiet=True)


@pytest.mark.parametrize(
    ("functions", "words"),
    [
        ((MODEL, make_optimizer), "model_fn is a Linear that is made already; give a function"),
        ((make_model, OPTIMIZER), "optim_fn is a SGD that is made already; .*lambda params"),
    ],
)
def test_a_builder_gets_functions(functions: tuple[Any, ...], words: str) -> None:
    builder = Ddp.builder(*functions, print, dataset=[1], batch_size=1, num_epochs=1)
    with pytest.raises(ConfigError, match=words):
        builder.run()


# ── devices ──────────────────────────────────────────────────────────────────────────────────────


def test_devices_of_a_list_may_be_numbers() -> None:
    two = {"cuda": 2}
    assert devices_of_host([0, 1], two) == ("cuda:0", "cuda:1")
    assert devices_of_host([1, "cpu"], {"xpu": 2}) == ("xpu:1", "cpu")
    for bad in ([2], [-1], [0, 2]):
        with pytest.raises(ConfigError, match=r"torch finds 2 cuda devices here; .* from 0"):
            devices_of_host(bad, two)
    with pytest.raises(
        ConfigError, match=r"devices is \[0, True\], but torch finds .* list such as"
    ):
        devices_of_host([0, True], two)
    with pytest.raises(ConfigError, match=r"devices is \[0, 1\].*torch finds no accelerator"):
        devices_of_host([0, 1], {})


@pytest.mark.skipif(
    torch.accelerator.is_available(),
    reason="beside an accelerator, 0 and 1 may be devices that are there: the calls would train",
)
def test_numbers_of_devices_that_are_not_there() -> None:
    for call in (
        lambda: Ddp.setup(MODEL, OPTIMIZER, devices=[0, 1], quiet=True),
        lambda: Ddp.wrap([make_model(), make_model()], [0, 1]),
        lambda: build(devices=[0, 1]).run(),
    ):
        with pytest.raises(ConfigError, match=r"devices is \[0, 1\].*finds no accelerator"):
            call()


# ── buffers of replicas ──────────────────────────────────────────────────────────────────────────
