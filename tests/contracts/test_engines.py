"""Examples for engines that start teams: manifests are valid, and commands are evener's own."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import get_args_parser

from evener import cli
from evener.team import coordinator, launch
from evener.team.coordinator_options import CoordinatorOptions
from evener.team.launch import LaunchPlan
from evener.team.nodes import Nodes
from helpers import slurm
from helpers.kubernetes import build, problems, read
from helpers.source import ROOT

EXAMPLES = ROOT / "examples"
MANIFESTS = EXAMPLES / "kubernetes"
TOKEN = "0123456789abcdef" * 4
#: Records its arguments instead of doing anything.
STAND_IN = f"""#!{sys.executable} -S
import json, os, sys
with open(os.environ["TEST_COMMANDS"], "a") as file:
    print(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]), file=file)
sys.exit(int(os.environ.get("TEST_CODE", 0)))
"""
#: Runs a command in a folder of the box's own.
SSH = """#!/bin/bash
mkdir -p "boxes/$1" && cd "boxes/$1" && exec bash -c "$2"
"""


def manifests() -> dict[str, dict[str, Any]]:
    """Each manifest of the examples, by kind and name, as a server receives it."""
    documents = [*build(MANIFESTS), *build(MANIFESTS / "unequal")]
    documents += [*read(MANIFESTS / "jobset.yaml"), *read(MANIFESTS / "trainjob.yaml")]
    return {f"{one['kind']} {one['metadata']['name']}": one for one in documents}


# ── Kubernetes ───────────────────────────────────────────────────────────────────────────────────


def test_manifests_are_valid() -> None:
    found = manifests()
    assert {*found} == {
        "Service evener-coordinator",
        "StatefulSet evener-coordinator",
        "PersistentVolumeClaim evener-work",
        "Job evener-workers",
        "Job evener-workers-large",
        "Job evener-workers-small",
        "JobSet evener",
        "TrainJob evener",
    }
    assert [problem for document in found.values() for problem in problems(document)] == []
    job = found["Job evener-workers"]
    for wrong in ({"kind": "Jobs"}, {"sepc": {}}, {"spec": {**job["spec"], "completions": "2"}}):
        assert problems(job | wrong), wrong


def test_unequal_pools_start_a_worker_for_each_gpu() -> None:
    found = manifests()
    pools = {}
    for pool in ("large", "small"):
        spec = found[f"Job evener-workers-{pool}"]["spec"]
        assert spec["completions"] == spec["parallelism"]
        pod = spec["template"]["spec"]
        assert pod["nodeSelector"] == {"pool": pool}
        (container,) = pod["containers"]
        (nproc,) = container["env"]
        pools[pool] = (spec["completions"], nproc["value"])
        assert str(container["resources"]["limits"]["nvidia.com/gpu"]) == nproc["value"]
    assert pools == {"large": (2, "4"), "small": (3, "1")}


# ── commands ─────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What evener would start: plans of launches, options of coordinators."""
    found: list[Any] = []
    monkeypatch.setattr(launch, "launch", lambda command, plan: found.append(plan) or 0)
    monkeypatch.setattr(coordinator, "coordinate", lambda options: found.append(options) or 0)
    for variable in ("RANK", "WORLD_SIZE", "SLURM_JOB_ID", "EVENER_LAUNCHED"):
        monkeypatch.delenv(variable, raising=False)
    return found


