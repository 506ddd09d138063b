"""Whatever is wrong with the input is said in one sentence, and harms nothing that was saved."""

import json
import re
import shutil
import socket

import pytest

from evener.cli import main
from helpers.lineage import check_exactly_once
from helpers.pretraining import LAYER, LLAMA, NUM_SAMPLES, TINY, Lab, write_corpus


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    lab = Lab(tmp_path_factory.mktemp("lab"))
    (lab.folder / "broken.yaml").write_text("batch_size: 4\noptimizer: {lr: 1\nseed: 1\n")
    lab.configure("nowhere.yaml", data={"path": ["corpus", "no/where"]})
    lab.configure("unknown.yaml", optimizr={"lr": 1})
    yield lab
    lab.close()


# ── found before any rank starts ─────────────────────────────────────────────────────────────────

FOUND_AT_ONCE = {
    "unknown key": (["unknown.yaml"], 2, ["optimizr is {'lr': 1}: unknown key", " optimizer, "]),
    "unknown key in a section": (
        ["run.yaml", "--set", "optimizer.learning_rate=1"],
        2,
        ["optimizer.learning_rate is 1: unknown key", "lr, betas, eps"],
    ),
    "bad value": (["run.yaml", "--set", "batch_size=0"], 2, ["batch_size", "0", "1"]),
    "no key=value": (["run.yaml", "--set", "seed"], 2, ["--set 'seed'", "key=value"]),
    "broken YAML": (["broken.yaml"], 2, ["broken.yaml:3:5: broken YAML"]),
    "no such file": (
        ["absent.yaml"],
        2,
        ["absent.yaml cannot be read", "No such file", "give a YAML file"],
    ),
    "no such data": (["nowhere.yaml"], 1, ["data.path", "'no/where'", "check the path"]),
    "no such tokenizer": (
        ["run.yaml", "--set", "data.tokenizer=absent"],
        1,
        ["data.tokenizer", "'absent'", "downloads nothing"],
    ),
    "no such model": (
        ["run.yaml", "--set", "model={path: absent}"],
        1,
        ["model.path", "'absent'", "downloads nothing"],
    ),
    "no run to resume": (["run.yaml", "--resume"], 1, ["no run 'run' in", "--resume"]),
    "no ranks": (["run.yaml", "--nproc", "0"], 2, ["'--nproc': Input should be greater"]),
    "a rank that is not there": (
        ["run.yaml", "--nproc", "2", "--emulate-slow", "2:3"],
        2,
        ["--emulate-slow 2:3", "no rank 2", "a team of 2"],
    ),
    "a rank made faster": (
        ["run.yaml", "--emulate-slow", "0:0.5"],
        2,
        ["--emulate-slow '0:0.5'", "1 or more"],
    ),
    "the demo of a file": (["run.yaml", "--demo"], 2, ["--demo", "run.yaml", "leave one"]),
    "a name that is a path": (["run.yaml", "--name", "a/b"], 2, ["'a/b'", "--out"]),
    "something else allowed": (
        ["run.yaml", "--resume", "--allow", "model"],
        2,
        ["--allow model", "data, precision"],
    ),
    "allowed without a resume": (
        ["run.yaml", "--allow", "data"],
        2,
        ["--allow data", "add --resume"],
    ),
    "a size of a tokenizer that is not trained": (
        ["run.yaml", "--set", "data={path: corpus, vocab_size: 300}"],
        2,
        ["vocab_size is 300", "'bpe'"],
    ),
    "another policy": (["run.yaml", "--set", "policy=nearly"], 2, ["policy", "'nearly'", "sync"]),
}


@pytest.mark.parametrize("case", FOUND_AT_ONCE)
def test_what_is_wrong_is_said_before_any_rank_starts(lab, case, monkeypatch, capfd):
    arguments, code, words = FOUND_AT_ONCE[case]
    monkeypatch.chdir(lab.folder)
    assert main(["pretrain", *arguments]) == code
    said = capfd.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1
    for word in words:
        assert word in said.err
    assert not (lab.folder / "runs" / "run").exists()


def test_a_port_in_use(lab, monkeypatch, capfd):
    monkeypatch.chdir(lab.folder)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["pretrain", "run.yaml", "--port", port]) == 1
    said = capfd.readouterr().err
    assert said.startswith(f"error: port {port} cannot be opened on 127.0.0.1")
    assert "--port" in said


# ── found by the ranks ───────────────────────────────────────────────────────────────────────────


def refused(lab, *arguments, code=1, nproc=1):
    """What rank 0 says when it refuses to run: one line, without a traceback."""
    finished = lab.run(*arguments, nproc=nproc, expected=None)
    assert finished.codes[0] == code, finished.said
    assert "Traceback" not in finished.said
    (error,) = [line for line in finished.said.splitlines() if line.startswith("error: ")]
    assert error == finished.said.splitlines()[-1]
    return error


