"""Examples for SLURM and torchrun train, with stand-ins for the clusters' own programs."""

import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers import slurm
from helpers.limits import wait_until
from helpers.lineage import check_exactly_once
from helpers.pretraining import NUM_SAMPLES, Lab
from helpers.source import ROOT

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]

HOST = f"127.{1 + os.getpid() % 250}.{1 + os.getpid() // 250 % 250}.1"


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    lab = Lab(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    programs = slurm.install(tmp_path / "bin")
    for name, text in {
        "evener": f'#!/bin/sh\nexec "{sys.executable}" -P -m evener "$@"\n',
        "scontrol": '#!/bin/sh\necho "$@" >>scontrol.log\n',
    }.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    path = (str(programs), str(Path(sys.executable).parent), os.environ["PATH"])
    lab.sandbox.environ |= {"PATH": os.pathsep.join(path), "RUN": "run.yaml", "NAME": "run"}
    yield lab
    lab.close()


def until_trained(lab: Lab, ranks: int) -> None:
    run = lab.path_of()

    def has_window() -> bool:
        last = run.events[-1:] if (run.path / "events.jsonl").exists() else []
        return [len(event["ranks"]) for event in last if event["type"] == "window"] == [ranks]

    wait_until(has_window)


def signal_srun(parent: int) -> None:
    """As SLURM does before the time limit: to the step, not to the batch script."""
    (pid,) = [
        int(stat.parent.name)
        for stat in Path("/proc").glob("[0-9]*/cmdline")
        if b"slurm.py" in stat.read_bytes() and parent_of(int(stat.parent.name)) == parent
    ]
    os.kill(pid, signal.SIGUSR1)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_slurm_job_saves_at_the_time_limit_and_resumes(lab: Lab) -> None:
    lab.configure(epochs=9999, policy="sync", checkpoint={"every": 10**6}, eval={"every": 0})
    job = 10_000 + os.getpid() % 9000
    lab.sandbox.environ |= slurm.batch_environment([[HOST], ["old1"]], job)
    run = lab.path_of()
    for _ in range(2):
        running = lab.sandbox.start("bash", "examples/pretrain_elastic.sbatch")
        until_trained(lab, 2)
        signal_srun(running.process.pid)
        ended = running.end()
        assert ended.code == 128 + signal.SIGUSR1, ended.err
        assert run.checkpoints[-1].name == f"step-{run.events[-1]['window']}"
    assert (lab.folder / "scontrol.log").read_text() == f"requeue {job}\n" * 2
    assert len(run.of_type("run_resumed")) == 1
    assert check_exactly_once(run.events, NUM_SAMPLES) == []
    assert not list(lab.folder.glob(".token-*"))


def test_torchrun_restarts_all_ranks_which_resume(lab: Lab) -> None:
    lab.configure(epochs=9999, checkpoint={"every": 5, "keep_last": 2}, timeout_s=60)
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port = probe.getsockname()[1]
    lab.sandbox.environ |= {"NNODES": "1", "NPROC": "2", "TORCHRUN": f"--local-addr {HOST}"}
    running = lab.sandbox.start("bash", "examples/launch/torchrun.sh", f"{HOST}:{port}")
    until_trained(lab, 2)
    run = lab.path_of()
    os.kill(run.of_type("worker_started")[-1]["pid"], signal.SIGKILL)
    wait_until(lambda: run.of_type("run_resumed"))
    until_trained(lab, 2)
    running.signal(signal.SIGTERM)
    running.end()
    assert check_exactly_once(run.events, NUM_SAMPLES) == []
