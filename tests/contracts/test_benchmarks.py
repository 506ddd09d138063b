"""Each benchmark runs, in miniature, and writes a report that can be read."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.limits import PATIENCE_S
from helpers.source import ROOT

#: Smoke runs: they take minutes in all, so they run with --all.
pytestmark = pytest.mark.long

FOLDER = ROOT / "benchmarks"
SMALL = "--samples 64 --batch-size 8 --sleep 0.005"
UNEQUAL = "--speeds 1,0.5 --batch-size 8 --width 32 --layers 1 --anchor 2"

#: Script -> options that make it quick, and how many rows its report has.
RUNS = {
    "allreduce": ("--ranks 2 --bytes 4096,65536 --rounds 1 --turn-s 0.001", None),
    "control_scale": ("--members 20 --seconds 1", 6),
    "goodput": (
        f"--workers 2 --rounds 1 --minutes 0.2 --calm-minutes 0.05 --every 4 {SMALL}",
        1,
    ),
    "hetero": (
        f"{UNEQUAL} --speeds 1,0.05 --rounds 1 --windows 3 --local-windows 1 --far-windows 24",
        11,
    ),
    "homogeneous": ("--models 0.8M --samples 1 --rounds 1 --turn-s 0.01", 8),
    "kill": (f"--sleepers 2 --kills 1 {SMALL}", 1),
    "link": (
        "--rates 1000 --sizes 2M --teams unequal --samples 1 --rounds 1 --turn-s 0.01 "
        "--ways ddp.4mb,ddp.bf16,sync.off,sync.on,cadence,async",
        9,
    ),
    "overhead": ("--cases 0.1M --rounds 1 --round-s 0.1", 2),
    "plan": (f"{UNEQUAL} --runs 1 --windows 12 --local-windows 14", 3),
    "simulate_scale": ("--ranks 2,16 --rounds 2", 8),
    "size": ("", 1),
    "trainer": ("--rounds 1 --steps 3 --width 16", 1),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.root) if n == "link" else n for n in RUNS]
)
def test_a_benchmark_writes_its_report(name: str, tmp_path: Path) -> None:
    options, num_rows = RUNS[name]
    report = tmp_path / "report.json"
    done = subprocess.run(
        [sys.executable, FOLDER / f"{name}.py", *options.split(), "--json", report],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(report.read_text())
    assert {"machine", "commit", "versions", "load_average", "rows"} <= set(document)
    assert str(Path.home()) not in report.read_text(), "somebody's own folder"
    rows = document["rows"]
    assert num_rows in (None, len(rows))
    assert all(row.get("sound", True) for row in rows), "samples are lost, or replicas differ"
    for row in rows:
        for key in (key for key in row if f"{key}_90" in row):
            low, high = row[f"{key}_90"]
            assert low <= row[key] <= high, key
