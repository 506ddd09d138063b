"""Kill a run with SIGKILL, resume it on other numbers of ranks: nothing is lost or seen twice."""

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
    be_evener,
    relative_difference,
    seen_samples,
)
from helpers.ranks import Rank, RankTeam


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    lab = Lab(tmp_path_factory.mktemp("lab"))
    yield lab
    lab.close()


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


def kill_in_the_middle(lab, run, *arguments, session, nproc):
    """SIGKILL to all ranks of a session, when it has told what it has done."""
    Zygote.get().preload(*NEEDED)
    command = ["pretrain", "run.yaml", *arguments]
    with RankTeam(hang_later, nproc, str(lab.folder), command) as team:
        assert team.receive(0, RUN_TIMEOUT_S) == "hangs"
        wait_until_written(run, lambda events: has_saved(events, session))


def wait_until_written(run: RunFolder, condition: Callable[[list[dict[str, Any]]], bool]) -> None:
    """A thread of the main rank writes events, a moment after training has gone on."""
    deadline_s = time.monotonic() + RUN_TIMEOUT_S
    while not condition(run.events):
        assert time.monotonic() < deadline_s, run.events
        time.sleep(0.01)


@pytest.fixture(scope="module")
def run(lab):
    """Killed on one rank, resumed and killed on three, resumed on two and finished."""
    run = lab.path_of("run")
    kill_in_the_middle(lab, run, session=1, nproc=1)
    kill_in_the_middle(lab, run, "--resume", session=2, nproc=3)
    third = lab.run("run.yaml", "--resume", nproc=2)
    assert "resumed after " in third.said
    return run


@pytest.fixture(scope="module")
def uninterrupted(lab):
    lab.run("run.yaml", "--name", "whole")
    return lab.path_of("whole")


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


def test_every_sample_counts_once(run):
    assert check_exactly_once(run.events, NUM_SAMPLES, whole_epochs=2) == []
    assert seen_samples(run.events, 0) == seen_samples(run.events, 1) == ONCE


def test_it_was_resumed_in_mid_epoch_on_other_numbers_of_ranks(run):
    started = run.of_type("run_started")
    assert [len(event["members"]) for event in started] == [1, 3, 2]
    places = [event["window"] for event in run.of_type("run_resumed")]
    assert [event["window"] for event in started] == [0, *places]
    assert 0 < places[0] < places[1] < NUM_WINDOWS
    assert all(place % WINDOWS_PER_EPOCH for place in places)
    ranks = {event["window"]: len(event["ranks"]) for event in run.of_type("window")}
    assert (ranks[0], ranks[places[0]], ranks[places[1]]) == (1, 3, 2)


def test_the_result_is_that_of_a_run_without_interruption(run, uninterrupted):
    difference = relative_difference(run.checkpoints[-1], uninterrupted.checkpoints[-1])
    assert difference <= 1e-5
    ours, theirs = run.summary, uninterrupted.summary
    assert ours["heldout_loss"] == pytest.approx(theirs["heldout_loss"], rel=1e-5)
    for key in ("committed_tokens", "committed_samples", "steps"):
        assert ours[key] == theirs[key]


def test_the_books_cover_all_sessions(run):
    summary = run.summary
    assert summary["world_size"] == 2
    # What the third rank of the second session did is in the totals, but it is no longer there.
    last = run.of_type("run_resumed")[-1]
    members = {m for event in run.of_type("run_started") for m in event["members"]}
    assert len(members) == 3
    kept = {e["window"]: e for e in run.of_type("window")}
    mine = sum(row["samples"] for e in kept.values() for row in e["ranks"] if row["rank"] < 2)
    assert sum(row["samples"] for row in summary["ranks"]) == mine
    events = run.events
    first_t = events[0]["t"]
    assert 0 < summary["elapsed_s"] < events[-1]["t"] - first_t
    assert summary["elapsed_s"] > events[-1]["t"] - last["t"]


def test_resuming_a_finished_run_says_so_and_touches_nothing(lab, run):
    before = run.contents()
    finished = lab.run("run.yaml", "--resume", nproc=2)
    assert f"{run.path} has been completed (18 steps): nothing to do" in finished.said
    assert "epochs" in finished.said
    assert run.contents() == before


def test_a_finished_run_can_be_given_more_to_do(lab, run):
    finished = lab.run("run.yaml", "--resume", "--set", "epochs=3", "--set", "optimizer.lr=5e-4")
    assert "changed since step-18: optimizer.lr 0.001 -> 0.0005; epochs 2 -> 3" in finished.said
    assert check_exactly_once(run.events, NUM_SAMPLES, whole_epochs=3) == []
    assert run.summary["steps"] == 27
    assert {e["lr"] <= 5e-4 for e in run.of_type("window") if e["window"] >= 18} == {True}


