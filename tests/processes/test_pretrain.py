"""``evener pretrain`` on two unequal ranks: the parameters, and the files that it leaves."""

import json
import re
import shutil
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from helpers.forking import Zygote
from helpers.lineage import check_exactly_once
from helpers.pretraining import (
    NEEDED,
    NUM_SAMPLES,
    NUM_WINDOWS,
    RUN_TIMEOUT_S,
    TINY,
    Lab,
    relative_difference,
)
from helpers.ranks import Rank, run_ranks


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    lab = Lab(tmp_path_factory.mktemp("lab"))
    yield lab
    lab.close()


def in_a_rank(function, *args):
    """Runs a function where transformers is imported already."""
    Zygote.get().preload(*NEEDED)
    return run_ranks(function, 1, *map(str, args))[0]


# ── what the team has trained ────────────────────────────────────────────────────────────────────


def test_two_unequal_ranks_do_what_one_does(trained):
    team, alone = trained.team, trained.alone
    assert check_exactly_once(team.events, NUM_SAMPLES, whole_epochs=2) == []
    assert relative_difference(team.checkpoints[-1], alone.checkpoints[-1]) <= 1e-5
    losses, evals = (
        [[(e["window"], e["loss"]) for e in run.of_type(kind)] for run in (team, alone)]
        for kind in ("window", "eval")
    )
    assert [window for window, _ in evals[0]] == [4, 8, 12, 16, 18]
    for ours, theirs in (losses, evals):
        assert ours == [(window, pytest.approx(loss, rel=1e-5)) for window, loss in theirs]
    assert losses[0][-1][1] < losses[0][0][1] - 0.2  # and it learns


