"""``--resume`` of a run whose newest checkpoints are damaged: they are named and skipped."""

import os
from collections.abc import Callable
from pathlib import Path

from helpers.lineage import check_exactly_once
from helpers.pretraining import NUM_SAMPLES, Lab
from helpers.tampering import NESTED


def fifo(checkpoint: Path, name: str) -> None:
    (checkpoint / name).unlink()
    os.mkfifo(checkpoint / name)


def flip_a_byte(checkpoint: Path, name: str) -> None:
    content = bytearray((checkpoint / name).read_bytes())
    content[-1] ^= 1
    (checkpoint / name).write_bytes(content)


#: What is done to the checkpoints of a run, the newest first -> what is said of it.
DAMAGE: list[tuple[Callable[[Path], None], str]] = [
    (lambda path: flip_a_byte(path, "model.safetensors"), "model.safetensors is damaged"),
    (lambda path: (path / "run.json").unlink(), "run.json is missing"),
    (lambda path: fifo(path, "manifest.json"), "not a regular file"),
]


def test_pretraining_resumes_from_the_newest_checkpoint_that_is_sound(
    tmp_path: Path,
) -> None:
    lab = Lab(tmp_path)
    lab.run("run.yaml", "--set", "checkpoint.keep_last=99")
    run = lab.path_of()
    # On a slow disk a checkpoint may have been skipped; one is left sound in any case.
    *checkpoints, sound = run.checkpoints[: -len(DAMAGE) - 2 : -1]
    for (damage, _), checkpoint in zip(DAMAGE, checkpoints, strict=False):
        damage(checkpoint)
    with (run.path / "events.jsonl").open("ab") as events:
        events.write(b'{"t": 1.0, "type": "window", "window": ' + NESTED + b"}\n\xff\xfe\0\n")
        events.write(b'{"t": 1.0, "type": "run_resumed", "window": "3"}\n{"t": 1.0, "ty')
    said = lab.run("run.yaml", "--resume", nproc=2).said
    for (_, why), checkpoint in zip(DAMAGE, checkpoints, strict=False):
        (line,) = [line for line in said.splitlines() if f"checkpoint {checkpoint}:" in line]
        assert why in line
    assert f"resumed after {sound.name.removeprefix('step-')} window" in said
    assert check_exactly_once(run.events, NUM_SAMPLES, whole_epochs=2) == []
    lab.close()