def test_an_empty_data_folder(lab):
    (lab.folder / "empty").mkdir()
    error = refused(lab, "run.yaml", "--set", "data.path=empty", nproc=2)
    assert "empty: no file ends in .txt" in error
    assert "Name the folder that holds the text" in error


def test_text_that_is_too_short_for_one_batch(lab):
    error = refused(lab, "run.yaml", "--set", "batch_size=64", nproc=2)
    assert f"makes {NUM_SAMPLES} samples of 32 tokens" in error
    assert "batch_size=64" in error
    assert "give more text" in error


def test_a_tokenizer_with_more_ids_than_the_model(lab):
    config = json.dumps({**LLAMA, "vocab_size": 100})
    error = refused(lab, "run.yaml", "--set", f"model.config={config}", code=2)
    assert "257 ids" in error
    assert "100 embeddings" in error
    assert "set the model's vocab_size to 257" in error


def test_a_model_that_cannot_be_built(lab):
    config = json.dumps({**LAYER, "num_attention_heads": 5})
    error = refused(lab, "run.yaml", "--set", f"model.config={config}", code=2)
    assert "model.type='llama'" in error
    assert "32" in error
    assert "5" in error


def test_a_loss_that_is_not_finite_stops_every_rank(lab):
    finished = lab.run(
        *("run.yaml", "--name", "overflow", "--set", "optimizer.lr=1e30"),
        *("--set", "max_grad_norm=null"),
        nproc=2,
        expected=1,
    )
    errors = []
    for output in finished.outputs:
        assert "Traceback" not in output
        errors += [line for line in output.splitlines() if line.startswith("error: ")]
    assert len(errors) == 2
    assert errors[0] == errors[1]
    what = r"(the loss|the gradient of parameter 'model\.[\w.]+')"
    assert re.match(rf"error: {what} is not finite on rank \d in step \d+ \(window", errors[0])
    assert "lower the learning rate" in errors[0]
    last = lab.path_of("overflow").events[-1]
    assert last["reason"] == "failed"
    assert "is not finite on rank" in last["message"]


# ── resuming what is damaged, foreign, or of something else ──────────────────────────────────────


@pytest.fixture(scope="module")
def template(lab):
    """A run of six windows of 18 that it will have, with checkpoints after 4 and 6 at least.

    The last checkpoint of a session is waited for; one before it is dropped where the disk is slow.
    """
    arguments = ("run.yaml", "--name", "part")
    lab.run(*arguments, "--set", "max_steps=4")
    lab.run(*arguments, "--set", "max_steps=6", "--resume")
    run = lab.path_of("part")
    assert [path.name for path in run.checkpoints][-2:] == ["step-4", "step-6"]
    return run.path.rename(lab.folder / "template")


@pytest.fixture
def stopped(lab, template):
    """A copy of the template that a test may do with as it likes."""
    run = lab.path_of("part")
    shutil.copytree(template, run.path)
    yield run
    shutil.rmtree(run.path)


def resume(*changes):
    settings = [part for change in changes for part in ("--set", change)]
    return ["run.yaml", "--name", "part", "--resume", *settings]


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(lab, stopped):
    path = stopped.path / "checkpoints" / "step-6" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1000] ^= 1
    path.write_bytes(data)
    older = {k: v for k, v in stopped.contents().items() if "step-4/" in k}
    foreign = stopped.path / "checkpoints" / "step-999"
    foreign.mkdir()
    (foreign / "notes.txt").write_text("mine")
    finished = lab.run(*resume("checkpoint.keep_last=20"), nproc=2)
    assert f"skipped checkpoint {foreign}: manifest.json is missing" in finished.said
    assert f"skipped checkpoint {path.parent}: model.safetensors is damaged" in finished.said
    assert f"resumed after 4 windows from {stopped.path}/checkpoints/step-4" in finished.said
    assert "skipped" not in finished.outputs[1]
    assert [event["window"] for event in stopped.of_type("run_resumed")] == [4, 4]
    assert check_exactly_once(stopped.events, NUM_SAMPLES, whole_epochs=2) == []
    assert (foreign / "notes.txt").read_text() == "mine"
    assert {k: v for k, v in stopped.contents().items() if "step-4/" in k} == older
    assert "step-6" in [path.name for path in stopped.checkpoints]  # written anew


