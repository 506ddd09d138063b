"""A process is killed at every stage of a save: what is found afterwards is always whole."""

import os
import signal
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from evener import files
from evener.checkpoint import Snapshot, encode_document, find_newest, write_checkpoint, writer
from helpers.ranks import Rank, run_ranks_to_end


def die(*_: Any, **__: Any) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def save_and_die(rank: Rank, folder: Path, stage: str, second_step: int) -> None:
    """Saves step 1 and dies at the named stage of a save of step 2 (or of step 1 again)."""

    def save(step: int, value: float) -> None:
        documents = {"run.json": encode_document("run.json", {"value": value})}
        tensors = {"model": {"w": torch.full((1000,), value)}}
        write_checkpoint(folder, Snapshot(step, tensors, documents), keep_last=1)

    save(1, 1.0)
    if stage == "replace":
        # The old folder has been moved aside by now, the new one has not taken its name yet.
        real_rename = Path.rename
        Path.rename = lambda source, target: (  # type: ignore[method-assign]
            die() if ".tmp-" in source.name else real_rename(source, target)
        )
    elif stage == "rename":
        files.publish_folder = die
    else:
        what = {"files": "save_file", "manifest": "Manifest", "retention": "remove_old"}
        setattr(writer, what[stage], die)
    save(second_step, 2.0)


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
    (victim,) = run_ranks_to_end(save_and_die, 1, tmp_path, stage, second_step)
    assert victim.died_of is signal.SIGKILL, victim.story()
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
