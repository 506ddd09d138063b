"""Numbers of the wrong kind: every call names the value, the cause and the remedy."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from evener import ConfigError, Ddp, DdpConfig, UsageError

DATA = torch.arange(24.0).view(8, 3)


@pytest.fixture
def model() -> nn.Module:
    return nn.Linear(3, 1)


@pytest.fixture
def ddp(model: nn.Module) -> Iterator[Ddp]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Ddp.setup(model, optimizer, devices="cpu", quiet=True) as ddp:
        yield ddp


@pytest.mark.parametrize(
    ("name", "value", "least"),
    [
        ("batch_size", 32.0, 1),
        ("batch_size", "32", 1),
        ("batch_size", True, 1),
        ("batch_size", 0, 1),
        ("micro_batch_size", 2.0, 1),
        ("micro_batch_size", False, 1),
        ("num_workers", 1.0, 0),
        ("num_workers", -1, 0),
        ("max_steps", 1e3, 0),
        ("seed", 1.5, 0),
        ("seed", None, 0),
    ],
)
def test_a_loader_names_a_number_that_is_not_whole(
    ddp: Ddp, name: str, value: Any, least: int
) -> None:
    options = {"batch_size": 4} | {name: value}
    with pytest.raises(ConfigError) as caught:
        ddp.loader(DATA, **options)
    assert str(caught.value) == f"{name} is {value!r}; give a whole number from {least}"


@pytest.mark.parametrize("value", ["half", None, [1.0], torch.ones(2)])
def test_a_mean_of_what_is_no_number_is_refused(ddp: Ddp, value: Any) -> None:
    with pytest.raises((TypeError, ValueError, RuntimeError), match=r"float|Python scalars?"):
        ddp.weighted_mean(value)
    with pytest.raises(UsageError, match=r"weight is -1; give the number"):
        ddp.weighted_mean(1.0, weight=-1)
    assert ddp.weighted_mean(value, weight=0) != ddp.weighted_mean(True)  # not a number, and 1


def test_numbers_of_numpy_are_numbers(ddp: Ddp, model: nn.Module) -> None:
    four = np.int64(4)
    config = DdpConfig(
        anchor=np.int32(3), timeout_s=np.float64(60.0), emulate_slow={0: np.int64(2)}
    )
    assert config.anchor == 3
    loader = ddp.loader(
        DATA, batch_size=four, micro_batch_size=np.int64(2), seed=np.int64(1), max_steps=np.int64(9)
    )
    for batch in loader.epoch(0):
        ddp.backward(model(batch).mean(), weight=np.int64(len(batch)))
        ddp.step()
    assert ddp.progress.samples == 8


@pytest.mark.parametrize("config", [{"emulate_slow": "1:3"}, {"emulate_slow": None}])
def test_a_config_names_what_is_no_mapping(config: Any) -> None:
    with pytest.raises(ConfigError, match=r"emulate_slow is .*dictionary"):
        DdpConfig(**config)


@pytest.mark.parametrize(
    "weight",
    [
        "many",
        [8],
        torch.ones(2),
        -1,
        float("nan"),
        float("inf"),
        1e30,
        1e-30,
    ],
)
def test_a_weight_that_is_no_number_is_refused(ddp: Ddp, model: nn.Module, weight: Any) -> None:
    for batch in ddp.loader(DATA, batch_size=8).epoch(0):
        with pytest.raises(UsageError, match=r"weight is .*; give the number of samples"):
            ddp.backward(model(batch).mean(), weight=weight)
        ddp.backward(model(batch).mean(), weight=torch.tensor(8))
        ddp.step()


def test_quiet_silences_the_banner_and_no_warning(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Ddp.setup(model, optimizer, devices="cpu", quiet=True) as ddp:
        ddp.backward(model(DATA).mean())
        ddp.step()
    said = capsys.readouterr().err
    assert said.startswith("warning: training without ddp.loader")
    assert "team of" not in said
