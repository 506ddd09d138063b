import shutil
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from evener.checkpoint import find_newest
from evener.comm.base import Communicator
from evener.ddp import Ddp
from evener.engine.results import Progress
from evener.errors import CheckpointError, ReplicasDifferError
from evener.loop.checkpointing import Checkpointer
from helpers.sinks import Kept
from helpers.teams import run_team, setup

CURSOR = {"seed": 0, "epoch": 0, "committed": [], "num_samples": 8}


def team_of(comm: Communicator, **config: int) -> Ddp:
    model = nn.Linear(2, 1)
    return setup(comm, model, torch.optim.AdamW(model.parameters(), lr=0.1), **config)


@pytest.fixture(autouse=True)
def failures(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What people are warned of."""
    told: list[str] = []
    monkeypatch.setattr("evener.loop.checkpointing.warn", told.append)
    return told


def checkpointer_of(ddp: Ddp, folder: Path) -> Checkpointer:
    return Checkpointer(
        ddp,
        folder,
        keep_last=2,
        assets={"notes.txt": b"hello"},
        documents={"run.json": {"seed": 3}},
        retry_s=0.0,
    )


def save_at(checkpointer: Checkpointer, ddp: Ddp, window: int) -> None:
    ddp.assembly.engine.run.progress = Progress(window=window)
    checkpointer.save(CURSOR)


def block(folder: Path) -> None:
    """Nothing can be written to it any more, nor can it be made anew."""
    shutil.rmtree(folder)
    folder.touch()


def test_a_folder_that_cannot_be_used_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        team_of(Communicator()) as ddp,
        pytest.raises(CheckpointError, match=r"folder .*/file/x cannot be used: .*choose one"),
    ):
        checkpointer_of(ddp, tmp_path / "file" / "x")


def test_rank_0_writes_and_all_learn_how_it_went(tmp_path: Path, failures: list[str]) -> None:
    def body(comm: Communicator) -> tuple[Path | None, list[int]]:
        kept = Kept()
        with team_of(comm) as ddp:
            ddp.events.report_to([lambda: kept])
            checkpointer = checkpointer_of(ddp, tmp_path)
            for window in (2, 4, 6):
                save_at(checkpointer, ddp, window)
                checkpointer.finish(CURSOR)
            newest = checkpointer.path
            checkpointer.close()
            checkpointer.close()
        return newest, [e["window"] for e in kept.events if e["type"] == "checkpoint"]

    (newest, steps), other = run_team(2, body)
    assert other == (newest, [])
    assert not failures
    assert newest == tmp_path / "step-6"
    assert steps == [2, 4, 6]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-4", "step-6"]
    checkpoint = find_newest(tmp_path)
    assert checkpoint is not None
    assert checkpoint.document("run.json") == {"seed": 3}
    assert checkpoint.asset("notes.txt") == b"hello"
    assert checkpoint.document("state.json")["positions"] == [CURSOR]
    assert set(checkpoint.tensors("model")) == {"weight", "bias"}


def test_what_is_saved_has_been_compared_where_that_was_asked_for(tmp_path: Path) -> None:
    def body(comm: Communicator) -> None:
        with team_of(comm, verify_every=1000) as ddp:
            checkpointer = checkpointer_of(ddp, tmp_path)
            save_at(checkpointer, ddp, 2)
            if comm.rank == 1:
                ddp.assembly.model.get_parameter("bias").data += 1e-3
            with pytest.raises(ReplicasDifferError, match="after window 3, parameter 'bias'"):
                save_at(checkpointer, ddp, 4)
            checkpointer.close()

    run_team(2, body)
    assert [path.name for path in tmp_path.iterdir()] == ["step-2"]


class Held(Kept):
    """What it was told is not written before ``written`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Event()

    def pending(self) -> list[threading.Event]:
        return [self.written]


def test_a_save_waits_for_nothing_and_its_checkpoint_for_the_events_before(tmp_path: Path) -> None:
    sink = Held()
    with team_of(Communicator()) as ddp:
        ddp.events.report_to([sink])
        checkpointer = checkpointer_of(ddp, tmp_path)
        save_at(checkpointer, ddp, 2)
        time.sleep(0.3)  # more than it takes to write it
        assert checkpointer.path is None
        sink.written.set()
        checkpointer.finish(CURSOR)
        assert checkpointer.path == tmp_path / "step-2"
        checkpointer.close()


def test_training_goes_on_after_a_write_that_failed(tmp_path: Path, failures: list[str]) -> None:
    folder = tmp_path / "c"
    with team_of(Communicator()) as ddp:
        checkpointer = checkpointer_of(ddp, folder)
        block(folder)
        checkpointer.save(CURSOR)
        with pytest.raises(CheckpointError, match="step-0 could not be written"):
            checkpointer.finish(CURSOR)
        assert len(failures) == 2, "one of each"
        folder.unlink()
        folder.mkdir()
        checkpointer.save(CURSOR)  # the same step, once more
        checkpointer.finish(CURSOR)
        assert checkpointer.path == folder / "step-0"
        checkpointer.close()
    assert len(failures) == 2


def test_a_failed_write_at_the_end_is_an_error_on_every_rank(
    tmp_path: Path, failures: list[str]
) -> None:
    # However early the failure was noticed: as a warning already, or only by `finish`.
    def body(comm: Communicator) -> str:
        with team_of(comm) as ddp:
            checkpointer = checkpointer_of(ddp, tmp_path / "c")
            if comm.rank == 0:
                block(tmp_path / "c")
            checkpointer.save(CURSOR)
            while comm.rank == 0 and not failures:
                checkpointer.report()
            with pytest.raises(CheckpointError) as caught:
                checkpointer.finish(CURSOR)
            checkpointer.close()
        return str(caught.value)

    first, second = run_team(2, body)
    assert first == second
    assert "checkpoint step-0 could not be written" in first


def test_a_lost_folder_is_made_anew_with_a_warning(tmp_path: Path, failures: list[str]) -> None:
    folder = tmp_path / "run" / "checkpoints"
    with team_of(Communicator()) as ddp:
        checkpointer = checkpointer_of(ddp, folder)
        checkpointer.save(CURSOR)
        checkpointer.finish(CURSOR)
        shutil.rmtree(tmp_path / "run")
        save_at(checkpointer, ddp, 2)
        checkpointer.finish(CURSOR)
        assert checkpointer.path == folder / "step-2"
        checkpointer.close()
    assert find_newest(folder) is not None
    (failure,) = failures
    gone = f"{folder} was removed, and earlier checkpoints with it: created it again for step-2"
    assert gone in failure
