"""Functions and data on their way into worker processes, and messages back."""

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from evener.engine.results import Progress
from evener.errors import ConfigError, LaunchError
from evener.managed.trained import TrainedState, capture_trained, read_trained, write_trained
from evener.managed.travel import anonymous_file, pack, unpack


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


def test_what_cannot_travel_is_named():
    lock = threading.Lock()

    def numbers() -> Iterator[int]:
        yield 1

    for option, value, what in (
        ("train_fn", lambda: lock, "_thread.lock"),
        ("epoch_fn", lambda x=lock: x, "_thread.lock"),
        ("dataset", numbers(), "generator"),
    ):
        words = f"^{option} cannot be pickled for the workers: TypeError: .*{what}.* create it"
        with pytest.raises(ConfigError, match=words):
            pack({"model_fn": len, option: value, "eval_fn": lambda: lock})


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
    with anonymous_file() as file:
        document = json.loads(json.dumps(write_trained(capture_trained(model, progress), file)))
        state = read_trained(document, file)
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
