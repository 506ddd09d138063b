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

#: Script -> options that make it quick, and how many rows its report has.
RUNS = {
    "allreduce": ("--ranks 2 --bytes 4096,65536 --rounds 1 --turn-s 0.001", None),
    "chaos": (f"--workers 2 --kinds kill,slow --seed 1 --minutes 0.2 {SMALL}", 1),
    "control_scale": ("--members 20 --seconds 1", 6),
    "ctrl_c": ("--moments 1 --within 0.5", 1),
    "dashboard": ("--windows 30 --ranks 2 --readers 2 --seconds 0.2", 1),
    "drop": ("--before 5 --after 3 --width 32 --layers 1 --anchor 3", 1),
    "event_cost": ("--windows 50 --ranks 1,2", 2),
    "goodput": (
        "--rounds 1 --calm-minutes 0.05 --every 4 --ways evener,torchrun "
        f"--workers 2 --seed 1 --minutes 0.2 {SMALL}",
        2,
    ),
    "hetero": (
        "--speeds 1,0.5 --rounds 1 --windows 3 --batch-size 8 --width 32 --anchor 2 "
        "--local-windows 3 --layers 1 --slowed-by sleep",
        None,
    ),
    "homogeneous": ("--models 0.8M --tokens 128 --rounds 1 --turn-s 0.01", None),
    "kill": (f"--sleepers 2 --kills 1 {SMALL}", 1),
    "overhead": ("--cases 0.1M --rounds 1 --round-s 0.1", 2),
    "plan": (
        "--runs 1 --windows 9 --local-windows 14 --batch-size 8 --anchor 2 --width 32 "
        "--layers 1 --speeds 1,0.5",
        3,
    ),
    "report_page": ("--windows 30 --ranks 2 --rounds 0", 1),
    "same_result": ("--seeds 1 --steps 2 --teams 1 --data corpus", 1),
    "scaling": (
        "--ranks 1,2 --rounds 1 --windows 2 --samples 4 --sample-s 0.001 --width 32",
        14,
    ),
    "simulate_scale": ("--ranks 2,16 --rounds 2", None),
    "size": ("", None),
    "startup": ("--only help --rounds 1", 1),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_benchmark_writes_its_report(name: str, tmp_path: Path) -> None:
    options, num_rows = RUNS[name]
    (tmp_path / "corpus").mkdir()
    for number in range(3):
        lines = "".join(f"line {i} of text {number}\n" for i in range(400))
        (tmp_path / "corpus" / f"part{number}.txt").write_text(lines)
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
    assert rows
    assert num_rows in (None, len(rows))
    assert all(row.get("sound", True) for row in rows), "samples are lost, or replicas differ"
    for row in rows:
        for key in (key for key in row if f"{key}_90" in row):
            low, high = row[f"{key}_90"]
            assert 0 < low <= row[key] <= high, key
