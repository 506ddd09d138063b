"""``--resume`` of a run whose newest checkpoints were tampered with: they are named and skipped."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from safetensors.torch import load_file, save

from helpers.classification import NEEDED, TINY_LLAMA, samples
from helpers.forking import Zygote
from helpers.lineage import check_exactly_once
from helpers.pretraining import NUM_SAMPLES, RUN_TIMEOUT_S, Lab, RunFolder, be_evener
from helpers.ranks import RankTeam
from helpers.tampering import NESTED, forge


def edit(checkpoint: Path, name: str, **changes: Any) -> None:
    """Puts values into a document of a checkpoint, which its manifest says are right."""
    document = json.loads((checkpoint / name).read_bytes())
    forge(checkpoint, name, json.dumps({**document, **changes}).encode())


def whole_numbers(checkpoint: Path, stem: str) -> None:
    tensors = load_file(checkpoint / f"{stem}.safetensors")
    forge(
        checkpoint,
        f"{stem}.safetensors",
        save({name: tensor.long() for name, tensor in tensors.items()}, {"format": "pt"}),
    )


def fifo(checkpoint: Path, name: str) -> None:
    (checkpoint / name).unlink()
    os.mkfifo(checkpoint / name)


#: What is done to the checkpoints of a pretraining run, the newest first -> what is said of it.
PRETRAINING: list[tuple[Callable[[Path], None], str]] = [
    (lambda path: edit(path, "run.json", precisions=3), "run.json is damaged: precisions is 3"),
    (lambda path: edit(path, "run.json", config=[]), "run.json is damaged: config is []"),
    (lambda path: edit(path, "run.json", beginning={"window": "0"}), "beginning.window is '0'"),
    (lambda path: forge(path, "run.json", NESTED), "nested more than"),
    (lambda path: forge(path, "config.json", b"[1]"), "config.json is damaged"),
    (lambda path: edit(path, "state.json", cursor={"epoch": 10**30}), "state.json is damaged"),
    (lambda path: whole_numbers(path, "model"), "torch.int64"),
    (lambda path: fifo(path, "manifest.json"), "not a regular file"),
]


def test_pretraining_resumes_from_the_newest_checkpoint_that_is_sound(
    tmp_path: Path,
) -> None:
    lab = Lab(tmp_path)
    lab.run("run.yaml", "--set", "checkpoint.keep_last=99")
    run = lab.path_of()
    # On a slow disk a checkpoint may have been skipped; one is left sound in any case.
    *checkpoints, sound = run.checkpoints[: -len(PRETRAINING) - 2 : -1]
    for (damage, _), checkpoint in zip(PRETRAINING, checkpoints, strict=False):
        damage(checkpoint)
    with (run.path / "events.jsonl").open("ab") as events:
        events.write(b'{"t": 1.0, "type": "window", "window": ' + NESTED + b"}\n\xff\xfe\0\n")
        events.write(b'{"t": 1.0, "type": "run_resumed", "window": "3"}\n{"t": 1.0, "ty')
    said = lab.run("run.yaml", "--resume", nproc=2).said
    for (_, why), checkpoint in zip(PRETRAINING, checkpoints, strict=False):
        (line,) = [line for line in said.splitlines() if f"checkpoint {checkpoint}:" in line]
        assert why in line
    assert f"resumed after {sound.name.removeprefix('step-')} window" in said
    assert check_exactly_once(run.events, NUM_SAMPLES, whole_epochs=2) == []
    lab.close()


CLASSIFICATION: list[tuple[Callable[[Path], None], str]] = [
    (lambda path: edit(path, "run.json", labels="abc"), "labels is 'abc'"),
    (lambda path: edit(path, "evaluations.json", since_best=0.5), "since_best is 0.5"),
    (lambda path: edit(path, "evaluations.json", best={"loss": 1.0}), "confusion is missing"),
    (lambda path: whole_numbers(path, "best"), "best.safetensors is not of this adapter"),
    (lambda path: edit(path, "state.json", progress={}), "progress.window is missing"),
]


def test_classification_resumes_from_the_newest_checkpoint_that_is_sound(tmp_path: Path) -> None:
    rows = [{"text": s.text, "label": int(s.label)} for s in samples(48)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    document = {
        "data": {"path": "train.jsonl"},
        "model": TINY_LLAMA,
        "seq_len": 24,
        "lora": {"rank": 4},
        "batch_size": 7,
        "max_steps": 12,
        "eval": {"every": 1, "baseline": False},
        "checkpoint": {"every": 2, "keep_last": 99},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(document))

    def classify(*arguments: str) -> str:
        Zygote.get().preload(*NEEDED)
        command = ["classify", "run.yaml", *arguments]
        with RankTeam(be_evener, 1, str(tmp_path), command) as team:
            (outcome,) = team.wait(RUN_TIMEOUT_S)
        assert outcome.value == 0, outcome.story()
        return outcome.output

    classify()
    run = RunFolder(tmp_path / "runs" / "run")
    # On a slow disk a checkpoint may have been skipped; one is left sound in any case.
    *checkpoints, sound = run.checkpoints[: -len(CLASSIFICATION) - 2 : -1]
    for (damage, _), checkpoint in zip(CLASSIFICATION, checkpoints, strict=False):
        damage(checkpoint)
    said = classify("--resume")
    for (_, why), checkpoint in zip(CLASSIFICATION, checkpoints, strict=False):
        (line,) = [line for line in said.splitlines() if f"checkpoint {checkpoint}:" in line]
        assert why in line
    assert f"resumed after {sound.name.removeprefix('step-')} window" in said
    assert run.summary["steps"] == 12
