"""Functions and data on their way into worker processes, and messages back."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from evener.engine.results import Progress
from evener.errors import ConfigError, LaunchError
from evener.managed.trained import TrainedState, capture_trained, pack_trained, unpack_trained
from evener.managed.travel import pack, unpack


def carried(**parts: Any) -> dict[str, Any]:
    with pack(parts) as file:
        return unpack(file.fileno())


def run_cell(source: str) -> dict[str, Any]:
    """Runs source as a notebook cell would: names of ``__main__`` that no module holds."""
    cell: dict[str, Any] = {"__name__": "__main__"}
    exec(source, cell)
    return cell


def test_lambdas_closures_and_cells_travel_and_share_what_they_shared():
    factor = 3
    cell = run_cell(
        "total = []\n"
        "class Point:\n    def __init__(self, x): self.x = x\n"
        "def add(x): total.append(Point(x)); return len(total)\n"
        "def last(): return total[-1].x\n"
    )
    arrived = carried(triple=lambda x: factor * x, add=cell["add"], last=cell["last"], n=5)
    assert arrived["triple"](2) == 6
    assert arrived["n"] == 5
    assert arrived["add"](7) == 1
    assert arrived["last"]() == 7, "both see one list"
    assert cell["total"] == [], "which is a copy"


class Holder:
    def __init__(self, held: object) -> None:
        self.held = held


def test_what_cannot_travel_is_named():
    lock = threading.Lock()

    def inner() -> Any:
        return lock

    cases = {
        "'lock' in train_fn (a _thread.lock)": {"model_fn": len, "train_fn": lambda: lock},
        "'lock' in 'inner' in eval_fn (a _thread.lock)": {"eval_fn": lambda: inner()},
        "'held' in dataset (a _thread.lock)": {"dataset": Holder(lock)},
        "a default value in epoch_fn (a _thread.lock)": {"epoch_fn": lambda x=lock: x},
    }
    for message, parts in cases.items():
        with pytest.raises(ConfigError, match=r"create it inside the function") as caught:
            pack(parts)
        assert str(caught.value).startswith(f"{message} cannot travel to the worker processes")
        assert "cannot pickle" in str(caught.value)


def test_a_cell_names_its_global():
    cell = run_cell("import threading\ngate = threading.Lock()\ndef train(): return gate\n")
    with pytest.raises(ConfigError, match="'gate' in train_fn"):
        pack({"train_fn": cell["train"]})


def test_an_iterator_that_cannot_travel_is_named_itself():
    def numbers() -> Iterator[int]:
        yield 1

    with pytest.raises(ConfigError, match=r"dataset cannot travel .*generator"):
        pack({"dataset": numbers()})


def test_a_module_that_is_missing_there_is_named():
    class Absent:
        def __reduce__(self) -> tuple[Any, ...]:
            return __import__, ("module_that_is_not_there",)

    with pytest.raises(LaunchError, match="No module named 'module_that_is_not_there'"):
        carried(dataset=Absent())


# ── messages ─────────────────────────────────────────────────────────────────────────────────────


class Various(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3).bfloat16()
        self.tied = nn.Linear(3, 3, bias=False).bfloat16()
        self.tied.weight = self.a.weight
        self.frozen = nn.Parameter(torch.arange(5).double(), requires_grad=False)
        self.scalar = nn.Parameter(torch.tensor(2.5))
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("none", torch.zeros(0, 4))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("complex", torch.tensor([1 + 2j]))
        self.register_buffer("scratch", torch.ones(2), persistent=False)

    def get_extra_state(self) -> Any:
        return {"version": 3, "names": ("a", "b")}

    def set_extra_state(self, state: Any) -> None:
        self.loaded = state


def test_a_model_comes_back_as_it_was():
    model = Various()
    with torch.no_grad():
        model.a.weight.fill_(1.5)
    progress = Progress(window=4, steps=3, samples=30, weight=30.0)
    document, parts = pack_trained(capture_trained(model, progress))
    state = unpack_trained(document, bytearray(b"".join(parts)))
    assert isinstance(state, TrainedState)
    assert state.progress == progress
    assert set(state.params) == {"a.weight", "a.bias", "tied.weight", "frozen", "scalar"}
    assert set(state.buffers) == {"flags", "none", "count", "complex"}
    assert state.params["a.weight"] is state.params["tied.weight"], "tied weights stay tied"
    fresh = Various()
    fresh.load_state_dict(state.state_dict())
    for name, value in model.state_dict().items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(fresh.state_dict()[name], value), name
    assert fresh.loaded == {"version": 3, "names": ("a", "b")}
