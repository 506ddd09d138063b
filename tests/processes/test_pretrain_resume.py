"""Resume: after SIGKILL on other numbers of ranks, over damaged checkpoints, or not at all."""

import json
import shutil
import time

import pytest

from helpers.forking import Zygote
from helpers.lineage import check_exactly_once
from helpers.pretraining import (
    NEEDED,
    NUM_SAMPLES,
    NUM_WINDOWS,
    RUN_TIMEOUT_S,
    TINY,
    WINDOWS_PER_EPOCH,
    Lab,
    be_evener,
    refused,
    relative_difference,
    wait_for_events,
    write_corpus,
)
from helpers.ranks import Rank, RankTeam
from helpers.tampering import NESTED


@pytest.fixture(scope="module")
def lab(tmp_path_factory, trained):
    lab = Lab(tmp_path_factory.mktemp("lab"))
    shutil.rmtree(lab.folder / "corpus")
    shutil.copytree(trained.folder / "corpus", lab.folder / "corpus")  # with its times
    yield lab
    lab.close()


# ── killed ───────────────────────────────────────────────────────────────────────────────────────


def hang_later(rank: Rank, folder: str, command: list[str]) -> int:
    """``evener pretrain`` that hangs after its fifth window; by the third it has saved one."""
    from evener.loop.checkpointing import Checkpointer

    report, seen = Checkpointer.report, set()

    def report_and_hang(self: Checkpointer) -> None:
        seen.add(self._ddp.window)
        done = self._ddp.window - min(seen)
        if self._write is not None and done <= 3:
            self._write.result(RUN_TIMEOUT_S)
        if self._ddp.is_main_process and done == 5:
            rank.send("hangs")
            time.sleep(3600.0)
        report(self)

    Checkpointer.report = report_and_hang  # type: ignore[method-assign]
    return be_evener(rank, folder, command)


def has_saved(events, session):
    """Whether a session has saved a window of its own, and committed another one after it."""
    starts = [place for place, event in enumerate(events) if event["type"] == "run_started"]
    if len(starts) < session:
        return False
    own = events[starts[-1] :]
    saved = [
        event["window"]
        for event in own
        if event["type"] == "checkpoint" and event["window"] > own[0]["window"]
    ]
    return bool(saved) and any(e["type"] == "window" and e["window"] > saved[0] for e in own)


def test_killed_runs_resume_on_other_numbers_of_ranks_as_if_nothing_had_been(lab, trained):
    """Killed on one rank, resumed and killed on three, resumed on two and finished."""
    run = lab.path_of()
    Zygote.get().preload(*NEEDED)
    for session, (nproc, *options) in enumerate([(1,), (3, "--resume")], start=1):
        with RankTeam(hang_later, nproc, str(lab.folder), ["pretrain", "run.yaml", *options]) as t:
            assert t.receive(0, RUN_TIMEOUT_S) == "hangs"
            wait_for_events(run, lambda events, own=session: has_saved(events, own))
    assert "resumed after " in lab.run("run.yaml", "--resume", nproc=2).said

    assert check_exactly_once(run.events, NUM_SAMPLES, whole_epochs=2) == []
    assert [len(event["members"]) for event in run.of_type("run_started")] == [1, 3, 2]
    first, second = [event["window"] for event in run.of_type("run_resumed")]
    assert 0 < first < second < NUM_WINDOWS
    assert first % WINDOWS_PER_EPOCH, "in mid-epoch"
    alone = trained.alone
    assert relative_difference(run.checkpoints[-1], alone.checkpoints[-1]) <= 1e-5
    assert run.summary["heldout_loss"] == pytest.approx(alone.summary["heldout_loss"], rel=1e-5)
    for key in ("committed_tokens", "committed_samples", "steps"):
        assert run.summary[key] == alone.summary[key], "the books cover all sessions"
    assert run.summary["elapsed_s"] < run.events[-1]["t"] - run.events[0]["t"]


# ── what is damaged, foreign, or of something else ───────────────────────────────────────────────


