"""Teams on Ray Train, on real Ray clusters of this machine (``helpers/ray_runs.py``)."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from helpers.limits import PATIENCE_S
from helpers.source import ROOT

NUM_SAMPLES, BATCH_SIZE = 240, 24

pytestmark = pytest.mark.timeout(900)


def run(scenario: str, folder: Path) -> dict[str, Any]:
    program = subprocess.Popen(
        [sys.executable, "-m", "helpers.ray_runs", scenario, str(folder)],
        cwd=ROOT / "tests",
        # Else Ray lets everything else on these cores go first.
        env=os.environ | {"RAY_worker_niceness": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        told, _ = program.communicate(timeout=7 * PATIENCE_S)
    finally:
        with suppress(ProcessLookupError):  # a node that could not start is not shut down
            os.killpg(program.pid, signal.SIGKILL)
    assert program.returncode == 0, told[-4000:]
    return json.loads((folder / "found.json").read_text())


def windows(notes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was committed, without what several workers have noted of one window."""
    known: dict[int, dict[str, Any]] = {}
    for note in notes:
        if "window" in note:
            before = known.setdefault(note["window"], note)
            assert before["positions"] == note["positions"], "workers differ"
    return [known[window] for window in sorted(known)]


def check_epochs(committed: list[dict[str, Any]]) -> None:
    """Every position of a complete epoch was committed exactly once."""
    assert [one["window"] for one in committed] == [*range(len(committed))]
    counts: dict[int, Counter[int]] = {}
    for one in committed:
        counts.setdefault(one["epoch"], Counter()).update(range(*one["positions"]))
    assert max(max(epoch.values()) for epoch in counts.values()) == 1
    for epoch in range(len(committed) * BATCH_SIZE // NUM_SAMPLES):
        assert counts[epoch].keys() == {*range(NUM_SAMPLES)}


def models(notes: list[dict[str, Any]]) -> list[list[float]]:
    return [note["model"] for note in notes if "model" in note]


@pytest.mark.ray
def test_unequal_workers_train_as_one_process_does_and_resume_on_another_number(
    tmp_path: Path,
) -> None:
    found = run("fixed", tmp_path)
    assert "the disk is full" in found["failure"]
    assert "EvenerConfig(min_workers=..., name='nobody')" in found["unknown"]
    before, after = (windows(found[part]) for part in ("before", "after"))
    # Whole samples of a batch of 24, as 3 : 3 : 1; Ray has numbered the workers by node.
    assert all(sorted(one["shares"]) == [4, 10, 10] for one in before)
    assert [note["loaded"] for note in found["before"] if "started" in note] == [False] * 3
    assert [note["loaded"] for note in found["after"] if "started" in note] == [True] * 2
    # Fifteen windows were trained, and the checkpoint of twelve was reported.
    assert [one["window"] for one in after] == [*range(12, 20)]
    check_epochs([*before[:12], *after])
    assert found["metrics"]["window"] == 19
    assert found["metrics"]["samples"] == 2 * NUM_SAMPLES
    assert len(models(found["after"])) == 2
    for model in models(found["after"]):
        assert model == pytest.approx(found["alone"], rel=1e-4, abs=1e-6)


@pytest.mark.ray
def test_a_killed_worker_is_replaced_while_the_others_continue(tmp_path: Path) -> None:
    found = run("elastic", tmp_path)
    extra = [name for name in found["before"] if name.startswith("extra/")]
    assert len(extra) == 1
    assert len(found["before"]) == 4
    # Ray started one worker; the others trained on in the meantime.
    assert found["new"].startswith("ray/1/")
    assert found["meanwhile"] > 0
    check_epochs(windows(found["notes"]))
    assert len(models(found["notes"])) == 4
    for model in models(found["notes"]):
        assert model == pytest.approx(found["alone"], rel=1e-3, abs=1e-5)
    assert found["metrics"]["window"] % 40 == 39, "reported with the worker that was replaced"


WITHOUT_RAY = """
import sys
sys.modules["ray"] = None  # what Python keeps of a module that cannot be imported
import evener
assert not any(name.startswith("ray.") for name in sys.modules)
try:
    import evener.ray
except evener.ConfigError as error:
    print(error)
"""


def test_without_ray_an_error_names_the_extra() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_RAY],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "evener.ray needs Ray Train" in done.stdout
    assert "pip install 'evener[ray]'" in done.stdout
