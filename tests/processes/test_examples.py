"""The configurations of examples/ train on CPU ranks."""

import json
from pathlib import Path

import pytest

from helpers.classification import NEEDED, TINY_LLAMA, samples
from helpers.forking import Zygote
from helpers.pretraining import (
    LLAMA,
    RUN_TIMEOUT_S,
    Lab,
    be_evener,
)
from helpers.ranks import RankTeam
from helpers.source import ROOT

pytestmark = pytest.mark.timeout(500)

#: Less of everything, and text that is there at once; all else is as the file says.
SMALL = {
    "data.path": "corpus",
    "data.seq_len": 32,
    "model.config": LLAMA,
    "batch_size": 4,
    "micro_batch_size": 2,
    "eval.max_sequences": 4,
    "sample.num_tokens": 4,
    "devices": "cpu",
    "timeout_s": 60,
}


def settings(**changes):
    """``--set`` for each key."""
    pairs = {**SMALL, **{key.replace("__", "."): value for key, value in changes.items()}}
    return [word for key, value in pairs.items() for word in ("--set", f"{key}={value}")]


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    lab = Lab(tmp_path_factory.mktemp("lab"))
    (lab.folder / "examples").symlink_to(ROOT / "examples")
    yield lab
    lab.close()


@pytest.mark.parametrize(
    ("example", "changes", "nproc"),
    [
        ("pretrain.yaml", {}, 1),
        ("pretrain_two_cards.yaml", {"data__vocab_size": 300}, 2),
        ("pretrain_machines.yaml", {"anchor": 1}, 3),
    ],
)
def test_a_configuration_trains(lab, example, changes, nproc):
    name = f"{Path(example).stem}-{nproc}"
    options = ("--name", name, *settings(**changes, max_steps=4))
    lab.run(f"examples/{example}", *options, nproc=nproc)
    run = lab.path_of(name)
    assert run.summary["world_size"] == nproc
    assert run.summary["steps"] == 4
    start, end = run.checkpoints
    assert start.name == "step-0"
    assert end.name == f"step-{run.of_type('window')[-1]['window'] + 1}"


def test_a_classifier_trains(tmp_path):
    rows = [{"text": s.text, "label": f"class {s.label}"} for s in samples(60)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    changes = ["data.path=train.jsonl", f"model={TINY_LLAMA}", "seq_len=24", "max_steps=2"]
    command = ["classify", "examples/classify.yaml", *(w for c in changes for w in ("--set", c))]
    Zygote.get().preload(*NEEDED)
    with RankTeam(be_evener, 2, str(tmp_path), command) as team:
        outcomes = team.wait(RUN_TIMEOUT_S)
    assert [outcome.value for outcome in outcomes] == [0, 0], outcomes[0].story()
    summary = json.loads((tmp_path / "runs" / "classify" / "summary.json").read_text())
    assert (summary["steps"], summary["world_size"]) == (2, 2)
