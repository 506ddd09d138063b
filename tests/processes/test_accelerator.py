"""An accelerator that is neither CUDA's nor torch's own: ``helpers/pretend.py``."""

import os
import re
import subprocess
import sys
from pathlib import Path

import torch

from helpers import pretend
from helpers.limits import PATIENCE_S
from helpers.lineage import check_exactly_once
from helpers.pretraining import NUM_SAMPLES, Lab

TESTS = Path(__file__).resolve().parent.parent
SRC = TESTS.parent / "src"


def test_training_on_it(repository: Path) -> None:
    # An accelerator stays for the life of a process, and `auto` would take it in other tests.
    finished = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "tests/processes/check_accelerator.py"],
        cwd=repository,
        env=os.environ | {"PYTHONPATH": str(SRC)},
        capture_output=True,
        text=True,
        timeout=3 * PATIENCE_S,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert re.search(r"(\d+) passed in", finished.stdout), finished.stdout


def test_the_command_line_takes_it_beside_the_cpu(tmp_path: Path) -> None:
    pretend.install(tmp_path / "site")
    (tmp_path / "lab").mkdir()
    lab = Lab(tmp_path / "lab")
    lab.sandbox.environ["PYTHONPATH"] = os.pathsep.join(map(str, (SRC, TESTS, tmp_path / "site")))
    try:
        # Measured, it may turn out too slow for any share.
        options = ("--set", "epochs=1", "--set", "speed_hint=[1, 1]")
        running = lab.command("run.yaml", "--nproc", "2", "--name", "there", *options)
        ended = running.end()
        assert ended.code == 0, ended.err
        run = lab.path_of("there")
        ranks = run.summary["ranks"]
        assert [rank["device"].partition(" ")[0] for rank in ranks] == ["pretend:0", "cpu"]
        assert all(rank["samples"] > 0 for rank in ranks)
        assert run.summary["backend"] == "shared"
        check_exactly_once(run.events, num_samples=NUM_SAMPLES)
    finally:
        lab.close()
    assert not torch.accelerator.is_available()
