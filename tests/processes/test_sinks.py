"""A user's own sink gets the same events, however the run is started."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from evener import ConfigError, Ddp, DdpConfig, pretrain
from evener.observe.following import read_events
from helpers.ranks import Rank, run_ranks
from helpers.sinks import Kept

DATA = torch.arange(24.0).view(8, 3)


class Broken(Kept):
    def emit(self, event: Any) -> None:
        raise OSError("no space left")


def line() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def train(rank: Rank, folder: str) -> tuple[list[dict[str, Any]], int, list[str]]:
    """Two sinks of which one is made on rank 0 alone; a checkpoint in between."""
    made: list[Kept] = []

    def make() -> Kept:
        made.append(Kept())
        return made[-1]

    given = Kept()
    model, optimizer = line()
    config = DdpConfig(partition_ratios=(3, 1)[: rank.world_size])
    with Ddp.setup(
        model, optimizer, devices="cpu", config=config, quiet=True, sinks=[Broken(), given, make]
    ) as ddp:
        loader = ddp.loader(DATA, batch_size=4)
        for epoch in range(2):
            for batch in loader.epoch(epoch):
                ddp.backward(model(batch).square().mean())
                ddp.step()
            ddp.save(folder)
    assert len(made) == (rank.rank == 0)
    assert [sink.events for sink in made] == [given.events] * len(made)
    return given.events, given.closed, given.kinds


def test_a_sink_in_a_loop_of_ones_own(tmp_path: Path) -> None:
    (events, closed, kinds), (others, _, _) = run_ranks(train, 2, str(tmp_path))
    assert (others, closed) == ([], 1)
    assert kinds == [
        *("run_started", "worker_started", "worker_started", "plan", "window", "window"),
        *("checkpoint", "window", "window", "checkpoint", "run_finished"),
    ]
    started, windows = events[0], [e for e in events if e["type"] == "window"]
    assert (started["policy"], started["num_samples"], started["window"]) == ("sync", 8, 0)
    assert [w["committed"] for w in windows] == [[[0, 4]], [[4, 8]]] * 2
    assert [[row["samples"] for row in w["ranks"]] for w in windows] == [[3, 1]] * 4
    assert windows[0]["loss"] == pytest.approx(
        sum(row["loss"] * row["weight"] for row in windows[0]["ranks"]) / 4
    )
    for event in (e for e in events if e["type"] == "checkpoint"):
        step = tmp_path / f"step-{event['window']}"
        size = sum(p.stat().st_size for p in step.iterdir() if p.name != "manifest.json")
        assert (event["path"], event["num_bytes"]) == (str(step), size)
    assert (events[-1]["reason"], events[-1]["window"]) == ("completed", 4)
    assert [e["t"] for e in events] == sorted(e["t"] for e in events)


def fail(sink: Kept, folder: Path, *, resume: bool) -> None:
    model, optimizer = line()
    with Ddp.setup(model, optimizer, devices="cpu", quiet=True, sinks=[sink]) as ddp:
        loader = ddp.loader(DATA, batch_size=4)
        if resume:
            ddp.load(folder)
        for batch in loader.epoch(0):
            ddp.backward(model(batch).square().mean())
            ddp.step()
            if not resume:
                ddp.save(folder)
            raise ZeroDivisionError("in the loop")


def test_a_sink_is_told_of_a_run_that_resumes_and_of_one_that_fails(tmp_path: Path) -> None:
    for resume, kinds in ((False, ["run_started"]), (True, ["run_resumed", "run_started"])):
        sink = Kept()
        with pytest.raises(ZeroDivisionError):
            fail(sink, tmp_path / "state", resume=resume)
        assert sink.kinds[: len(kinds)] == kinds
        assert sink.events[0]["window"] == resume
        if resume:
            assert sink.events[0]["path"] == str(tmp_path / "state" / "step-1")
        assert sink.events[-1]["reason"] == "failed"
        assert sink.events[-1]["message"] == "ZeroDivisionError: in the loop"
        assert sink.closed == 1


@pytest.mark.parametrize("devices", [["cpu"], ["cpu", "cpu"]])
def test_a_sink_of_a_managed_run_is_called_in_this_process(
    devices: list[str], tmp_path: Path
) -> None:
    sink = Kept()
    Ddp.builder(
        lambda device: nn.Linear(3, 1),
        lambda params: torch.optim.SGD(params, lr=0.01),
        lambda model, batch: model(batch).square().mean(),
        dataset=DATA,
        batch_size=4,
        num_epochs=1,
        devices=devices,
        quiet=True,
        checkpoint_dir=tmp_path,
    ).sinks([sink]).run().join()
    assert [k for k in sink.kinds if k != "plan"] == [
        *("run_started", *["worker_started"] * len(devices)),
        *("window", "window", "epoch", "checkpoint", "run_finished"),
    ]
    assert sink.events[-2]["path"] == str(tmp_path / "step-2")
    assert sink.events[-1]["reason"] == "completed"
    assert sink.closed == 1


def test_a_sink_is_named_in_yaml_by_an_import_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_tracking.py").write_text(
        "import json, evener\n"
        "class File(evener.Sink):\n"
        "    def __init__(self): self.file = open('seen.jsonl', 'w')\n"
        "    def emit(self, event): print(json.dumps(event), file=self.file)\n"
        "    def close(self): self.file.close()\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "text.txt").write_text("a b c d e f g h\n" * 400)
    keys: dict[str, Any] = {
        "name": "run",
        "data": {"path": "text.txt", "seq_len": 16},
        "model": {"type": "gpt2", "config": {"n_layer": 1, "n_head": 1, "n_embd": 8}},
        "batch_size": 4,
        "max_steps": 2,
        "sample": {"num_tokens": 0},
    }
    for path, why in (
        ("my_tracking", r"sinks\.0 is 'my_tracking'"),
        ("no_such:x", r"sinks\[0\] is 'no_such:x'"),
    ):
        with pytest.raises(ConfigError, match=f"sinks.*{why}|{why}"):
            pretrain({**keys, "sinks": [path]}, quiet=True)
    result = pretrain({**keys, "sinks": ["my_tracking:File"]}, quiet=True)
    seen = [json.loads(text) for text in (tmp_path / "seen.jsonl").read_text().splitlines()]
    assert seen == read_events(result.run_folder / "events.jsonl")
    sys.modules.pop("my_tracking")


@pytest.mark.parametrize(
    ("sinks", "why"),
    [
        ([3], "sinks holds 3, and 3 is not an evener.Sink: give a list of sinks"),
        ([lambda: 3], "lambda.* 3 is not an evener.Sink: give .* functions .* that return one"),
    ],
)
def test_what_is_no_sink_is_named(sinks: Any, why: str) -> None:
    model, optimizer = line()
    with pytest.raises(ConfigError, match=why):
        Ddp.setup(model, optimizer, devices="cpu", quiet=True, sinks=sinks)
