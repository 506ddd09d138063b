import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from evener.checkpoint import WrittenCheckpoint, find_newest
from evener.comm.base import Communicator, SingleCommunicator
from evener.errors import CheckpointError
from evener.run.checkpointing import Checkpointer
from evener.run.ddp import Ddp
from evener.run.results import Progress
from helpers.teams import run_team, setup

CURSOR = {"seed": 0, "epoch": 0, "committed": [], "num_samples": 8}


def team_of(comm: Communicator) -> Ddp:
    model = nn.Linear(2, 1)
    return setup(comm, model, torch.optim.AdamW(model.parameters(), lr=0.1))


def checkpointer_of(
    ddp: Ddp,
    folder: Path,
    written: list[WrittenCheckpoint] | None = None,
    on_failure: Callable[[str], None] | None = None,
) -> Checkpointer:
    return Checkpointer(
        ddp,
        folder,
        keep_last=2,
        assets={"notes.txt": b"hello"},
        documents={"run.json": {"seed": 3}},
        on_written=(written if written is not None else []).append,
        on_failure=on_failure or pytest.fail,
    )


def test_rank_0_writes_and_all_learn_how_it_went(tmp_path: Path) -> None:
    def body(comm: Communicator) -> tuple[Path | None, list[int]]:
        written: list[WrittenCheckpoint] = []
        with team_of(comm) as ddp:
            checkpointer = checkpointer_of(ddp, tmp_path, written)
            for window in (2, 4, 6):
                ddp.assembly.engine.progress = Progress(window=window)
                checkpointer.save(CURSOR)
                checkpointer.finish()
            newest = checkpointer.finish()
            checkpointer.close()
            checkpointer.close()
        return newest, [each.step for each in written]

    (newest, steps), other = run_team(2, body)
    assert other == (None, [])
    assert newest == tmp_path / "step-6"
    assert steps == [2, 4, 6]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-4", "step-6"]
    checkpoint = find_newest(tmp_path)
    assert checkpoint is not None
    assert checkpoint.document("run.json") == {"seed": 3}
    assert checkpoint.asset("notes.txt") == b"hello"
    assert checkpoint.document("state.json")["cursor"] == CURSOR
    assert set(checkpoint.tensors("model")) == {"weight", "bias"}


def test_a_step_is_saved_once(tmp_path: Path) -> None:
    written: list[WrittenCheckpoint] = []
    with team_of(SingleCommunicator()) as ddp:
        checkpointer = checkpointer_of(ddp, tmp_path, written)
        for _ in range(3):
            checkpointer.save(CURSOR)
        checkpointer.finish()
        checkpointer.close()
    assert [each.step for each in written] == [0]


def test_training_goes_on_after_a_write_that_failed(tmp_path: Path) -> None:
    failures: list[str] = []
    folder = tmp_path / "c"
    with team_of(SingleCommunicator()) as ddp:
        checkpointer = checkpointer_of(ddp, folder, on_failure=failures.append)
        shutil.rmtree(folder)
        checkpointer.save(CURSOR)
        with pytest.raises(CheckpointError, match="step-0 could not be written"):
            checkpointer.finish()
        assert len(failures) == 1
        folder.mkdir()
        checkpointer.save(CURSOR)  # the same step, once more
        assert checkpointer.finish() == folder / "step-0"
        checkpointer.close()
    assert len(failures) == 1


def test_a_failed_write_at_the_end_is_an_error_on_every_rank(tmp_path: Path) -> None:
    # However early the failure was noticed: as a warning already, or only by `finish`.
    def body(comm: Communicator) -> str:
        failures: list[str] = []
        with team_of(comm) as ddp:
            checkpointer = checkpointer_of(ddp, tmp_path / "c", on_failure=failures.append)
            if comm.rank == 0:
                shutil.rmtree(tmp_path / "c")
            checkpointer.save(CURSOR)
            while comm.rank == 0 and not failures:
                checkpointer.report()
            with pytest.raises(CheckpointError) as caught:
                checkpointer.finish()
            checkpointer.close()
        return str(caught.value)

    first, second = run_team(2, body)
    assert first == second
    assert "checkpoint step-0 could not be written" in first


def test_what_only_could_not_be_tidied_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("read-only")

    monkeypatch.setattr("evener.checkpoint.writer.remove_old", refuse)
    failures: list[str] = []
    with team_of(SingleCommunicator()) as ddp:
        checkpointer = checkpointer_of(ddp, tmp_path, on_failure=failures.append)
        checkpointer.save(CURSOR)
        assert checkpointer.finish() == tmp_path / "step-0"
        checkpointer.close()
    assert len(failures) == 1
    assert "older checkpoints" in failures[0]
