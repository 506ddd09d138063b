"""The configurations of examples/ train on CPU ranks."""

import pytest

from helpers.pretraining import LLAMA, Lab
from helpers.source import ROOT

#: Less of everything, and text that is there at once; all else is as the file says.
SMALL = [
    "data.path=corpus",
    "data.seq_len=32",
    f"model.config={LLAMA}",
    "batch_size=4",
    "micro_batch_size=2",
    "eval.max_sequences=4",
    "sample.num_tokens=4",
    "devices=cpu",
    "max_steps=4",
]


@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    ("example", "changes", "nproc"),
    [
        ("pretrain", [], 1),
        ("pretrain_two_cards", ["data.vocab_size=300"], 2),
        ("pretrain_machines", ["anchor=1"], 3),
    ],
)
def test_a_configuration_trains(lab: Lab, example: str, changes: list[str], nproc: int) -> None:
    (lab.folder / "examples").symlink_to(ROOT / "examples")
    settings = [word for setting in (*SMALL, *changes) for word in ("--set", setting)]
    lab.run(f"examples/{example}.yaml", "--name", "run", *settings, nproc=nproc)
    run = lab.path_of()
    assert run.summary["world_size"] == nproc
    assert run.summary["steps"] == 4
    start, end = run.checkpoints
    assert start.name == "step-0"
    assert end.name == f"step-{run.of_type('window')[-1]['window'] + 1}"