def test_resume_takes_the_newest_run_of_the_name(lab):
    for _ in range(2):
        lab.run("run.yaml", "--name", "twice", "--set", "max_steps=1")
    finished = lab.run("run.yaml", "--name", "twice", "--resume", "--set", "max_steps=2")
    assert finished.said.endswith(f"run folder: {lab.path_of('twice-2').path}\n")
    assert len(lab.path_of("twice").of_type("window")) == 1
    assert len(lab.path_of("twice-2").of_type("window")) == 2


def lose_the_folder(rank: Rank, folder: str) -> int:
    """``evener pretrain`` in which somebody removes the run's folder before the save of step 4."""
    import shutil

    from evener.loop.checkpointing import Checkpointer

    save, run = Checkpointer.save, RunFolder(Path(folder) / "runs" / "lost")

    def lose_then_save(self: Checkpointer, cursor_state: Any) -> None:
        if self._ddp.window == 4 and self._ddp.is_main_process:
            if self._write is not None:
                self._write.result(RUN_TIMEOUT_S)
            wait_until_written(
                run, lambda events: any(e["type"] == "window" and e["window"] == 3 for e in events)
            )
            # In one move: what is written meanwhile would keep the folder from being removed.
            run.path.rename(Path(folder) / "gone")
            shutil.rmtree(Path(folder) / "gone")
        save(self, cursor_state)

    Checkpointer.save = lose_then_save  # type: ignore[method-assign]
    return be_evener(rank, folder, ["pretrain", "run.yaml", "--name", "lost"])


def test_a_run_whose_folder_is_lost_goes_on_and_can_be_resumed(lab):
    Zygote.get().preload(*NEEDED)
    with RankTeam(lose_the_folder, 2, str(lab.folder)) as team:
        outcomes = team.wait(RUN_TIMEOUT_S)
    assert [outcome.value for outcome in outcomes] == [0, 0], outcomes[0].story()
    run = lab.path_of("lost")
    said = outcomes[0].output
    assert f"warning: {run.path / 'checkpoints'} had gone, and earlier checkpoints with it" in said
    assert f"warning: events are missing from {run.path / 'events.jsonl'}: the file was rem" in said
    assert run.checkpoints[-1].name == f"step-{NUM_WINDOWS}"
    assert run.summary["steps"] == NUM_WINDOWS
    assert [event["window"] for event in run.of_type("window")] == list(range(4, NUM_WINDOWS))
    more = lab.run("run.yaml", "--name", "lost", "--resume", "--set", "epochs=3")
    assert f"resumed after {NUM_WINDOWS} windows" in more.said


def slow_down_later(rank: Rank, folder: str) -> int:
    """``evener pretrain`` in which rank 1 computes everything twice from the middle on."""
    import torch

    from evener.tasks.job import Job

    train_micro_batch = Job.train_micro_batch

    def train_slower(self: Job, batch: Any) -> None:
        if self.ddp.rank == 1 and self.ddp.window >= NUM_WINDOWS // 2:
            loss, _ = self._task.loss(batch)
            torch.autograd.grad(loss, [*self.ddp.assembly.model.parameters()])
        train_micro_batch(self, batch)

    Job.train_micro_batch = train_slower  # type: ignore[method-assign]
    return be_evener(rank, folder, ["pretrain", "run.yaml", "--name", "halved"])


def check_figures(lab: Lab, name: str, said: str) -> None:
    """Whether terminal, summary and report show no multiple that two ranks cannot reach."""
    told = [float(times) for times in re.findall(r"the team did ([0-9.]+)x", said)]
    assert told or "the team is not compared with its ranks alone" in said
    assert max(told, default=0.0) <= 2.1, "of two ranks"
    run = lab.path_of(name)
    of_ideal = run.summary["of_ideal"]
    assert (of_ideal is not None) == bool(told)
    assert of_ideal is None or 0 < of_ideal <= 1.05
    reported = lab.sandbox.evener("report", run.path, "--json").end()
    (found,) = json.loads(reported.out)["runs"]
    assert found["team"]["of_ideal"] == pytest.approx(of_ideal, rel=1e-4)


def test_a_speed_that_halves_in_a_session_makes_no_figure_that_cannot_be(lab):
    Zygote.get().preload(*NEEDED)
    with RankTeam(slow_down_later, 2, str(lab.folder)) as team:
        outcomes = team.wait(RUN_TIMEOUT_S)
    assert [outcome.value for outcome in outcomes] == [0, 0], outcomes[0].story()
    check_figures(lab, "halved", "".join(outcome.output for outcome in outcomes))


def test_speeds_that_change_at_a_resume_make_no_figure_that_cannot_be(lab):
    """All devices are eight times as slow in the second session."""
    options = ("run.yaml", "--name", "slower")
    lab.run(*options, "--set", "max_steps=12", nproc=2)
    slow = ("--emulate-slow", "0:8", "--emulate-slow", "1:8")
    ended = lab.run(*options, "--resume", "--set", "max_steps=18", *slow, nproc=2)
    said = "".join(ended.outputs)
    assert "the team did " in said, "the closing table compares"
    check_figures(lab, "slower", said)
