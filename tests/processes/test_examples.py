"""What examples/ holds runs: configurations on CPU ranks, batch scripts with a stand-in srun."""

import os
import sys
from pathlib import Path

import pytest

from evener.observe.lineage import check_exactly_once
from helpers import slurm
from helpers.pretraining import LLAMA, RUN_TIMEOUT_S, Lab
from helpers.source import ROOT

pytestmark = pytest.mark.timeout(300)

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
    ("example", "changes"),
    [
        ("pretrain.yaml", {}),
        ("pretrain_two_cards.yaml", {"data__vocab_size": 300}),
        ("pretrain_machines.yaml", {"anchor": 1}),
    ],
)
def test_a_configuration_trains(lab, example, changes):
    stem = Path(example).stem
    name = ("--name", stem)
    lab.run(f"examples/{example}", *name, *settings(**changes, max_steps=4), nproc=2)
    run = lab.path_of(stem)
    assert run.summary["world_size"] == 2
    assert run.summary["steps"] == 4
    assert len(run.checkpoints) == 1


# ── batch scripts ────────────────────────────────────────────────────────────────────────────────


def submit(lab, script, name, layout, *arguments):
    """Runs a batch script as SLURM would; what it printed."""
    before = dict(lab.sandbox.environ)
    lab.sandbox.environ |= slurm.batch_environment(layout, 4000 + os.getpid() % 5000)
    lab.sandbox.environ["NAME"] = name
    try:
        ended = lab.sandbox.start("bash", f"examples/{script}", *arguments).end(RUN_TIMEOUT_S)
    finally:
        lab.sandbox.environ = before
    assert ended.code == 0, ended.out + ended.err
    return ended.out + ended.err


def test_a_job_on_two_nodes_and_the_same_script_again(lab):
    """The second time it goes on from the checkpoint."""
    layout = [{"127.0.0.1": 1, "127.0.0.2": 1}]
    submit(lab, "pretrain.sbatch", "job", layout, *settings(max_steps=2, policy="sync"))
    run = lab.path_of("job")
    assert run.summary["steps"] == 2
    submit(lab, "pretrain.sbatch", "job", layout, *settings(max_steps=3, policy="sync"))
    assert run.summary["steps"] == 3
    assert run.summary["world_size"] == 2
    assert len(run.of_type("worker_started")) == 2 * 2
    assert check_exactly_once(run.events, 60, whole_epochs=0) == []


def test_a_heterogeneous_job_is_one_team(lab):
    """Task 0 is on the node of component 0, which comes last by name."""
    layout = [{"127.0.0.2": 1}, {"127.0.0.1": 2}]
    said = submit(lab, "pretrain_hetjob.sbatch", "het", layout, *settings(max_steps=3, anchor=1))
    run = lab.path_of("het")
    assert run.summary["world_size"] == 3
    assert run.summary["steps"] == 3
    assert "team of 3: 3 CPU ranks" in said
