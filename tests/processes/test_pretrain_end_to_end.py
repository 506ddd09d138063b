"""`evener pretrain` from the command line to the files that it leaves, on two unequal ranks."""

import json
import re
import socket
from collections import Counter
from pathlib import Path

import pytest

from helpers.forking import Zygote
from helpers.lineage import check_exactly_once
from helpers.pretraining import (
    NEEDED,
    NUM_SAMPLES,
    NUM_WINDOWS,
    ONCE,
    RUN_TIMEOUT_S,
    WINDOWS_PER_EPOCH,
    Lab,
    RunFolder,
    relative_difference,
    seen_samples,
)
from helpers.ranks import Rank, run_ranks


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    lab = Lab(tmp_path_factory.mktemp("lab"))
    lab.configure()
    yield lab
    lab.close()


@pytest.fixture(scope="module")
def ended(lab):
    """The command on two unequal ranks."""
    command = lab.command(*["run.yaml", "--nproc", "2", "--emulate-slow", "1:2", "--out", "team"])
    ended = command.end(RUN_TIMEOUT_S)
    assert ended.code == 0, ended.err
    return ended


@pytest.fixture(scope="module")
def team(lab, ended):
    return RunFolder(lab.folder / "team" / "run")


@pytest.fixture(scope="module")
def alone(lab):
    """The same configuration on one rank."""
    lab.run("run.yaml", "--out", "alone")
    return RunFolder(lab.folder / "alone" / "run")


def test_every_sample_is_in_the_parameters_once_an_epoch(team):
    assert team.of_type("run_started")[0]["num_samples"] == NUM_SAMPLES
    assert check_exactly_once(team.events, NUM_SAMPLES, whole_epochs=2) == []
    windows = team.of_type("window")
    sizes = [sum(row["samples"] for row in event["ranks"]) for event in windows]
    assert sizes == [7, 7, 7, 7, 7, 7, 7, 7, 4] * 2
    assert seen_samples(team.events, 0) == seen_samples(team.events, 1) == ONCE


def test_events_tell_the_whole_story(team):
    events = team.events
    assert all(isinstance(event["t"], float) for event in events)
    kinds = Counter(event["type"] for event in events)
    assert kinds["window"] == NUM_WINDOWS
    assert kinds["worker_started"] == 2
    assert kinds["eval"] == 5  # after windows 4, 8, 12, 16 and at the end
    assert kinds["plan"] >= 1
    assert [events[0]["type"], events[-1]["type"]] == ["run_started", "run_finished"]
    assert events[-1]["reason"] == "completed"
    written = {event["window"] for event in team.of_type("checkpoint")}
    assert {0, 18} <= written <= set(range(0, 19, 2))
    pids = [event["pid"] for event in team.of_type("worker_started")]
    assert len(set(pids)) == 2


def test_the_summary_has_every_figure(team, alone):
    summary = team.summary
    tokens = sum(row["weight"] for event in team.of_type("window") for row in event["ranks"])
    assert summary["committed_tokens"] == tokens == alone.summary["committed_tokens"]
    assert summary["committed_samples"] == 2 * NUM_SAMPLES
    assert (summary["world_size"], summary["policy"], summary["backend"]) == (2, "sync", "shared")
    assert (alone.summary["world_size"], alone.summary["backend"]) == (1, "none")
    assert Path(summary["checkpoint"]) == team.checkpoints[-1]
    assert team.checkpoints[-1].name == "step-18"
    assert summary["tokens_per_s"] > 0
    solo = summary["solo_tokens_per_s"]
    assert len(solo) == 2
    assert min(solo) > 0
    beside = summary["beside_solo_tokens_per_s"]
    assert beside > 0
    assert summary["of_ideal"] == pytest.approx(beside / sum(solo)) or beside > sum(solo)
    assert summary["emulated"] == {"1": 2.0}
    assert sum(row["samples"] for row in summary["ranks"]) == 2 * NUM_SAMPLES


def test_old_checkpoints_go(team):
    assert len(team.checkpoints) == 4


