"""What a configuration can ask for: precision, models, tokenizers, TensorBoard, an early end."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from helpers.forking import Zygote
from helpers.lineage import check_exactly_once
from helpers.pretraining import NEEDED, NUM_SAMPLES, TINY, Lab, be_evener, relative_difference
from helpers.ranks import Rank, RankTeam, run_ranks


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    lab = Lab(tmp_path_factory.mktemp("lab"))
    yield lab
    lab.close()


@pytest.fixture(scope="module")
def plain(lab):
    lab.run("run.yaml", "--name", "plain")
    return lab.path_of("plain")


def start(lab, name, *settings, nproc=1):
    options = [part for setting in settings for part in ("--set", setting)]
    finished = lab.run("run.yaml", "--name", name, *options, nproc=nproc)
    return finished, lab.path_of(name)


def in_a_rank(function, *args):
    """Runs a function where transformers is imported already."""
    Zygote.get().preload(*NEEDED)
    return run_ranks(function, 1, *map(str, args))[0]


def test_bf16_comes_to_nearly_the_same_loss_with_parameters_in_fp32(lab, plain):
    _, run = start(lab, "half", "precision=bf16", nproc=2)
    exact = [event["loss"] for event in plain.of_type("window")]
    rounded = [event["loss"] for event in run.of_type("window")]
    assert rounded == pytest.approx(exact, rel=0.02)
    assert rounded != pytest.approx(exact, rel=1e-5)
    assert run.summary["heldout_loss"] == pytest.approx(plain.summary["heldout_loss"], rel=0.02)
    assert dtypes(run.checkpoints[-1]) == {"F32"}


def dtypes(checkpoint):
    data = (checkpoint / "model.safetensors").read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return {entry["dtype"] for name, entry in header.items() if name != "__metadata__"}


def test_a_run_goes_on_from_another_runs_checkpoint_as_its_model(lab, plain):
    checkpoint = plain.checkpoints[-1]
    _, run = start(lab, "further", f"model={{path: {checkpoint}}}", "max_steps=3", nproc=2)
    first = run.of_type("window")[0]["loss"]
    assert first == pytest.approx(plain.of_type("window")[-1]["loss"], abs=0.15)
    assert first < plain.of_type("window")[0]["loss"] - 0.2
    assert run.of_type("window")[0]["window"] == 0


def train_tokenizer(rank: Rank, corpus: str, folder: str) -> int:
    from pathlib import Path

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(path) for path in sorted(Path(corpus).iterdir())], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    fast.save_pretrained(folder)
    return len(fast)


def load_tokenizer(rank: Rank, checkpoint: str) -> tuple[int, list[int], str]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    ids = tokenizer.encode("alpha beta")
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    return model.get_input_embeddings().weight.shape[0], ids, tokenizer.decode(ids)


def test_a_tokenizer_folder_is_used_and_saved_with_the_model(lab):
    size = in_a_rank(train_tokenizer, lab.folder / "corpus", lab.folder / "words")
    _, run = start(lab, "words", "data.tokenizer=words", "data.seq_len=16", "max_steps=4", nproc=2)
    rows, ids, text = in_a_rank(load_tokenizer, run.checkpoints[-1])
    assert rows == size != 257
    assert text == "alpha beta"
    assert 2 <= len(ids) < len("alpha beta")
    assert run.of_type("run_started")[0]["num_samples"] < NUM_SAMPLES


def test_a_tokenizer_is_trained_on_the_corpus_saved_with_the_model_and_used_on_resume(lab):
    settings = ["data.tokenizer=bpe", "data.vocab_size=300", "data.seq_len=16", "eval.every=0"]
    finished, run = start(lab, "trained", *settings, "max_steps=4", nproc=2)
    assert "note: trained a tokenizer of " in finished.said
    rows, ids, text = in_a_rank(load_tokenizer, run.checkpoints[-1])
    assert rows == 300
    assert text == "alpha beta"
    assert 2 <= len(ids) < len("alpha beta")
    # Neither the cache nor the text that it was trained on is needed to go on with it.
    shutil.rmtree(lab.folder / "runs" / ".cache")
    again = [part for setting in settings for part in ("--set", setting)]
    resume = lab.run("run.yaml", "--name", "trained", *again, "--resume", "--set", "max_steps=6")
    assert "trained a tokenizer" not in resume.said
    assert [event["window"] for event in run.of_type("window")] == list(range(6))


def test_json_lines_with_broken_ones_left_out(lab):
    lines = [
        json.dumps({"body": path.read_text()}) for path in sorted((lab.folder / "corpus").iterdir())
    ]
    lines[3:3] = ["{", json.dumps({"title": "no body"})]
    (lab.folder / "web.jsonl").write_text("\n".join(lines) + "\n")
    data = "data={path: web.jsonl, text_key: body, seq_len: 32, heldout_fraction: 0.2%s}"
    arguments = ["run.yaml", "--name", "lines", "--set", "max_steps=3", "--set"]
    refused = lab.run(*arguments, data % "", nproc=2, expected=None)
    assert refused.codes[0] == 1
    assert "web.jsonl:4: not JSON: " in refused.said.splitlines()[-1]
    assert refused.said.splitlines()[-1].endswith("with data.on_error: skip")
    assert not (lab.folder / "runs" / "lines").exists()  # nothing began, so it is given back
    finished = lab.run(*arguments, data % ", on_error: skip", nproc=2)
    assert "note: left out 2 records without a text, the first: web.jsonl:4: not" in finished.said


def test_tensorboard_files(lab):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _, run = start(lab, "board", "tensorboard=true", "max_steps=5", "eval.every=2", nproc=2)
    board = EventAccumulator(str(run.path / "tensorboard"))
    board.Reload()
    losses = [(scalar.step, scalar.value) for scalar in board.Scalars("train/loss")]
    expected = [(e["window"] + 1, e["loss"]) for e in run.of_type("window")]
    assert [step for step, _ in losses] == [1, 2, 3, 4, 5]
    assert [v for _, v in losses] == pytest.approx([v for _, v in expected], rel=1e-5)
    assert [scalar.step for scalar in board.Scalars("eval/loss")] == [2, 4, 5]


def test_max_steps_ends_in_mid_epoch_and_a_resume_reads_the_rest(lab, plain):
    idle = ("max_anchor=0", "anchor=20")  # a file may hold them for another policy
    finished, run = start(lab, "short", "max_steps=4", "eval.every=0", *idle, nproc=2)
    assert finished.said.count("warning: anchor, max_anchor: no effect with policy 'sync'") == 1
    assert [event["window"] for event in run.of_type("window")] == [0, 1, 2, 3]
    assert run.of_type("eval")[0]["window"] == 4
    lab.run("run.yaml", "--name", "short", "--resume", nproc=1)
    assert check_exactly_once(run.events, NUM_SAMPLES, whole_epochs=2) == []
    assert run.summary["committed_tokens"] == plain.summary["committed_tokens"]


def test_a_part_of_the_heldout_text_is_weighed_as_what_it_is(lab, plain):
    _, whole = start(lab, "all-of-it", "max_steps=1", nproc=2)
    _, part = start(lab, "a-part", "max_steps=1", "eval.max_sequences=3", nproc=2)
    (everything,), (some,) = whole.of_type("eval"), part.of_type("eval")
    assert 3 * 32 - 6 <= some["weight"] <= 3 * 32 < everything["weight"]
    assert some["loss"] != everything["loss"]


def test_another_architecture_on_two_ranks_is_that_on_one(lab):
    config = json.dumps({"n_embd": 32, "n_layer": 1, "n_head": 2, "resid_pdrop": 0.0} | NO_DROPOUT)
    settings = ["model.type=gpt2", f"model.config={config}", "max_steps=6"]
    _, team = start(lab, "gpt2-team", *settings, nproc=2)
    _, alone = start(lab, "gpt2-alone", *settings)
    assert relative_difference(team.checkpoints[-1], alone.checkpoints[-1]) <= 1e-5


NO_DROPOUT = {"embd_pdrop": 0.0, "attn_pdrop": 0.0}


def test_a_rank_that_is_parked_and_called_back_changes_no_result(lab):
    # Rank 1 is far too slow: it is measured, parked as soon as that is certain, and called back at
    # the end, when the others have evaluated without it.
    settings = ("--set", "eval.every=3", "--set", "epochs=4")
    lab.run("run.yaml", "--name", "without", *settings)
    lab.run("run.yaml", "--name", "parked", *settings, "--emulate-slow", "1:60", nproc=2)
    without, run = lab.path_of("without"), lab.path_of("parked")
    assert any(event["parked"] == [1] for event in run.of_type("window"))
    assert check_exactly_once(run.events, NUM_SAMPLES, whole_epochs=4) == []
    assert relative_difference(run.checkpoints[-1], without.checkpoints[-1]) <= 1e-5
    ours, theirs = ([(e["window"], e["loss"]) for e in r.of_type("eval")] for r in (run, without))
    assert [window for window, _ in ours] == [*range(3, 37, 3)]
    for (window, loss), (other_window, other_loss) in zip(ours, theirs, strict=True):
        assert window == other_window
        assert loss == pytest.approx(other_loss, rel=1e-5)


def test_windows_that_are_not_finite_can_be_left_out(lab):
    _, run = start(
        *(lab, "skipping", "optimizer.lr=1e30", "max_grad_norm=null"),
        *("non_finite=skip", "max_steps=6", "eval.every=0"),
        nproc=2,
    )
    skipped = [event["skipped"] for event in run.of_type("window")]
    assert len(skipped) == 6
    assert skipped[0] is False
    assert skipped[-1] is True
    assert run.summary["steps"] == skipped.count(False)
    applied = [e for e in run.of_type("window") if not e["skipped"]]
    tokens = sum(row["weight"] for event in applied for row in event["ranks"])
    assert run.summary["committed_tokens"] == tokens


def with_a_spoilt_weight(rank, folder, command):
    """Pretrains; rank 1 changes a weight on its own in the first window, which has all ranks."""
    from evener.averaging.gradients import GradientAverager
    from evener.comm.base import Communicator

    exchanged = []
    all_reduce_each, average = Communicator.all_reduce_each, GradientAverager.average

    def watch(comm, tensors, *, timeout_s=None):
        exchanged.extend(what for what, _ in tensors)
        all_reduce_each(comm, tensors, timeout_s=timeout_s)

    def spoil(averager, *args, **options):
        norm = average(averager, *args, **options)
        if rank.rank == 1:
            flat = averager._flat
            flat.parameters[flat.names.index("model.norm.weight")].data[3] += 1.0
        return norm

    Communicator.all_reduce_each, GradientAverager.average = watch, spoil
    return be_evener(rank, folder, command), exchanged


def test_gradients_leave_by_blocks_and_weights_that_come_apart_halt_the_run(lab):
    Zygote.get().preload(*NEEDED)
    command = ["pretrain", "run.yaml", "--name", "spoilt", "--set", "verify_every=1"]
    command += ["--set", "model.config.num_hidden_layers=2"]
    # A sharded update sums all gradients at once, and has each weight computed on one rank alone.
    command += ["--set", "sharded_update=off"]
    with RankTeam(with_a_spoilt_weight, 2, str(lab.folder), command) as team:
        outcomes = team.wait(100.0)
    for outcome in outcomes:
        code, exchanged = outcome.value
        assert code == 1
        assert "after window 0, parameter 'model.norm.weight' of rank 1 is not" in outcome.output
        gradients = [w.partition(": ")[2] for w in exchanged if w.startswith("gradients of ")]
        assert gradients == ["block 1", "block 0", "LM head", "final norm", "embedding"]


def test_quiet_prints_nothing(lab):
    finished = lab.run("run.yaml", "--name", "quiet", "--quiet", "--set", "max_steps=1", nproc=2)
    assert finished.outputs == ("", "")
    assert lab.path_of("quiet").summary["steps"] == 1


def test_speeds_are_measured_when_asked_and_leave_no_trace(lab):
    options = ["max_steps=2", "eval.every=0"]
    _, plain = start(lab, "unmeasured", *options, nproc=2)
    _, run = start(lab, "measured", *options, "measure=true", nproc=2)
    assert plain.summary["solo_source"] == "compute time"
    assert plain.summary["equal_split_tokens_per_s"] is None
    assert run.summary["solo_source"] == "measured"
    assert run.summary["equal_split_tokens_per_s"] > 0
    assert run.summary["ceiling"] > 0
    assert relative_difference(run.checkpoints[-1], plain.checkpoints[-1]) <= 1e-5


def test_what_the_model_writes_cannot_command_a_terminal(lab):
    settings = ["max_steps=1", "sample.num_tokens=300", "sample.temperature=5"]
    finished, run = start(lab, "writer", *settings)
    written = (run.path / "sample.txt").read_bytes()
    assert any(byte < 32 and byte not in b"\n\t" for byte in written)  # it did write some
    assert {c for c in finished.said if not c.isprintable()} <= {"\n", "\t"}


# ── from Python ──────────────────────────────────────────────────────────────────────────────────


def pretrain_in_a_script(rank: Rank, folder: str) -> list[dict[str, Any]]:
    import os

    from datasets import Dataset

    import evener

    os.chdir(folder)
    texts = [path.read_text() for path in sorted(Path("corpus").iterdir())]
    dataset = Dataset.from_dict({"body": texts, "length": [len(text) for text in texts]})
    data = {"seq_len": 32, "heldout_fraction": 0.2, "text_key": "body"}
    keys = {**TINY, "name": "script", "data": data, "max_steps": 3, "sample": {"num_tokens": 0}}
    results = [evener.pretrain(keys, dataset, quiet=True)]
    keys["max_steps"] = 5
    results.append(evener.pretrain(keys, dataset, resume=True, quiet=True))
    with pytest.raises(evener.CheckpointError, match="was trained on other data"):
        evener.pretrain(keys, texts[1:], resume=True, quiet=True)
    with pytest.raises(evener.ConfigError, match="'corpus', but a data set is given"):
        evener.pretrain({"data": {"path": "corpus"}}, dataset, quiet=True)
    return [asdict(result) for result in results]


def test_a_script_pretrains_on_a_hugging_face_dataset(lab):
    Zygote.get().preload(*NEEDED)
    first, second = run_ranks(pretrain_in_a_script, 2, str(lab.folder))
    assert first == second
    run = lab.path_of("script")
    assert [result["checkpoint"] for result in first] == [
        run.path / "checkpoints" / "step-3",
        run.path / "checkpoints" / "step-5",
    ]
    assert {result["run_folder"] for result in first} == {run.path}
    assert first[1]["heldout_loss"] == run.of_type("eval")[-1]["loss"]
    assert not any(result["stopped"] for result in first)
    assert [event["window"] for event in run.of_type("window")] == list(range(5))
