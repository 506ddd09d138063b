from pathlib import Path

import pytest

from evener.comm.base import Communicator, SingleCommunicator
from evener.errors import CheckpointError, ConfigError
from evener.run.folders import agree_on_folder, new_run, newest_run
from evener.run.team import Team
from helpers.teams import run_team


def make_run(folder: Path, *, checkpoints: bool = True) -> None:
    folder.mkdir(parents=True)
    (folder / "events.jsonl").touch()
    if checkpoints:
        (folder / "checkpoints").mkdir()


def agree(parent: Path, name: str, *, resume: bool = False) -> Path:
    team = Team(SingleCommunicator(), payload_length=1)
    return agree_on_folder(team, parent, name, resume=resume)


def test_a_new_run_gets_the_next_free_number(tmp_path: Path) -> None:
    assert agree(tmp_path / "runs", "x") == tmp_path / "runs" / "x"
    make_run(tmp_path / "y")
    make_run(tmp_path / "y-2", checkpoints=False)
    assert agree(tmp_path, "y") == tmp_path / "y-3"
    assert (tmp_path / "y-3").is_dir()


def test_a_folder_without_a_run_in_it_is_used(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "notes.txt").touch()
    assert new_run(tmp_path, "x") == tmp_path / "x"


def test_resume_takes_the_run_with_the_highest_number(tmp_path: Path) -> None:
    for name in ("x", "x-2", "x-10", "x-y", "x-1", "x-03", "xx-20"):
        make_run(tmp_path / name)
    (tmp_path / "x-99").mkdir()  # no run
    assert newest_run(tmp_path, "x") == tmp_path / "x-10"
    assert newest_run(tmp_path, "x-2") == tmp_path / "x-2"
    assert agree(tmp_path, "x", resume=True) == tmp_path / "x-10"


def test_names_are_no_patterns(tmp_path: Path) -> None:
    make_run(tmp_path / "a+b")
    make_run(tmp_path / "aab-2")
    assert newest_run(tmp_path, "a+b") == tmp_path / "a+b"


@pytest.mark.parametrize("checkpoints", [None, False])
def test_without_a_checkpoint_there_is_nothing_to_resume(
    tmp_path: Path, checkpoints: bool | None
) -> None:
    make_run(tmp_path / "x")
    if checkpoints is not None:
        make_run(tmp_path / "x-2", checkpoints=checkpoints)
    name = "z" if checkpoints is None else "x"
    missing = "z" if checkpoints is None else "x-2"
    with pytest.raises(CheckpointError, match=f"{tmp_path / missing} is no run to resume: it has"):
        newest_run(tmp_path, name)
    with pytest.raises(CheckpointError, match="is no run to resume"):
        newest_run(tmp_path / "absent", name)


def test_all_ranks_take_rank_0s_choice(tmp_path: Path) -> None:
    make_run(tmp_path / "x")

    def body(comm: Communicator) -> Path:
        # Another host may see another folder of runs.
        parent = tmp_path if comm.rank == 0 else tmp_path / "elsewhere"
        return agree_on_folder(Team(comm, payload_length=1), parent, "x", resume=False)

    assert run_team(3, body) == [tmp_path / "x-2"] * 3
    assert not (tmp_path / "elsewhere").exists()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file/x cannot be made: .*; choose another with --out"):
        agree(tmp_path / "file", "x")
