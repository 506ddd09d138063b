"""Whatever is wrong with the input is said in one sentence, by one rank, without a traceback."""

import json
import re

import pytest

from evener.cli import main
from helpers.pretraining import LAYER, LLAMA, NUM_SAMPLES, Lab, refused


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    lab = Lab(tmp_path_factory.mktemp("lab"))
    lab.configure("nowhere.yaml", data={"path": ["corpus", "no/where"]})
    (lab.folder / "empty").mkdir()
    yield lab
    lab.close()


#: Arguments, exit code, and what is named. That of the configuration: ``unit/config``.
FOUND_AT_ONCE = {
    "unknown key": (["run.yaml", "--set", "optimizer.rate=1"], 2, ["optimizer.rate is 1", "lr, "]),
    "no such file": (["absent.yaml"], 2, ["absent.yaml cannot be read"]),
    "no such data": (["nowhere.yaml"], 1, ["data.path", "'no/where'"]),
    "no such model": (["run.yaml", "--set", "model={path: absent}"], 1, ["model.path", "'absent'"]),
    "no such rank": (["run.yaml", "--nproc", "2", "--emulate-slow", "2:3"], 2, ["no rank 2"]),
    "the demo of a file": (["run.yaml", "--demo"], 2, ["--demo", "run.yaml"]),
    "allowed without a resume": (["run.yaml", "--allow", "data"], 2, ["--allow data", "--resume"]),
}


@pytest.mark.parametrize("case", FOUND_AT_ONCE)
def test_what_is_wrong_is_said_before_any_rank_starts(lab, case, monkeypatch, capfd):
    arguments, code, words = FOUND_AT_ONCE[case]
    monkeypatch.chdir(lab.folder)
    assert main(["pretrain", *arguments]) == code
    said = capfd.readouterr()
    assert (said.out, said.err[:7], said.err.count("\n")) == ("", "error: ", 1)
    assert all(word in said.err for word in words), said.err
    assert not (lab.folder / "runs" / "run").exists()


FOUND_BY_RANKS = {
    "no text": ("data.path=empty", 1, "empty: no file ends in .txt"),
    "too little text": ("batch_size=64", 1, f"has {NUM_SAMPLES} samples of 32 tokens"),
    "ids": (
        "model.config=" + json.dumps({**LLAMA, "vocab_size": 100}),
        2,
        "set the model's vocab_size to 257",
    ),
    "no model": (
        "model.config=" + json.dumps({**LAYER, "num_attention_heads": 5}),
        2,
        "model.type='llama'",
    ),
}


@pytest.mark.parametrize("case", FOUND_BY_RANKS)
def test_what_ranks_find_is_said_once(lab, case):
    setting, code, words = FOUND_BY_RANKS[case]
    assert words in refused(lab, "run.yaml", "--set", setting, code=code, nproc=2)


def test_a_loss_that_is_not_finite_stops_every_rank(lab):
    finished = lab.run(
        *("run.yaml", "--name", "overflow", "--set", "optimizer.lr=1e30"),
        *("--set", "max_grad_norm=null"),
        nproc=2,
        expected=1,
    )
    assert "Traceback" not in "".join(finished.outputs)
    first, second = (
        [line for line in output.splitlines() if line.startswith("error: ")]
        for output in finished.outputs
    )
    assert first == second
    what = r"(the loss|the gradient of parameter 'model\.[\w.]+')"
    assert re.match(rf"error: {what} is not finite on rank \d in step \d+ \(window", first[0])
    last = lab.path_of("overflow").events[-1]
    assert last["reason"] == "failed"
    assert "is not finite on rank" in last["message"]