def recompute(rank: Rank, checkpoint: str, corpus: str, cache: str) -> tuple[float, int, str]:
    """The held-out loss with nothing but transformers, in float64, one sample at a time."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from evener.tasks.text.corpus import prepare_corpus
    from evener.tasks.text.file_source import FileSource
    from evener.tasks.text.tokenizer import ByteTokenizer

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64).eval()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    text = "alpha βeta\n"
    assert tokenizer.encode(text, add_special_tokens=False) == list(text.encode())
    source = FileSource([Path(corpus)])
    prepared = prepare_corpus(source, ByteTokenizer(), Path(cache), heldout_fraction=0.2, seed=0)
    heldout = prepared.split(32)[1]
    total, count = 0.0, 0
    with torch.no_grad():
        for i in range(len(heldout)):
            sample = heldout[i]
            logits = model(input_ids=sample["input_ids"][None]).logits[0]
            counted = sample["labels"] != -100
            chosen = torch.log_softmax(logits, -1)[counted, sample["labels"][counted]]
            total -= chosen.sum().item()
            count += int(counted.sum())
    return total / count, count, tokenizer.decode(tokenizer.encode("def f"))


def test_the_checkpoint_gives_the_recorded_loss_in_transformers(lab, team, tmp_path):
    Zygote.get().preload(*NEEDED)
    corpus = lab.folder / "corpus"
    (result,) = run_ranks(recompute, 1, team.summary["checkpoint"], str(corpus), str(tmp_path))
    loss, num_tokens, text = result
    assert loss == pytest.approx(team.summary["heldout_loss"], rel=1e-5)
    last = team.of_type("eval")[-1]
    assert (last["window"], last["loss"]) == (NUM_WINDOWS, team.summary["heldout_loss"])
    assert last["weight"] == num_tokens
    assert text == "def f"


def test_two_unequal_ranks_do_what_one_does(team, alone):
    assert team.summary["heldout_loss"] == pytest.approx(alone.summary["heldout_loss"], rel=1e-5)
    assert relative_difference(team.checkpoints[-1], alone.checkpoints[-1]) <= 1e-5
    ours, theirs = ([e["loss"] for e in run.of_type("window")] for run in (team, alone))
    assert ours == pytest.approx(theirs, rel=1e-5)
    evals = [[(e["window"], e["loss"]) for e in run.of_type("eval")] for run in (team, alone)]
    assert [window for window, _ in evals[0]] == [4, 8, 12, 16, 18]
    for (window, loss), (other_window, other_loss) in zip(*evals, strict=True):
        assert window == other_window
        assert loss == pytest.approx(other_loss, rel=1e-5)
    assert ours[-1] < ours[0] - 0.2  # and it learns


def test_what_people_see(ended, team):
    # Rank 0 may rightly be parked; what rank 1 prints from then on comes with its name before it.
    lines = [line.removeprefix("[rank 1] ") for line in ended.err.splitlines()]
    host = re.escape(socket.gethostname())
    memory = r"\d+\.\d GB, \d+ threads"
    assert lines[0].startswith("team of 2: 2 CPU ranks (unequal) | ")
    assert re.fullmatch(rf"  rank 0  cpu +\S.* \| {memory} \| {host} pid \d+", lines[1])
    assert re.fullmatch(
        rf"  rank 1  cpu +\S.* \| {memory}, emulated 2x slower \| {host} pid \d+", lines[2]
    )
    assert re.fullmatch(r"  backend shared: \w.*NCCL.*", lines[3])
    progress = [line for line in lines if re.match(r"step \d+/18  loss \d\.\d+", line)]
    assert len(progress) >= 3
    assert any("tokens/s" in p and "ETA" in p and "rank 1: " in p for p in progress)
    ends = [
        line for line in lines if re.match(r"eval after 18 windows: heldout loss \d\.\d+", line)
    ]
    assert len(ends) == 1
    text = "\n".join(lines)
    table = text[text.index("18 steps, ") :]
    assert re.search(r"held-out loss \d\.\d+", table)
    for word in ("rank", "share", "tokens/s alone", "wait", "contribution"):
        assert word in table
    # Where ranks compete for cores, one may rightly be parked or be told to be left out.
    advice = "leave out rank|the team is no faster"
    last = [line for line in lines if not re.match(advice, line)]
    assert re.match(r"the team did \d\.\d\dx rank \d alone\b", last[-2])
    assert last[-1] == f"run folder: {team.path}"
    assert table.count("emulated") == 1  # each fact once
    assert not re.search(r"\bsaved\b", table)  # more time than the run took
    assert ended.out == ""


def test_a_log_file_gets_no_control_characters(ended):
    assert {c for c in ended.err if not c.isprintable()} == {"\n"}


def test_the_text_that_the_model_writes_is_kept(team):
    assert (team.path / "sample.txt").read_text().startswith("def ")


def test_a_checkpoint_knows_no_rank_count(team):
    state = json.loads((team.checkpoints[-1] / "state.json").read_text())
    # What is of one device goes by its member; what is of the team is there once.
    of_members = {"planner", "micro_batch_limits"}
    of_the_team = {"progress", "positions", "schedule", "optimizers", "registered", "loss_scale"}
    assert set(state) == of_members | of_the_team
    assert state["progress"]["window"] == NUM_WINDOWS
    (position,) = state["positions"]
    assert position["committed"] == []
    assert position["epoch"] == 2
    assert WINDOWS_PER_EPOCH * 2 == NUM_WINDOWS
