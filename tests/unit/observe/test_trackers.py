"""The sinks for W&B and MLflow in the documents, with modules that stand in for these packages."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from evener.observe.events import Sink, make_event
from helpers.event_cases import committed_window, started
from helpers.markdown import blocks
from helpers.source import ROOT


def sink_of(module: str) -> Sink:
    """The sink of the one block that imports a module."""
    text = (ROOT / "docs/porting.md").read_text(encoding="utf-8")
    (block,) = (b for b in blocks(text) if b.text.startswith(f"import {module}\n"))
    names: dict[str, Any] = {}
    exec(block.text, names)  # it is ours
    (made,) = (
        value for value in names.values() if isinstance(value, type) and value.__base__ is Sink
    )
    return made()


def feed(sink: Sink) -> None:
    slow = {"rank": 1, "member": "b", "window": 0, "compute_s": 2.0, "expected_s": 1.0}
    with sink:
        for event in (
            started(),
            committed_window(0) | {"loss": 2.0, "lr": 0.1},
            make_event("straggler", t=1.0, **slow, cause="it waits for its data"),
            make_event("eval", t=2.0, window=1, name="heldout", loss=1.5, weight=1.0, elapsed_s=1),
        ):
            sink.emit(event)


def test_weights_and_biases(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []
    run = SimpleNamespace(
        config=SimpleNamespace(update=lambda facts, **_: said.append(facts["policy"])),
        log=lambda numbers, step: said.append((step, numbers)),
        alert=lambda title, text: said.append(text),
        finish=lambda: said.append("finished"),
    )
    stand_in = SimpleNamespace(init=lambda project: said.append(project) or run)
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    feed(sink_of("wandb"))
    window = {"train/loss": 2.0, "train/learning_rate": 0.1}
    waits = {"wait_s/rank_0": 0.2, "wait_s/rank_1": 0.0}
    assert said == [
        *("evener", "sync", (1, window | waits), "rank 1: it waits for its data"),
        *((1, {"eval/loss": 1.5}), "finished"),
    ]


def test_mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []
    stand_in = SimpleNamespace(
        log_params=lambda facts: said.append(facts["policy"]),
        log_metrics=lambda numbers, step: said.append((step, numbers)),
        end_run=lambda: said.append("ended"),
    )
    monkeypatch.setitem(sys.modules, "mlflow", stand_in)
    feed(sink_of("mlflow"))
    window = {"train/loss": 2.0, "train/learning_rate": 0.1}
    assert said == ["sync", (1, window), (1, {"eval/loss": 1.5}), "ended"]