def test_node_0_of_a_train_job_runs_the_coordinator(
    started: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trainer = manifests()["TrainJob evener"]["spec"]["trainer"]
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run.yaml"
    run.write_text((EXAMPLES / "pretrain.yaml").read_text())
    for variable, value in {
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
        "PET_NODE_RANK": "1",
        "PET_MASTER_ADDR": "evener-node-0-0.evener",
        "PET_MASTER_PORT": "29500",
    }.items():
        monkeypatch.setenv(variable, value)
    words = [word.replace("/team/run.yaml", str(run)) for word in trainer["command"][1:]]
    assert cli.main(words) == 0
    (plan,) = started
    assert plan.elastic == "1:64"
    assert plan.nproc == 1
    assert (plan.nodes.number, plan.nodes.most) == (1, 2)
    assert (plan.nodes.host, plan.nodes.port) == ("evener-node-0-0.evener", 29500)


class Engine:
    """A folder in which the programs of engines only record what they are given."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._log = folder, folder / "commands.jsonl"
        programs = slurm.install(folder / "bin")
        for name in ("evener", "scontrol", "torchrun"):
            (programs / name).write_text(STAND_IN)
            (programs / name).chmod(0o755)
        (programs / "ssh").write_text(SSH)
        (programs / "ssh").chmod(0o755)
        (folder / "examples").symlink_to(EXAMPLES)
        path = f"{programs}{os.pathsep}{os.environ['PATH']}"
        source = str(ROOT / "src")
        self.environ = os.environ | {
            "PATH": path,
            "HOME": str(folder),
            "PYTHONPATH": source,
            "TEST_COMMANDS": str(self._log),
        }

    def run(self, *command: str, code: int = 0, **environ: str) -> list[list[str]]:
        """Runs a command to its end; returns what was started, in any order."""
        ended = subprocess.run(
            command,
            cwd=self.folder,
            env=self.environ | environ,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == code, ended.stderr
        return [json.loads(line) for line in self._log.read_text().splitlines()]


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return Engine(tmp_path)


def plans(started: list[Any], commands: list[list[str]]) -> list[Any]:
    """What evener makes of the commands that were meant for it."""
    for name, *words in commands:
        if name == "evener":
            assert cli.main(words) == 0, words
    return started


@pytest.mark.parametrize(("code", "requeued"), [(0, 0), (138, 1), (75, 1), (1, 0)])
def test_a_slurm_job_starts_a_launcher_on_each_node(
    engine: Engine, started: list[Any], monkeypatch: pytest.MonkeyPatch, code: int, requeued: int
) -> None:
    commands = engine.run(
        "bash",
        "examples/pretrain_elastic.sbatch",
        code=code,
        TEST_CODE=str(code),
        SLURM_GPUS_ON_NODE="2",
        **slurm.batch_environment([["new1"], ["old1", "old2"]], 4711),
    )
    assert commands.count(["scontrol", "requeue", "4711"]) == requeued
    monkeypatch.chdir(engine.folder)
    (engine.folder / ".token-4711").write_text(TOKEN)  # the script has removed its own
    (engine.folder / ".token-4711").chmod(0o600)
    made = plans(started, commands)
    (serves,) = [one for one in made if isinstance(one, CoordinatorOptions)]
    joins = [one for one in made if isinstance(one, LaunchPlan)]
    assert (serves.host, serves.port, serves.token) == ("new1", 24711, TOKEN.encode())
    assert [(plan.join, plan.nproc) for plan in joins] == [("new1:24711", 2)] * 3


def test_ssh_starts_a_launcher_on_each_box(
    engine: Engine, started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = engine.run("bash", "examples/launch/ssh.sh", "10.0.0.5:29600", "big:4", "old:1")
    monkeypatch.chdir(engine.folder)
    made = plans(started, commands)
    joins = [one for one in made if isinstance(one, LaunchPlan)]
    assert sorted((plan.join, plan.nproc) for plan in joins) == [
        ("10.0.0.5:29600", 1),
        ("10.0.0.5:29600", 4),
    ]
    token = (engine.folder / "token").read_bytes()
    for box in ("big", "old"):
        copied = engine.folder / "boxes" / box / "work" / "token"
        assert (copied.read_bytes(), copied.stat().st_mode & 0o777) == (token, 0o600)


def test_torchrun_meets_by_c10d(engine: Engine) -> None:
    ((_, *words),) = engine.run(
        "bash", "examples/launch/torchrun.sh", "10.0.0.5:29500", "--set", "max_steps=4", NPROC="3"
    )
    read = get_args_parser().parse_args(words)
    assert (read.nnodes, read.nproc_per_node, read.no_python) == ("2", "3", True)
    assert (read.rdzv_backend, read.rdzv_endpoint) == ("c10d", "10.0.0.5:29500")
    assert [read.training_script, *read.training_script_args][-3:] == [
        "examples/pretrain_machines.yaml",
        "--set",
        "max_steps=4",
    ]


def test_a_dstack_task_is_one_team_on_unlike_nodes(
    engine: Engine, started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    task = yaml.safe_load((EXAMPLES / "launch" / "dstack.yaml").read_text())
    # What may stand in a group and beside groups, by dstack's reference.
    assert {*task} <= {"type", "name", "image", "env", "volumes", "retry", "groups"}
    for group in task["groups"]:
        assert {*group} == {"name", "nodes", "resources", "commands"}
    assert len({json.dumps(group["resources"]) for group in task["groups"]}) == 2
    ranks = [group for group in task["groups"] for _ in range(group["nodes"])]
    for rank, group in enumerate(ranks):
        script = "\n".join(group["commands"]).replace("/team", str(engine.folder))
        commands = engine.run(
            *("bash", "-c", script),
            EVENER_TOKEN=TOKEN,
            DSTACK_NODES_NUM=str(len(ranks)),
            DSTACK_NODE_RANK=str(rank),
            DSTACK_MASTER_NODE_IP="10.0.0.7",
        )
    monkeypatch.chdir(engine.folder)
    (engine.folder / "run.yaml").write_text((EXAMPLES / "pretrain.yaml").read_text())
    made = plans(started, commands)
    assert [plan.nodes for plan in made] == [
        Nodes(least=3, most=3, number=rank, host="10.0.0.7", port=29600) for rank in range(3)
    ]
    assert {plan.elastic for plan in made} == {"1:64"}


def test_a_skypilot_task_joins(
    engine: Engine, started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (EXAMPLES / "launch" / "skypilot.yaml").read_text()
    task = yaml.safe_load(text)
    # Names of SkyPilot's YAML specification.
    assert {*task} <= {
        *("name", "num_nodes", "resources", "envs", "secrets", "file_mounts", "setup", "run")
    }
    given = dict.fromkeys([*task["envs"], *task["secrets"]], TOKEN) | {"COORDINATOR": "10.0.0.5:1"}
    assert all(f"--env {name}" in text or f"--secret {name}" in text for name in given)
    script = task["run"].replace("/team", str(engine.folder))
    commands = engine.run("bash", "-c", script, SKYPILOT_NUM_GPUS_PER_NODE="4", **given)
    monkeypatch.chdir(engine.folder)
    (plan,) = plans(started, commands)
    assert (plan.join, plan.nproc) == ("10.0.0.5:1", 4)
    assert plan.token_file.read_text() == TOKEN
    # What the comment says about the coordinator is a command of evener, too.
    (engine.folder / "token").write_text(TOKEN)
    (engine.folder / "token").chmod(0o600)
    (line,) = re.findall(r"^#     evener (.+)$", text, re.MULTILINE)
    assert cli.main(shlex.split(line)) == 0
