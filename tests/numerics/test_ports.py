"""Whole scripts, plain and ported: how many lines change, and that the result does not."""

import difflib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import RandomSampler

from evener.comm.base import Communicator
from evener.data.order import Permutation
from evener.ddp import Ddp
from helpers.teams import run_team, setup

FOLDER = Path(__file__).parent / "ports"
#: Lines of the ported script that are not in the plain one.
PORTS = {"digits": 5, "gpt": 8, "dcgan": 9}
SHARES = {1: (1,), 3: (5, 2, 1)}


def lines(name: str) -> list[str]:
    return (FOLDER / f"{name}.py").read_text().splitlines()


@pytest.mark.parametrize(("name", "changed"), PORTS.items())
def test_lines_that_change(name: str, changed: int) -> None:
    diff = list(difflib.ndiff(lines(f"{name}_plain"), lines(f"{name}_ported")))
    assert len([line for line in diff if line.startswith("+ ") and line[2:].strip()]) == changed
    # What goes away is replaced, or is not needed any more: clipping, accumulation, steps.
    assert len([line for line in diff if line.startswith("- ")]) <= changed + 1


def main_of(name: str, names: dict[str, Any]) -> Callable[[], tuple[nn.Module, float]]:
    """The script's ``main``, in a namespace of its own with some names replaced."""
    namespace: dict[str, Any] = {"__name__": name}
    source = (FOLDER / f"{name}.py").read_text()
    exec(compile(source, f"{name}.py", "exec"), namespace)
    namespace |= names
    main: Callable[[], tuple[nn.Module, float]] = namespace["main"]
    return main


def flatten(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def run_plain(name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, float]:
    """The plain script over the order of samples that ``ddp.loader`` would take."""
    epochs: dict[int, int] = {}

    def in_order(self: RandomSampler) -> Any:
        epoch = epochs[id(self)] = epochs.get(id(self), -1) + 1
        order = Permutation(len(self), 0, epoch)
        return iter([order[position] for position in range(len(self))])

    monkeypatch.setattr(RandomSampler, "__iter__", in_order)
    model, figure = main_of(f"{name}_plain", {})()
    return flatten(model), figure


def run_ported(name: str, world_size: int) -> list[tuple[Tensor, float]]:
    """The ported script on every rank of a team with shares 5:2:1."""
    # Ranks are threads with one generator: each gets what a process of its own would have drawn.
    reference = _initial_parameters(name)

    def body(comm: Communicator) -> tuple[Tensor, float]:
        class Injected:
            @staticmethod
            def setup(
                models: Any, optimizers: Any, scheduler: Any = None, config: Any = None
            ) -> Ddp:
                parts = models if isinstance(models, list) else [models]
                flat = [p for part in parts for p in part.parameters()]
                with torch.no_grad():
                    for parameter, value in zip(flat, reference, strict=True):
                        parameter.copy_(value)
                options = {"max_grad_norm": config.max_grad_norm} if config else {}
                ddp = setup(
                    comm, models, optimizers, scheduler, shares=SHARES[world_size], **options
                )
                opened.append(ddp)
                return ddp

        opened: list[Ddp] = []
        model, figure = main_of(f"{name}_ported", {"Ddp": Injected})()
        opened[0].close()
        return flatten(model), figure

    return run_team(world_size, body)


def _initial_parameters(name: str) -> list[Tensor]:
    class Seen(Exception):
        pass

    def look(models: Any, *_: Any, **__: Any) -> Ddp:
        parts = models if isinstance(models, list) else [models]
        raise Seen([p.detach().clone() for part in parts for p in part.parameters()])

    main = main_of(f"{name}_ported", {"Ddp": type("Look", (), {"setup": staticmethod(look)})})
    try:
        main()
    except Seen as seen:
        parameters: list[Tensor] = seen.args[0]
        return parameters
    raise AssertionError("the script has no Ddp.setup")


@pytest.fixture
def double_precision() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", PORTS)
def test_one_rank_is_the_original(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, figure = run_plain(name, monkeypatch)
    [(parameters, own)] = run_ported(name, 1)
    # Adam divides small numbers by small numbers: single precision keeps four digits of that.
    assert float((parameters - expected).norm() / expected.norm()) < 1e-4
    assert own == pytest.approx(figure, rel=1e-3)


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("name", PORTS)
def test_unequal_ranks_are_the_original(
    name: str, world_size: int, double_precision: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = run_plain(name, monkeypatch)
    for parameters, _ in run_ported(name, world_size):
        assert float((parameters - expected).norm() / expected.norm()) < 1e-8
