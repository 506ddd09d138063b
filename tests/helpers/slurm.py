"""A stand-in for SLURM: ``srun`` that starts tasks on this machine, and what sbatch would set.

Variables have the values that SLURM's own srun and slurmstepd give them: in a step over components
of a heterogeneous job, counts are those of all components, tasks are numbered component by
component, and the list of nodes is sorted by name. An option that is not known here is an error.

    python slurm.py [OPTIONS] COMMAND ARGS [: [OPTIONS] COMMAND ARGS]
"""

import json
import os
import random
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

#: The nodes of each component and the number of tasks on each, as JSON: ``[{"node": 2}, ...]``.
LAYOUT = "TEST_SLURM_LAYOUT"

Layout = Sequence[Mapping[str, int]]

_FLAGS = ("--kill-on-bad-exit=0", "--no-kill", "--cpus-per-task", "--het-group")


def install(folder: Path) -> Path:
    """Puts ``srun`` into a folder, for PATH."""
    folder.mkdir()
    script = folder / "srun"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{__file__}" "$@"\n')
    script.chmod(0o755)
    return folder


def free_job() -> int:
    """Number of a job whose first step meets on a port that is free: SLURM gives no choice."""
    from evener.team.slurm import PORTS

    draw = random.SystemRandom()  # not the tests' own seed: other tests run at the same time
    while True:
        job = draw.randrange(1, 1_000_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", PORTS[job % len(PORTS)]))
            return job


def batch_environment(layout: Layout, job: int) -> dict[str, str]:
    """What a batch script sees."""
    environ = {
        LAYOUT: json.dumps(layout),
        "SLURM_JOB_ID": str(job),
        "SLURM_JOBID": str(job),
        "SLURM_STEP_ID": "4294967291",  # the batch script is a step, too
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
        "SLURM_GTIDS": "0",
        "SLURM_NTASKS": str(sum(layout[0].values())),
        "SLURM_CPUS_PER_TASK": "1",
        "SLURM_JOB_NODELIST": ",".join(layout[0]),
        "SLURMD_NODENAME": next(iter(layout[0])),
    }
    if len(layout) > 1:
        environ["SLURM_HET_SIZE"] = str(len(layout))
        for number, component in enumerate(layout):
            for kind in ("HET", "PACK"):
                group = f"{kind}_GROUP_{number}"
                environ[f"SLURM_JOB_ID_{group}"] = str(job + number)
                environ[f"SLURM_JOB_NODELIST_{group}"] = ",".join(component)
                environ[f"SLURM_CPUS_PER_TASK_{group}"] = "1"
    return environ


@dataclass(frozen=True)
class _Task:
    command: Sequence[str]
    environ: Mapping[str, str]


def parse(arguments: Sequence[str]) -> dict[int, list[str]]:
    """The command of each component that takes part."""
    commands: dict[int, list[str]] = {}
    blocks: list[list[str]] = [[]]
    for word in arguments:
        if word == ":":
            blocks.append([])
        else:
            blocks[-1].append(word)
    for block in blocks:
        at, groups = 0, [0]
        while at < len(block) and block[at].startswith("-"):
            name, _, value = block[at].partition("=")
            if block[at] not in _FLAGS and not (value and name in _FLAGS):
                sys.exit(f"srun: unrecognized option {block[at]!r}")
            if name == "--het-group":
                groups = [int(number) for number in value.split(",")]
            at += 1
        for group in groups:
            if group in commands:
                sys.exit("srun: Duplicate het groups in single srun not supported")
            commands[group] = block[at:]
    return commands


def tasks_of(commands: Mapping[int, Sequence[str]], layout: Layout) -> list[_Task]:
    """All tasks of a step, with their environments."""
    components = [(layout[group], command) for group, command in commands.items()]
    nodes = [node for component, _ in components for node in component]
    if len(set(nodes)) != len(nodes):
        sys.exit("srun: components share a node")
    counts = {node: count for component, _ in components for node, count in component.items()}
    ordered = sorted(nodes) if len(layout) > 1 else nodes
    total = sum(counts.values())
    common = {
        "SLURM_STEP_ID": "0",
        "SLURM_STEPID": "0",
        "SLURM_NTASKS": str(total),
        "SLURM_STEP_NUM_TASKS": str(total),
        "SLURM_NODELIST": ",".join(ordered),
        "SLURM_JOB_NODELIST": ",".join(ordered),
        "SLURM_STEP_NODELIST": ",".join(ordered),
        "SLURM_STEP_TASKS_PER_NODE": ",".join(str(counts[node]) for node in ordered),
    }
    tasks, rank, node_id = [], 0, 0
    for component, command in components:
        for node, count in component.items():
            ids = range(rank, rank + count)
            for local_id, task_id in enumerate(ids):
                own = {
                    "SLURM_PROCID": str(task_id),
                    "SLURM_LOCALID": str(local_id),
                    "SLURM_NODEID": str(node_id),
                    "SLURM_GTIDS": ",".join(map(str, ids)),
                    "SLURM_NPROCS": str(sum(component.values())),
                    "SLURMD_NODENAME": node,
                }
                tasks.append(_Task(command, {**os.environ, **common, **own}))
            rank, node_id = rank + count, node_id + 1
    return tasks


def main(arguments: Sequence[str]) -> int:
    """Runs a step to its end; the examples ask that a task which fails ends no others."""
    from evener.team.child import die_with

    die_with(os.getppid())
    parent = os.getpid()
    running = {}
    for task in tasks_of(parse(arguments), json.loads(os.environ[LAYOUT])):
        process = subprocess.Popen(
            task.command, env=task.environ, preexec_fn=lambda: die_with(parent)
        )
        running[process.pid] = process
    worst = 0
    while running:
        pid, status = os.wait()
        process = running.pop(pid)
        process.returncode = code = os.waitstatus_to_exitcode(status)
        worst = max(worst, code if code >= 0 else 128 - code)
    return worst


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