def test_without_any_whole_checkpoint_there_is_nothing_to_resume(lab, stopped):
    for path in stopped.checkpoints:
        (path / "manifest.json").unlink()
    before = stopped.contents()
    error = refused(lab, *resume(), nproc=2)
    assert "holds a complete checkpoint to resume from; start without --resume" in error
    assert stopped.contents() == before


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ("data.seq_len=16", "data.seq_len 32 -> 16"),
        ("seed=1", "seed 0 -> 1"),
        ("data.heldout_fraction=0.3", "data.heldout_fraction 0.2 -> 0.3"),
    ],
)
def test_resuming_on_other_data_is_refused_with_the_difference(lab, stopped, change, difference):
    before = stopped.contents()
    error = refused(lab, *resume(change))
    assert "step-6 was trained on other data; what differs: " + difference + ". " in error
    assert "start without --resume" in error
    assert stopped.contents() == before


def test_resuming_on_changed_files_is_refused_with_their_size(lab, stopped, tmp_path):
    write_corpus(tmp_path / "corpus", seed=2)
    before = stopped.contents()
    error = refused(lab, *resume(f"data.path={tmp_path / 'corpus'}"))
    assert f"what differs: data.path corpus -> {tmp_path / 'corpus'}. " in error
    file = sorted((lab.folder / "corpus").iterdir())[0]
    text = file.read_text()
    try:
        file.write_text(text + "one more line\n")
        error = refused(lab, *resume())
    finally:
        file.write_text(text)
    assert "what differs: the files: " in error
    assert f"in {NUM_SAMPLES} samples for training when the checkpoint was written, " in error
    assert stopped.contents() == before


def test_resuming_another_model_is_refused_with_the_difference(lab, stopped):
    config = json.dumps({**TINY["model"]["config"], "intermediate_size": 48})
    before = stopped.contents()
    for allowed in ([], ["--allow", "data", "--allow", "precision"]):
        error = refused(lab, *resume(f"model.config={config}"), *allowed)
        assert "step-6 is of another model; what differs: intermediate_size 64 -> 48. " in error
    assert stopped.contents() == before


def test_resuming_in_another_precision_is_refused_unless_allowed(lab, stopped):
    before = stopped.contents()
    error = refused(lab, *resume("precision=bf16"))
    assert "step-6 was trained in another precision: precision auto -> bf16. Put that" in error
    assert "--allow precision" in error
    assert stopped.contents() == before
    finished = lab.run(*resume("precision=bf16", "max_steps=8"), "--allow", "precision")
    assert "changed since step-6: " in finished.said
    assert "precision auto -> bf16; ranks compute in bf16, not fp32" in finished.said
    assert stopped.summary["steps"] == 8


def test_naming_the_precision_that_it_has_is_no_change(lab, stopped):
    finished = lab.run(*resume("precision=fp32", "max_steps=7"))
    assert "changed since step-6: " in finished.said
    assert "ranks compute" not in finished.said
    assert stopped.summary["steps"] == 7


def test_other_data_can_be_allowed_and_begins_anew(lab, stopped, tmp_path):
    write_corpus(tmp_path / "corpus", num_files=9, seed=2)
    changes = (f"data.path={tmp_path / 'corpus'}", "epochs=1")
    finished = lab.run(*resume(*changes), "--allow", "data", nproc=2)
    assert "changed since step-6: data.path corpus -> " in finished.said
    assert "going on with other data, from its first epoch on" in finished.said
    resumed = stopped.of_type("run_resumed")[-1]
    assert (resumed["window"], resumed["new_data"]) == (6, True)
    num_samples = stopped.of_type("run_started")[-1]["num_samples"]
    assert num_samples != NUM_SAMPLES
    assert check_exactly_once(stopped.events, num_samples, whole_epochs=1) == []
    steps = 6 + -(-num_samples // TINY["batch_size"])
    assert stopped.summary["steps"] == steps
    assert stopped.of_type("run_started")[-1]["total_windows"] == steps
    # From then on that is its data; with what was before, the checkpoint is foreign.
    more = lab.run(*resume(changes[0], "epochs=2"))
    assert "going on with other data" not in more.said
    assert check_exactly_once(stopped.events, num_samples, whole_epochs=2) == []
    assert stopped.summary["steps"] == 6 + 2 * (steps - 6)
    assert "was trained on other data" in refused(lab, *resume())


def test_a_newer_run_without_a_checkpoint_does_not_stand_in_the_way(lab, stopped):
    newer = lab.folder / "runs" / "part-2"
    (newer / "checkpoints" / "step-3").mkdir(parents=True)
    (newer / "events.jsonl").touch()
    (lab.folder / "runs" / "part-3").mkdir()
    (lab.folder / "runs" / "part-3" / "events.jsonl").touch()
    try:
        finished = lab.run(*resume("max_steps=7"), nproc=2)
    finally:
        shutil.rmtree(newer)
        shutil.rmtree(lab.folder / "runs" / "part-3")
    assert f"skipped checkpoint {newer}/checkpoints/step-3: manifest.json is miss" in finished.said
    assert (
        f"continuing with {stopped.path}: no complete checkpoint was found in part-3, part-2"
        in finished.said
    )
    assert stopped.summary["steps"] == 7
