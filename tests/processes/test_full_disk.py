"""A disk that is full: what can be saved later is saved later, and what was saved stays whole."""

import resource
import select
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from evener.checkpoint import find_newest
from evener.observe.following import read_events
from helpers.forking import Zygote
from helpers.lineage import check_exactly_once
from helpers.pretraining import (
    NEEDED,
    NUM_SAMPLES,
    NUM_WINDOWS,
    RUN_TIMEOUT_S,
    FolderWatch,
    Lab,
    RunFolder,
    be_evener,
)
from helpers.ranks import Rank, RankTeam, run_ranks

#: Files of a rank cannot grow beyond it: events fit, and an optimizer's state does not.
FULL_BYTES = 60_000


def be_evener_on_a_full_disk(rank: Rank, folder: str, command: list[str]) -> int:
    """``evener pretrain`` on ranks whose kernel refuses to write large files.

    On every rank, as each of them writes checkpoints while those below it are parked.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FULL_BYTES, hard))
    return be_evener(rank, folder, command)


def be_evener_on_a_disk_that_stays_full(rank: Rank, folder: str, command: list[str]) -> int:
    """As above; time for checkpoints passes only while they wait, however slow the disk is."""
    from evener.loop import checkpointing

    now_s = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    clock = SimpleNamespace(monotonic=lambda: now_s, sleep=sleep)
    checkpointing.time = clock  # type: ignore[assignment]
    return be_evener_on_a_full_disk(rank, folder, command)


def make_room(team: RankTeam) -> None:
    """Lets ranks write as much as they want again."""
    for pid in team.pids:
        _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))


def start(lab: Lab, *arguments: object, be: Callable[..., int]) -> RankTeam:
    Zygote.get().preload(*NEEDED)
    command = ["pretrain", "run.yaml", *map(str, arguments)]
    return RankTeam(be, 2, str(lab.folder), command)


def wait_for(run: RunFolder, condition: Callable[[list[dict[str, Any]]], bool]) -> None:
    """Waits until the events of a run fulfil a condition."""
    deadline_s = time.monotonic() + RUN_TIMEOUT_S
    run.path.mkdir(parents=True, exist_ok=True)
    with FolderWatch(run.path) as watch:
        while True:
            watch.forget()
            file = run.path / "events.jsonl"
            if condition(read_events(file) if file.exists() else []):
                return
            left_s = deadline_s - time.monotonic()
            assert select.select([watch.descriptor], [], [], max(0.0, left_s))[0], "nothing came"


def missed(events: list[dict[str, Any]]) -> list[int]:
    """The steps of failed attempts."""
    return [event["window"] for event in events if event["type"] == "checkpoint_missed"]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    lab = Lab(tmp_path_factory.mktemp("lab"))
    yield lab
    lab.close()


def test_the_last_state_is_saved_when_there_is_room_at_last(lab: Lab) -> None:
    run = lab.path_of("late")
    with start(lab, "--name", "late", be=be_evener_on_a_full_disk) as team:
        wait_for(run, lambda events: NUM_WINDOWS in missed(events))
        make_room(team)
        outcomes = team.wait(RUN_TIMEOUT_S)
    assert [outcome.value for outcome in outcomes] == [0, 0], outcomes[0].story()
    said = "".join(outcome.output for outcome in outcomes)
    first = missed(run.events)[0]
    checkpoints = run.path / "checkpoints"
    assert f"warning: checkpoint step-{first} could not be written to {checkpoints}: " in said
    assert "File too large" in said
    assert "free disk space there or choose another folder" in said
    assert f"step-{NUM_WINDOWS} could not be written" in said
    newest = find_newest(checkpoints)
    assert newest is not None
    assert newest.step == NUM_WINDOWS
    assert [path.name for path in run.checkpoints] == [newest.path.name]
    assert run.of_type("run_finished")[-1]["reason"] == "completed"


def test_a_disk_that_is_full_to_the_end_is_an_error_on_every_rank_and_harms_nothing(
    lab: Lab,
) -> None:
    run = lab.path_of("full")
    lab.run("run.yaml", "--name", "full", "--set", "max_steps=4")
    assert [path.name for path in run.checkpoints] == ["step-0", "step-2", "step-4"]
    before = len(run.events)
    arguments = ("--name", "full", "--resume", "--set", "checkpoint.retry_s=0.2")
    with start(lab, *arguments, be=be_evener_on_a_disk_that_stays_full) as team:
        outcomes = team.wait(RUN_TIMEOUT_S)
    for outcome in outcomes:
        assert outcome.value == 1, outcome.story()
    said = "".join(outcome.output for outcome in outcomes)
    assert f"step-{NUM_WINDOWS} could not be written" in said
    assert "earlier checkpoints are untouched" in said
    assert "it was tried for 0.2 s (checkpoint.retry_s)" in said
    assert missed(run.events[before:]).count(NUM_WINDOWS) >= 2
    assert [path.name for path in run.checkpoints] == ["step-0", "step-2", "step-4"]

    lab.run("run.yaml", "--name", "full", "--resume")
    assert run.checkpoints[-1].name == f"step-{NUM_WINDOWS}"
    assert check_exactly_once(run.events, NUM_SAMPLES, whole_epochs=2) == []


def be_evener_on_a_slow_disk(rank: Rank, folder: str, command: list[str]) -> int:
    """``evener pretrain`` whose first checkpoint is on disk no sooner than the test says so."""
    import os

    fsync, came = os.fsync, threading.Lock()

    def slow_fsync(descriptor: int) -> None:
        if threading.current_thread().name.startswith("evener-check") and came.acquire(
            blocking=False
        ):
            rank.receive(RUN_TIMEOUT_S)
        fsync(descriptor)

    os.fsync = slow_fsync
    return be_evener(rank, folder, command)


def test_every_checkpoint_that_is_skipped_for_a_slow_disk_is_named(lab: Lab) -> None:
    run = lab.path_of("slow")
    Zygote.get().preload(*NEEDED)
    command = ["pretrain", "run.yaml", "--name", "slow", "--set", "checkpoint.keep_last=99"]
    with RankTeam(be_evener_on_a_slow_disk, 1, str(lab.folder), command) as team:
        wait_for(run, lambda events: {2, 4} <= {*missed(events)})
        team.send(0, "go")
        (outcome,) = team.wait(RUN_TIMEOUT_S)
    assert outcome.value == 0, outcome.story()
    written = [event["window"] for event in run.of_type("checkpoint")]
    assert written[0] == 0
    assert written[-1] == NUM_WINDOWS
    # Each is one or the other, and the newest state is never the one that is left out.
    assert sorted(written + missed(run.events)) == list(range(0, NUM_WINDOWS + 1, 2))
    said = outcome.output
    assert "warning: checkpoint step-2 is skipped: step-0 was not yet written when" in said


def save_twice(rank: Rank, folder: str) -> list[str]:
    """``ddp.save`` in a loop of the user's: once with room, once without, once with room again."""
    import torch

    from evener import CheckpointError, Ddp

    model = torch.nn.Linear(200, 200)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    said = []
    with Ddp.setup(model, optimizer, devices="cpu", quiet=True) as ddp:
        for limit in (hard, FULL_BYTES, hard):
            ddp.backward(model(torch.ones(1, 200)).square().mean())
            ddp.step()
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
            try:
                ddp.save(folder)
            except CheckpointError as error:
                said.append(str(error))
                ddp.load(folder)
                said.append(f"window {ddp.window}")
    return said


def test_a_save_in_a_loop_of_ones_own_raises_on_every_rank_and_harms_nothing(
    tmp_path: Path,
) -> None:
    first, second = run_ranks(save_twice, 2, str(tmp_path))
    for failure, loaded in (first, second):
        assert f"checkpoint step-2 could not be written to {tmp_path}: " in failure
        assert loaded == "window 1"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-2"]
