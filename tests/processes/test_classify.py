"""``evener classify`` from a file to a report, on several ranks, and what it refuses."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from helpers.classification import NEEDED, TINY_LLAMA, samples
from helpers.forking import Zygote
from helpers.lineage import check_exactly_once
from helpers.pretraining import RUN_TIMEOUT_S, RunFolder, be_evener, relative_difference
from helpers.ranks import Rank, RankTeam, run_ranks

NAMES = ["first", "second", "third"]
ADAPTER = "adapter/adapter_model.safetensors"

#: 48 samples for training make 7 windows an epoch, the last one of 6 samples.
TINY: dict[str, Any] = {
    "data": {"path": "train.jsonl", "heldout_path": "held.csv"},
    "model": TINY_LLAMA,
    "seq_len": 24,
    "precision": "fp32",
    "lora": {"rank": 4, "dropout": 0.0},
    "optimizer": {"lr": 2e-2},
    "batch_size": 7,
    "micro_batch_size": 3,
    "epochs": 2,
    "eval": {"every": 5},
    "checkpoint": {"every": 4, "keep_last": 9},
}
NUM_TRAIN, NUM_WINDOWS = 48, 14


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = [{"text": s.text, "label": NAMES[int(s.label)]} for s in samples(NUM_TRAIN)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    held = [f"{s.text},{NAMES[int(s.label)]}" for s in samples(20, first=900)]
    (tmp_path / "held.csv").write_text("\n".join(["text,label", *held]) + "\n")
    return tmp_path


def configure(folder: Path, name: str = "run.yaml", **changes: Any) -> str:
    (folder / name).write_text(yaml.safe_dump({**TINY, **changes}))
    return name


def run(folder: Path, *arguments: object, nproc: int = 1, fails: bool = False) -> str:
    """Runs the command on forked ranks; returns what rank 0 printed, or the error of the first."""
    Zygote.get().preload(*NEEDED)
    command = ["classify", *map(str, arguments)]
    with RankTeam(be_evener, nproc, str(folder), command) as team:
        outcomes = team.wait(RUN_TIMEOUT_S)
    codes = {outcome.value for outcome in outcomes if outcome.returned}
    assert codes in (({1}, {2}) if fails else ({0},)), "\n".join(o.story() for o in outcomes)
    return str(outcomes[0].output)


def classify_in_a_script(rank: Rank, folder: str) -> list[Any]:
    import evener

    os.chdir(folder)
    given = [evener.Sample(s.text, NAMES[int(s.label)]) for s in samples(NUM_TRAIN)]
    keys = {**TINY, "data": {"heldout_fraction": 0.25}, "name": "script", "max_steps": 3}
    results = [evener.classify(keys, given, quiet=True)]
    adapter_is_there = results[0].adapter.is_dir()  # for every rank, as soon as it returns
    keys["max_steps"] = 5
    rows = [{"body": s.text, "class": NAMES[int(s.label)]} for s in samples(NUM_TRAIN)]
    data = {"heldout_fraction": 0.25, "text_key": "body", "label_key": "class"}
    results.append(evener.classify({**keys, "data": data}, rows, resume=True, quiet=True))
    with pytest.raises(evener.CheckpointError, match="different data"):
        evener.classify(keys, given[1:], resume=True, quiet=True)
    with pytest.raises(evener.DataError, match=f"sample {NUM_TRAIN} lacks 'label'"):
        evener.classify(keys, [*given, {"text": "of no class"}], quiet=True)
    with pytest.raises(evener.ConfigError, match=r"'train\.jsonl', but samples are given"):
        evener.classify(TINY, given, quiet=True)
    with pytest.raises(evener.ConfigError, match=r"model\.path is missing"):
        evener.classify(None, given, quiet=True)
    return [*map(asdict, results), adapter_is_there]


@pytest.mark.long
def test_the_same_from_python_on_samples_in_memory(folder: Path) -> None:
    Zygote.get().preload(*NEEDED)
    first, other = run_ranks(classify_in_a_script, 2, str(folder), timeout_s=RUN_TIMEOUT_S)
    assert first == other
    begun, resumed, adapter_is_there = first
    assert adapter_is_there
    assert begun["labels"] == tuple(NAMES)
    assert begun["checkpoint"].name == "step-3"
    assert resumed["checkpoint"].name == "step-5"
    for result in (begun, resumed):
        assert folder / result["run_folder"] == folder / "runs" / "script"
    assert not resumed["stopped"]
    summary = json.loads((folder / "runs/script/summary.json").read_text())
    assert resumed["accuracy"] == summary["accuracy"]
    assert resumed["macro_f1"] == summary["macro_f1"]
    assert (folder / resumed["adapter"]).is_dir()
    assert (folder / resumed["merged"]).is_dir()


def test_a_run_on_two_unequal_ranks_leaves_an_adapter(folder: Path) -> None:
    said = run(folder, configure(folder), "--emulate-slow", "1:2", nproc=2)
    result = RunFolder(folder / "runs" / "run")
    summary = result.summary
    assert "held-out accuracy" in said
    assert summary["steps"] == NUM_WINDOWS
    assert summary["labels"] == NAMES
    assert summary["accuracy"] > summary["majority_accuracy"]
    for key in ("macro_f1", "linear_accuracy", "frozen_accuracy", "probe_accuracy"):
        assert 0 <= summary[key] <= 1
    assert sum(map(sum, summary["confusion"])) == summary["num_heldout"] == 20
    assert check_exactly_once(result.events, NUM_TRAIN, whole_epochs=2) == []
    # The same on one rank: the same samples in the same windows, sums in another order.
    run(folder, "run.yaml", "--name", "alone")
    assert relative_difference(folder / "runs" / "alone", result.path, ADAPTER) <= 1e-4


def test_a_resumed_run_ends_where_an_uninterrupted_one_does(folder: Path) -> None:
    configure(folder, eval={"every": 0})
    run(folder, "run.yaml", "--set", "optimizer.min_lr_ratio=1", "--name", "whole")
    run(folder, "run.yaml", "--set", "optimizer.min_lr_ratio=1", "--set", "max_steps=6")
    said = run(folder, "run.yaml", "--set", "optimizer.min_lr_ratio=1", "--resume", nproc=2)
    assert "nothing to do" not in said
    result = RunFolder(folder / "runs" / "run")
    assert result.summary["steps"] == NUM_WINDOWS
    # Warm-up is a part of the whole: shorter in the interrupted run, so only nearly the same.
    assert relative_difference(folder / "runs" / "whole", result.path, ADAPTER) <= 0.2
    again = ("run.yaml", "--set", "optimizer.min_lr_ratio=1", "--resume")
    assert "nothing to do" in run(folder, *again)
    # A full disk may have kept the run from writing what it is for.
    (result.path / "adapter").rename(result.path / "lost")
    assert "nothing to do" not in run(folder, *again)
    assert (result.path / "adapter" / "adapter_model.safetensors").read_bytes() == (
        result.path / "lost" / "adapter_model.safetensors"
    ).read_bytes()


def test_more_ranks_than_samples_take_over_the_head_of_the_first(folder: Path) -> None:
    held = (folder / "held.csv").read_text()
    texts = {line.rpartition(",")[2]: line for line in held.splitlines()}
    (folder / "few.csv").write_text("\n".join([texts["label"], texts["first"], texts["second"]]))
    rows = [line for line in held.splitlines() if not line.endswith(",third")]
    (folder / "held.csv").write_text("\n".join(rows) + "\n")
    data = {"path": "few.csv", "heldout_path": "held.csv"}
    configure(folder, data=data, batch_size=2, epochs=1, eval={"baseline": False})
    run(folder, "run.yaml", "--name", "few", nproc=3)
    summary = json.loads((folder / "runs" / "few" / "summary.json").read_text())
    assert summary["probe_accuracy"] is not None
    assert summary["num_train"] == 2


def test_a_finished_run_predicts_and_its_adapter_may_be_trained_on(folder: Path) -> None:
    run(folder, configure(folder, epochs=8))
    first = RunFolder(folder / "runs" / "run").summary
    assert first["start_accuracy"] is None
    model = {"path": "runs/run/base", "adapter": "runs/run/adapter"}
    run(folder, configure(folder, "more.yaml", model=model, max_steps=1, optimizer={"lr": 1e-9}))
    more = RunFolder(folder / "runs" / "more").summary
    # Not the figure of a random head, and the best so far.
    assert more["frozen_accuracy"] is None
    assert more["start_accuracy"] == more["accuracy"] == first["accuracy"]
    assert more["best_step"] == 0
    (folder / "texts.jsonl").write_text('{"text": "1 alpha beta"}\n"2 gamma delta"\n')
    (folder / "train.jsonl").unlink()  # what it was trained on is needed no more
    said = run(folder, "run.yaml", "--predict", "texts.jsonl", "--quiet")
    rows = [json.loads(line) for line in said.splitlines()]
    assert [row["label"] for row in rows] == ["first", "second"]
    assert all(0 < row["probability"] <= 1 for row in rows)


def test_a_checkpoint_of_another_base_or_adapter_is_refused(folder: Path) -> None:
    run(folder, configure(folder, max_steps=2))
    said = run(folder, "run.yaml", "--resume", "--set", "seq_len=20", fails=True)
    assert "different tokenizer (" in said
    assert "seq_len 24 -> 20" in said
    other = {**TINY_LLAMA, "config": {**TINY_LLAMA["config"], "initializer_range": 0.3}}
    configure(folder, max_steps=4, model=other)
    assert "different base model (" in run(folder, "run.yaml", "--resume", fails=True)
