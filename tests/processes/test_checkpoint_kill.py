"""A process is killed at every stage of a save: what is found afterwards is always whole."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from evener.checkpoint import Snapshot, find_newest, write_checkpoint
from helpers.limits import PATIENCE_S

# Saves step 1 and dies at the named stage of a save of step 2 (or of step 1 again).
VICTIM = """
import os, signal, sys
from pathlib import Path
import torch
from evener import files
from evener.checkpoint import Snapshot, encode_document, write_checkpoint, writer

folder, stage, second_step = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

def save(step, value):
    documents = {"run.json": encode_document("run.json", {"value": value})}
    tensors = {"model": {"w": torch.full((1000,), value)}}
    write_checkpoint(folder, Snapshot(step, tensors, documents), keep_last=1)

save(1, 1.0)
if stage == "replace":
    # The old folder has been moved aside by now, the new one has not taken its name yet.
    real_rename = Path.rename
    def rename(source, target):
        if ".tmp-" in source.name:
            die()
        return real_rename(source, target)
    Path.rename = rename
elif stage == "rename":
    files.publish_folder = die
else:
    what = {"files": "save_file", "manifest": "Manifest", "retention": "remove_old"}
    setattr(writer, what[stage], die)
save(second_step, 2.0)
sys.exit("was not killed")
"""


@pytest.mark.parametrize(
    ("stage", "second_step", "found_value"),
    [
        ("files", 2, 1.0),
        ("manifest", 2, 1.0),
        ("rename", 2, 1.0),
        ("retention", 2, 2.0),
        ("rename", 1, 1.0),
        ("replace", 1, 1.0),
    ],
)
def test_a_whole_checkpoint_is_found_after_a_kill(
    tmp_path: Path, stage: str, second_step: int, found_value: float
) -> None:
    victim = subprocess.run(
        [sys.executable, "-c", VICTIM, str(tmp_path), stage, str(second_step)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        timeout=PATIENCE_S,
        capture_output=True,
        text=True,
        check=False,
    )
    assert victim.returncode == -signal.SIGKILL, victim.stderr

    skipped: list[str] = []
    set_aside = [path for path in tmp_path.iterdir() if ".replaced-" in path.name]
    assert bool(set_aside) is (stage == "replace")
    found = find_newest(tmp_path, lambda path, why: skipped.append(why))
    assert found is not None
    assert skipped == []
    assert found.document("run.json") == {"value": found_value}
    assert torch.equal(found.tensors("model")["w"], torch.full((1000,), found_value))

    write_checkpoint(tmp_path, Snapshot(3, {}, {}), keep_last=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-3"]
