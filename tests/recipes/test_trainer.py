"""Scripts with Hugging Face's Trainer, and the same with one changed import, end alike."""

import os
import runpy
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.forking import Zygote
from helpers.ranks import Rank, run_ranks

SCRIPTS = Path(__file__).with_name("trainer_scripts")
PLAIN = "from transformers import Trainer\n"
CHANGED = "from evener.hf import Trainer\n"
#: Samples of an optimizer step in every run here, on any number of ranks.
BATCH = 12
KEPT: list[dict[str, Any]] = []


@pytest.fixture(autouse=True)
def libraries() -> None:
    """Ranks are forked from a process that has imported what their scripts do."""
    Zygote.get().preload("transformers", "transformers.trainer", "peft", "datasets", "evener.hf")


def run_script(rank: Rank, name: str, folder: str, options: list[str], edit: Any = None) -> Any:
    """Runs a script in this process, as ``python SCRIPT OPTIONS`` would."""
    os.chdir(folder)
    warnings.simplefilter("ignore")  # the libraries' own
    text = (SCRIPTS / f"{name}.py").read_text()
    assert text.count(PLAIN) == 1
    if edit is not None:
        text = edit(text)
    sys.argv = [f"{name}.py", *options]
    names: dict[str, Any] = {"__name__": "__main__"}
    KEPT.append(names)
    exec(compile(text, f"{name}.py", "exec"), names)
    trainer = names["trainer"]
    return {
        "parameters": {n: p.detach().clone() for n, p in trainer.model.named_parameters()},
        "history": trainer.state.log_history,
        "steps": trainer.state.global_step,
        "metrics": names.get("metrics"),
        "predictions": names.get("predictions"),
        "train": names["result"].metrics,
    }


def with_evener(text: str) -> str:
    return text.replace(PLAIN, CHANGED)


def options(per_device: int, accumulate: int = 1, **further: Any) -> list[str]:
    given = {
        "output_dir": "out",
        "per_device_train_batch_size": per_device,
        "gradient_accumulation_steps": accumulate,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "no",
    } | further
    return [text for name, value in given.items() for text in (f"--{name}", str(value))]


def test_x(tmp_path: Path) -> None:
    name = os.environ["S"]
    (tmp_path / "a").mkdir()
    (plain,) = run_ranks(run_script, 1, name, str(tmp_path / "a"), options(6, 2))
    for world in (1, 2, 3):
        (tmp_path / str(world)).mkdir()
        found = run_ranks(run_script, world, name, str(tmp_path / str(world)), options(6 // world, 2), with_evener, env={"EVENER_EMULATE_SLOW": "1:3"} if world > 1 else {})
        for one in found:
            for n, p in plain["parameters"].items():
                print(world, n, float((p - one["parameters"][n]).abs().max()))
                break
            print([ (h["loss"], h["grad_norm"], h["learning_rate"], h["epoch"]) for h in one["history"] if "loss" in h][:9:3])
            print(one["metrics"], one["train"])
    print([ (h["loss"], h["grad_norm"], h["learning_rate"], h["epoch"]) for h in plain["history"] if "loss" in h][:9:3])
    print(plain["metrics"], plain["train"])
    assert 0