@pytest.fixture
def done(lab, trained):
    """A copy of a run that has ended."""
    run = lab.path_of("alone")
    shutil.copytree(trained.alone.path, run.path)
    yield run
    shutil.rmtree(run.path)


def options_of(*changes):
    settings = [part for change in changes for part in ("--set", change)]
    return ["run.yaml", "--name", "alone", "--resume", *settings]


def test_a_run_that_has_ended_is_left_alone_and_can_be_given_more_to_do(lab, done):
    before = done.contents()
    said = lab.run(*options_of(), nproc=2).said
    assert f"{done.path} has been completed (18 steps): nothing to do" in said
    assert done.contents() == before
    said = lab.run(*options_of("epochs=3", "optimizer.lr=5e-4"), nproc=2).said
    assert "changed since step-18: optimizer.lr 0.001 -> 0.0005; epochs 2 -> 3" in said
    assert check_exactly_once(done.events, NUM_SAMPLES, whole_epochs=3) == []
    assert {e["lr"] <= 5e-4 for e in done.of_type("window") if e["window"] >= 18} == {True}


def test_damaged_checkpoints_and_events_are_named_and_skipped(lab, done):
    """``unit/checkpoint`` has every kind of damage."""
    damaged, sound = done.checkpoints[-1], done.checkpoints[-2]
    (damaged / "run.json").unlink()
    foreign = done.path / "checkpoints" / "step-999"
    foreign.mkdir()
    (foreign / "notes.txt").touch()
    with (done.path / "events.jsonl").open("ab") as events:
        events.write(b'{"t": 1.0, "type": "window", "window": ' + NESTED + b"}\n\xff\xfe\0\n")
        events.write(b'{"t": 1.0, "ty')
    finished = lab.run(*options_of("checkpoint.keep_last=20"), nproc=2)
    for path, why in (
        (foreign, "manifest.json is missing"),
        (damaged, "run.json is missing"),
    ):
        (line,) = [line for line in finished.said.splitlines() if f"checkpoint {path}:" in line]
        assert why in line
    assert "skipped" not in finished.outputs[1]
    assert f"resumed after {sound.name.removeprefix('step-')} window" in finished.said
    assert check_exactly_once(done.events, NUM_SAMPLES, whole_epochs=2) == []
    assert (foreign / "notes.txt").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            "data.seq_len=16",
            [
                "different data (data ",
                "data.seq_len 32 -> 16). Put data, seed and the files that they name back",
                "continue with it by --allow data",
            ],
        ),
        (
            "model.config=" + json.dumps({**TINY["model"]["config"], "intermediate_size": 48}),
            ["different model (model.intermediate_size 64 -> 48; "],
        ),
        (
            "precision=bf16",
            [
                "different precision (precision 'auto' -> 'bf16'). Put precision back",
                "--allow precision",
            ],
        ),
    ],
)
def test_resuming_something_else_is_refused_with_the_difference(lab, done, change, words):
    before = done.contents()
    error = refused(lab, *options_of(change, "epochs=3"))
    assert all(word in error for word in ["step-18 ", *words]), error
    assert done.contents() == before


def test_other_data_can_be_allowed_and_begins_anew(lab, done, tmp_path):
    write_corpus(tmp_path / "corpus", num_files=9, seed=2)
    changes = (f"data.path={tmp_path / 'corpus'}", "epochs=1")
    said = lab.run(*options_of(*changes), "--allow", "data", nproc=2).said
    assert "continuing with other data, from its first epoch on" in said
    resumed = done.of_type("run_resumed")[-1]
    assert (resumed["window"], resumed["new_data"]) == (NUM_WINDOWS, True)
    num_samples = done.of_type("run_started")[-1]["num_samples"]
    assert num_samples != NUM_SAMPLES
    assert check_exactly_once(done.events, num_samples, whole_epochs=1) == []
    # From then on that is its data; with what was before, the checkpoint is foreign.
    assert "different data (data" in refused(lab, *options_of("epochs=3"))