def recompute(rank: Rank, checkpoint: str, corpus: str, cache: str) -> tuple[float, int, str]:
    """The held-out loss with nothing but transformers, in float64, one sample at a time."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from evener.config.runs import DataConfig
    from evener.tasks.text.corpus import prepare_corpus
    from evener.tasks.text.documents import FileSource
    from evener.tasks.text.tokenizer import ByteTokenizer

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64).eval()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    data = DataConfig(path=corpus, seq_len=32, heldout_fraction=0.2)
    _, heldout = prepare_corpus(FileSource(data), ByteTokenizer(), Path(cache), data)
    total, count = 0.0, 0
    with torch.no_grad():
        for i in range(len(heldout)):
            sample = heldout[i]
            logits = model(input_ids=sample["input_ids"][None]).logits[0]
            counted = sample["labels"] != -100
            chosen = torch.log_softmax(logits, -1)[counted, sample["labels"][counted]]
            total -= chosen.sum().item()
            count += int(counted.sum())
    return total / count, count, tokenizer.decode(tokenizer.encode("βeta"))


def test_the_checkpoint_gives_the_recorded_loss_in_transformers(trained, tmp_path):
    run = trained.team
    checkpoint = run.summary["checkpoint"]
    loss, num_tokens, text = in_a_rank(recompute, checkpoint, trained.folder / "corpus", tmp_path)
    last = run.of_type("eval")[-1]
    assert loss == pytest.approx(run.summary["heldout_loss"], rel=1e-5) == last["loss"]
    assert (last["weight"], text) == (num_tokens, "βeta")


# ── what it leaves ───────────────────────────────────────────────────────────────────────────────


def test_events_summary_checkpoints_and_board_tell_the_same_story(trained):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run, events, summary = trained.team, trained.team.events, trained.team.summary
    windows = run.of_type("window")
    kinds = Counter(event["type"] for event in events)
    assert (kinds["window"], kinds["worker_started"], kinds["eval"]) == (NUM_WINDOWS, 2, 5)
    assert [events[0]["type"], events[-1]["type"]] == ["run_started", "run_finished"]
    assert events[-1]["reason"] == "completed"
    written = {event["window"] for event in run.of_type("checkpoint")}
    assert {0, NUM_WINDOWS} <= written <= set(range(0, NUM_WINDOWS + 1, 2))
    assert len(run.checkpoints) == TINY["checkpoint"]["keep_last"]

    tokens = sum(row["weight"] for event in windows for row in event["ranks"])
    assert summary["committed_tokens"] == trained.alone.summary["committed_tokens"] == tokens
    assert sum(row["samples"] for row in summary["ranks"]) == 2 * NUM_SAMPLES
    assert (summary["world_size"], summary["policy"], summary["backend"]) == (2, "sync", "shared")
    assert Path(summary["checkpoint"]) == run.checkpoints[-1]
    assert summary["emulated"] == {"1": 2.0}
    assert min(summary["tokens_per_s"], *summary["solo_tokens_per_s"]) > 0
    assert (run.path / "sample.txt").read_text().startswith("def ")

    board = EventAccumulator(str(run.path / "tensorboard"))
    board.Reload()
    losses = [scalar.value for scalar in board.Scalars("train/loss")]
    assert losses == pytest.approx([event["loss"] for event in windows], rel=1e-5)

    state = json.loads((run.checkpoints[-1] / "state.json").read_text())
    (position,) = state["positions"]
    assert (position["epoch"], position["committed"]) == (2, []), "no rank count: only what is done"


def test_what_people_see(trained):
    # Rank 0 may rightly be parked; what rank 1 prints from then on comes with its name before it.
    lines = [line.removeprefix("[rank 1] ") for line in trained.said.splitlines()]
    assert {c for c in trained.said if not c.isprintable()} == {"\n"}, "a log file"
    assert lines[0].startswith("team of 2: 2 CPU ranks (unequal) | ")
    assert "emulated 2x slower" in lines[2]
    progress = [line for line in lines if re.match(r"step \d+/18  loss \d\.\d+", line)]
    assert any("tokens/s" in p and "ETA" in p and "rank 1: " in p for p in progress)
    for once in ("eval after step 18: heldout loss", "18 steps, "):
        assert len([line for line in lines if line.startswith(once)]) == 1, once
    assert lines[-1] == f"run folder: {trained.team.path}"


# ── what else it may be asked for ────────────────────────────────────────────────────────────────


def load_tokenizer(rank: Rank, checkpoint: str) -> tuple[int, list[int], str]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    ids = tokenizer.encode("alpha beta")
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    return model.get_input_embeddings().weight.shape[0], ids, tokenizer.decode(ids)


def test_a_tokenizer_is_trained_on_the_corpus_saved_with_the_model_and_used_on_resume(lab):
    settings = ["data.tokenizer=bpe", "data.vocab_size=300", "data.seq_len=16", "eval.every=0"]
    options = ["run.yaml", "--name", "bpe", *(w for s in settings for w in ("--set", s))]
    assert "trained a tokenizer of " in lab.run(*options, "--set", "max_steps=4", nproc=2).said
    run = lab.path_of("bpe")
    rows, ids, text = in_a_rank(load_tokenizer, run.checkpoints[-1])
    assert (rows, text) == (300, "alpha beta")
    assert 2 <= len(ids) < len("alpha beta")
    # Neither the cache nor the text that it was trained on is needed to go on with it.
    shutil.rmtree(lab.folder / "runs" / ".cache")
    more = lab.run(*options, "--resume", "--set", "max_steps=6")
    assert "trained a tokenizer" not in more.said
    assert [event["window"] for event in run.of_type("window")] == list(range(6))


def test_a_run_continues_from_the_model_of_another_one_and_is_quiet(lab, trained):
    model = f"model={{path: {trained.alone.checkpoints[-1]}}}"
    options = ("--name", "further", "--quiet", "--set", model, "--set", "max_steps=1")
    assert lab.run("run.yaml", *options, nproc=2).outputs == ("", "")
    (window,) = lab.path_of("further").of_type("window")
    assert window["loss"] == pytest.approx(trained.alone.of_type("window")[-1]["loss"], abs=0.15)


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
    with pytest.raises(evener.CheckpointError, match="different data"):
        evener.pretrain(keys, texts[1:], resume=True, quiet=True)
    return [asdict(result) for result in results]


def test_a_script_pretrains_on_a_hugging_face_dataset(lab):
    Zygote.get().preload(*NEEDED)
    first, second = run_ranks(pretrain_in_a_script, 2, str(lab.folder))
    assert first == second
    run = lab.path_of("script")
    names = [Path(result["checkpoint"]).name for result in first]
    assert names == ["step-3", "step-5"]
    assert first[1]["heldout_loss"] == run.of_type("eval")[-1]["loss"]
    assert [event["window"] for event in run.of_type("window")] == list(range(5))


@pytest.mark.long
def test_torchrun_starts_the_ranks(lab, trained):
    running = lab.sandbox.start(
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2),
        *("-m", "evener", "pretrain", "run.yaml", "--name", "torchrun"),
    )
    ended = running.end(RUN_TIMEOUT_S)
    assert ended.code == 0, ended.err
    run = lab.path_of("torchrun")
    assert check_exactly_once(run.events, NUM_SAMPLES, whole_epochs=2) == []
    assert relative_difference(run.checkpoints[-1], trained.alone.checkpoints[-1]) <= 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("beside", [0, 1])
def test_gpus_pretrain_alone_and_beside_a_cpu(lab, beside):
    import torch

    num_gpus = torch.cuda.device_count() if beside else 1
    size, name = num_gpus + beside, f"beside-{beside}"
    # Measured, a CPU may turn out too slow for any share.
    options = ("--set", "epochs=1", "--set", f"speed_hint={[1] * size}")
    ended = lab.command("run.yaml", "--nproc", size, "--name", name, *options).end(RUN_TIMEOUT_S)
    assert ended.code == 0, ended.err
    run = lab.path_of(name)
    ranks = run.summary["ranks"]
    kinds = [rank["device"].partition(":")[0] for rank in ranks]
    assert kinds == ["cuda"] * num_gpus + ["cpu"] * beside
    assert all(rank["samples"] > 0 for rank in ranks)
    assert check_exactly_once(run.events, NUM_SAMPLES) == []
