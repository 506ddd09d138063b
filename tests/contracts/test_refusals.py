"""What is refused: every front door names the argument and its value, by an error of its class."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from evener import (
    ConfigError,
    Ddp,
    DdpConfig,
    DivergenceGuard,
    UsageError,
    Verdict,
    WorkerError,
)
from evener.team.placement import devices_of_host

DATA = torch.arange(24.0).view(8, 3)
MODEL = nn.Linear(3, 1)
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), lr=0.1)


def setup(policy: str = "sync", **options: Any) -> Ddp:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = DdpConfig(quiet=True, **options)
    return Ddp.setup(model, optimizer, policy=policy, devices="cpu", config=config)


def build(**options: Any) -> Any:
    given = {"dataset": DATA, "batch_size": 4, "num_epochs": 1, "devices": ["cpu"], "quiet": True}
    return Ddp.builder(
        lambda device: nn.Linear(3, 1),
        lambda params: torch.optim.SGD(params, lr=0.1),
        lambda model, batch: model(batch).square().mean(),
        **given | options,
    )


@pytest.fixture
def ddp() -> Iterator[Ddp]:
    with setup() as ddp:
        yield ddp


# ── numbers ──────────────────────────────────────────────────────────────────────────────────────

LOADER = [
    *(("batch_size", value) for value in (32.0, "32", True, 0)),
    *(("micro_batch_size", value) for value in (2.0, False, 0, "big")),
    *(("num_workers", value) for value in (1.0, -1)),
    *(("max_steps", value) for value in (1e3, -1)),
    *(("seed", value) for value in (1.5, None)),
]


def test_numbers_of_a_loader(ddp: Ddp) -> None:
    for name, value in LOADER:
        with pytest.raises(ConfigError, match=f"^{name} is {value!r}; give "):
            ddp.loader(DATA, **{"batch_size": 4} | {name: value})
    for value in (2.0, 0):
        with pytest.raises(ConfigError, match=f"^batch_size is {value!r}; give "):
            ddp.eval_loader(DATA, batch_size=value)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=f"batch_size is {value!r}; give "):
            build(batch_size=value).run()


def test_weights_and_means(ddp: Ddp) -> None:
    model = ddp.assembly.model
    for batch in ddp.loader(DATA, batch_size=8).epoch(0):
        for weight in ("many", [8], torch.ones(2), -1, float("nan"), float("inf"), 1e30, 1e-30):
            with pytest.raises(UsageError, match=r"weight is .*; give the number of samples"):
                ddp.backward(model(batch).mean(), weight=weight)
        ddp.backward(model(batch).mean(), weight=torch.tensor(8))
        ddp.step()
    with pytest.raises(UsageError, match=r"weight is -1; give the number"):
        ddp.weighted_mean(1.0, weight=-1)
    for value in ("half", None, [1.0], torch.ones(2)):
        with pytest.raises((TypeError, ValueError, RuntimeError), match=r"float|Python scalars?"):
            ddp.weighted_mean(value)  # type: ignore[arg-type]


def test_numbers_of_numpy_are_numbers(ddp: Ddp) -> None:
    config = DdpConfig(
        anchor=np.int32(3), timeout_s=np.float64(60.0), emulate_slow={0: np.int64(2)}
    )
    assert config.anchor == 3
    sizes = {"batch_size": 4, "micro_batch_size": 2, "seed": 1, "max_steps": 9}
    loader = ddp.loader(DATA, **{name: np.int64(size) for name, size in sizes.items()})
    for batch in loader.epoch(0):
        ddp.backward(ddp.assembly.model(batch).mean(), weight=np.int64(len(batch)))
        ddp.step()
    assert ddp.progress.samples == 8


# ── options ──────────────────────────────────────────────────────────────────────────────────────

LOCAL: dict[str, Any] = {
    "anchor": 10,  # what is said counts, even where it is the default
    "max_anchor": 0,
    "overhead_target": 0.2,
    "max_batch_diff": 0,
    "divergence_guard": None,
    "divergence_threshold": 0.05,
    "divergence_factor": 0.5,
    "lr_scale_ratio": 1.0,
    "outer": "nesterov",
}


def test_options_of_local_steps_in_sync() -> None:
    for name, value in LOCAL.items():
        words = rf"{name} is {value!r}, but has no effect with policy 'sync'"
        for call in (lambda o: setup(**o), lambda o: build(**o).run()):
            with pytest.raises(ConfigError, match=words):
                call({name: value})
        setup("cadence", **{name: value}).close()


def test_hints_say_who_is_slow() -> None:
    config = DdpConfig(quiet=True).with_speed_hint(slow_rank=1, ratio=2.3)
    fast, slow = config.hinted_speeds(2) or ()
    assert fast / slow == pytest.approx(2.3)
    assert DdpConfig(speed_hint={1: 0.5}).hinted_speeds(3) == (1.0, 0.5, 1.0)
    for name, arguments in (("ratio", (1, 0.5)), ("slow_rank", (-1, 2.0))):
        with pytest.raises(ConfigError, match=rf"{name} is "):
            DdpConfig().with_speed_hint(*arguments)
    with pytest.raises(ConfigError, match=r"floDl"):
        build().speed_hint((1, 2.3)).run()


class Careful(DivergenceGuard):
    """Judges as it is told."""

    def __init__(self, answer: Any) -> None:
        self.answer, self.seen = answer, 0

    def report(self, divergence: float) -> Any:
        self.seen += 1
        return self.answer


def test_guards_of_the_users() -> None:
    guard = Careful((Verdict.NUDGE_DOWN, 0.7))
    build(policy="cadence", anchor=2, max_anchor=2, divergence_guard=guard).run().join()
    assert guard.seen
    for answer in ("hold on", (Verdict.NUDGE_DOWN, 1.5), (Verdict.STABLE, None)):
        handle = build(policy="cadence", divergence_guard=Careful(answer)).run()
        with pytest.raises(WorkerError, match=r"Careful.report returned .*evener.Verdict"):
            handle.join()
    with pytest.raises(ConfigError, match=r"divergence_guard is <class .*derived from evener.Div"):
        DdpConfig(divergence_guard=Careful)  # type: ignore[arg-type]


# ── arguments in another order, devices ──────────────────────────────────────────────────────────


def make_model(device: torch.device | None = None) -> nn.Module:
    return nn.Linear(2, 1)


ORDERS: list[tuple[tuple[Any, ...], str]] = [
    ((MODEL, make_model, torch.optim.SGD), "optimizer is function; .*Ddp.builder"),
    ((MODEL, torch.optim.SGD), "optimizer is the class SGD"),
    ((MODEL, MODEL.parameters()), "optimizer is generator"),
    ((make_model, OPTIMIZER), "model is function"),
    ((OPTIMIZER, MODEL), "model is SGD"),
    ((MODEL, OPTIMIZER, OPTIMIZER), "scheduler is SGD"),
]


def test_arguments_in_another_order() -> None:
    for arguments, words in ORDERS:
        with pytest.raises(ConfigError, match=words) as caught:
            Ddp.setup(*arguments, devices="cpu", quiet=True)
        assert "Ddp.setup(model, torch.optim.AdamW(model.parameters())" in str(caught.value)
    for functions, words in (
        ((MODEL, torch.optim.SGD), "model_fn is a Linear; give a function"),
        ((make_model, OPTIMIZER), "optim_fn is a SGD; give a function"),
    ):
        builder = Ddp.builder(*functions, print, dataset=[1], batch_size=1, num_epochs=1)
        with pytest.raises(ConfigError, match=words):
            builder.run()


def test_devices_of_a_list_may_be_numbers() -> None:
    two = {"cuda": 2}
    assert devices_of_host([0, 1], two) == ("cuda:0", "cuda:1")
    assert devices_of_host([1, "cpu"], {"xpu": 2}) == ("xpu:1", "cpu")
    for bad, there in (([2], two), ([-1], two), ([0, True], two), ([0, 1], {})):
        with pytest.raises(ConfigError, match=r"torch finds "):
            devices_of_host(bad, there)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="devices 0 and 1 may be there")
def test_numbers_of_devices_that_are_not_there() -> None:
    calls: list[Callable[[], object]] = [
        lambda: Ddp.setup(MODEL, OPTIMIZER, devices=[0, 1], quiet=True),
        lambda: Ddp.wrap([make_model(), make_model()], [0, 1]),
        lambda: build(devices=[0, 1]).run(),
    ]
    for call in calls:
        with pytest.raises(ConfigError, match=r"devices is \[0, 1\].*finds no accelerator"):
            call()


def test_quiet_silences_the_banner_and_no_warning(capsys: pytest.CaptureFixture[str]) -> None:
    with setup() as ddp:
        ddp.backward(ddp.assembly.model(DATA).mean())
        ddp.step()
    said = capsys.readouterr().err
    assert said.startswith("warning: training without ddp.loader")
    assert "team of" not in said
