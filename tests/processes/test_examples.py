"""What examples/ holds runs: configurations on CPU ranks, batch scripts with a stand-in srun."""

import json
import os
import sys
from pathlib import Path

import pytest

from helpers import slurm
from helpers.classification import NEEDED, TINY_LLAMA, samples
from helpers.forking import Zygote
from helpers.lineage import check_exactly_once
from helpers.pretraining import (
    LLAMA,
    NUM_SAMPLES,
    RUN_TIMEOUT_S,
    Lab,
    be_evener,
    relative_difference,
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
    lab.sandbox.environ["PATH"] = os.pathsep.join(
        [
            str(slurm.install(lab.folder / "bin")),
            str(Path(sys.executable).parent),
            lab.sandbox.environ["PATH"],
        ]
    )
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


# ── batch scripts ────────────────────────────────────────────────────────────────────────────────


def submit(lab, script, layout, *arguments):
    """Runs a batch script as SLURM would; what it printed."""
    before = dict(lab.sandbox.environ)
    lab.sandbox.environ |= slurm.batch_environment(layout, slurm.free_job())
    lab.sandbox.environ["NAME"] = "job"
    try:
        ended = lab.sandbox.start("bash", f"examples/{script}", *arguments).end(RUN_TIMEOUT_S)
    finally:
        lab.sandbox.environ = before
    assert ended.code == 0, ended.out + ended.err
    return ended.out + ended.err


@pytest.mark.long
def test_a_job_on_two_nodes_goes_on_as_a_heterogeneous_one(lab):
    """The second script finds the checkpoint of the first, on another number of ranks.

    There, task 0 is on the node of component 0, which comes last by name.
    """
    # A learning rate that does not depend on the number of steps.
    constant = {"optimizer.warmup": 0, "optimizer.min_lr_ratio": 1}
    changes = {"policy": "sync", "checkpoint.every": 1, **constant}
    alike = [{"127.0.0.1": 1, "127.0.0.2": 1}]
    submit(lab, "pretrain.sbatch", alike, *settings(max_steps=2, **changes))
    run = lab.path_of("job")
    assert (run.summary["steps"], run.summary["world_size"]) == (2, 2)
    unlike = [{"127.0.0.2": 1}, {"127.0.0.1": 2}]
    said = submit(lab, "pretrain_hetjob.sbatch", unlike, *settings(max_steps=4, **changes))
    assert "team of 3: 3 CPU ranks" in said
    assert (run.summary["steps"], run.summary["world_size"]) == (4, 3)
    assert [event["rank"] for event in run.of_type("worker_started")] == [0, 1, 0, 1, 2]
    assert check_exactly_once(run.events, NUM_SAMPLES, whole_epochs=0) == []
    example = "examples/pretrain_machines.yaml"
    lab.run(example, "--name", "alone", *settings(max_steps=4, **changes))
    alone = lab.path_of("alone")
    # float32 sums in another order, over 4 steps of AdamW
    assert relative_difference(run.checkpoints[-1], alone.checkpoints[-1]) <= 1e-5
