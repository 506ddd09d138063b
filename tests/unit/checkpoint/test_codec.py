import json
import math
from typing import Any

import pytest
import torch

from evener.checkpoint.codec import decode, encode
from evener.errors import CheckpointError

CASES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "adam": (torch.optim.Adam, {"lr": 0.1 + 0.2}),
    "adamw-fused": (torch.optim.AdamW, {"fused": True}),
    "adagrad": (torch.optim.Adagrad, {}),
    "adafactor": (torch.optim.Adafactor, {}),
    "muon": (torch.optim.Muon, {}),
    "lbfgs-wolfe": (torch.optim.LBFGS, {"max_iter": 4, "line_search_fn": "strong_wolfe"}),
}


def flatten_optimizer(state: dict[str, Any]) -> tuple[dict[str, torch.Tensor], Any]:
    tensors: dict[str, torch.Tensor] = {}
    return tensors, {key: encode(one, path=key, tensors=tensors) for key, one in state.items()}


def unflatten_optimizer(tensors: dict[str, torch.Tensor], document: Any) -> dict[str, Any]:
    return {key: decode(one, tensors=tensors) for key, one in document.items()}


def build(name: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    kind, options = CASES[name]
    model = torch.nn.Linear(5, 4, bias=name != "muon")
    return model, kind(model.parameters(), **options)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        x = torch.randn(8, 5, generator=torch.Generator().manual_seed(step))

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).pow(2).sum()
            loss.backward()
            return loss

        optimizer.step(closure)


def assert_same(ours: Any, theirs: Any, path: str = "") -> None:
    assert type(ours) is type(theirs), path
    if isinstance(ours, torch.Tensor):
        assert ours.dtype == theirs.dtype, path
        assert torch.equal(ours, theirs), path
    elif isinstance(ours, dict):
        assert list(ours) == list(theirs), path
        for key in ours:
            assert_same(ours[key], theirs[key], f"{path}.{key}")
    elif isinstance(ours, list | tuple):
        assert len(ours) == len(theirs), path
        for index, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            assert_same(mine, other, f"{path}.{index}")
    else:
        assert ours == theirs, path


def through_json(document: Any) -> Any:
    return json.loads(json.dumps(document, allow_nan=False))


@pytest.mark.parametrize("name", CASES)
def test_state_of_every_optimizer_comes_back_bit_for_bit_and_trains_on_alike(name: str) -> None:
    model, optimizer = build(name)
    train(model, optimizer, range(3))
    state = optimizer.state_dict()
    assert name == "sgd" or state["state"], "an optimizer without state tests nothing"

    tensors, document = flatten_optimizer(state)
    tensors = {key: value.clone() for key, value in tensors.items()}
    restored = unflatten_optimizer(tensors, through_json(document))
    assert_same(restored, state)

    other_model, other_optimizer = build(name)
    other_model.load_state_dict(model.state_dict())
    other_optimizer.load_state_dict(restored)
    train(model, optimizer, range(3, 6))
    train(other_model, other_optimizer, range(3, 6))
    assert_same(other_model.state_dict(), model.state_dict())
    assert_same(other_optimizer.state_dict(), optimizer.state_dict())


def test_awkward_values_keep_type_and_value() -> None:
    state = {
        "state": {
            0: {"a": float("inf"), "b": -0.0, "c": 5e-324, "d": (1, (2.5, None)), "e": 1 << 80},
            "0": {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}},
        },
        "param_groups": [{"betas": (0.9, 0.1 + 0.2), "$odd": True, "params": [0, 1]}],
    }
    tensors, document = flatten_optimizer(state)
    assert len(tensors) == 2
    restored = unflatten_optimizer(tensors, through_json(document))
    assert_same(restored, state)
    assert math.copysign(1.0, restored["state"][0]["b"]) == -1.0


def test_object_that_would_need_pickle_is_refused_by_path() -> None:
    with pytest.raises(CheckpointError, match=r"state\.7\.hook is of type function"):
        flatten_optimizer({"state": {7: {"hook": lambda: 0}}, "param_groups": []})


def test_a_missing_tensor_is_refused() -> None:
    _, document = flatten_optimizer({"state": {0: {"m": torch.ones(2)}}, "param_groups": []})
    with pytest.raises(KeyError, match=r"state\.0\.m"):
        unflatten_optimizer({}, document)
