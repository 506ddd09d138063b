import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import evener
from evener.config.folders import (
    FolderLock,
    claim_folder,
    release_folder,
    runs_of,
)
from evener.config.runs import DataConfig
from evener.errors import CheckpointError, UserError
from evener.tasks.language_model import model_folder
from evener.tasks.text.bpe import trained_tokenizer
from evener.tasks.text.corpus import prepare_corpus
from evener.tasks.text.documents import RecordSource
from evener.tasks.text.tokenizer import ByteTokenizer, load_tokenizer
from helpers.limits import PATIENCE_S


def make_run(folder: Path, *, checkpoints: bool = True) -> None:
    folder.mkdir(parents=True)
    (folder / "events.jsonl").touch()
    if checkpoints:
        (folder / "checkpoints" / "step-3").mkdir(parents=True)


def test_a_new_run_gets_the_next_free_number(tmp_path: Path) -> None:
    assert claim_folder(tmp_path / "runs", "x") == tmp_path / "runs" / "x"
    assert claim_folder(tmp_path / "runs", "x") == tmp_path / "runs" / "x-2"
    make_run(tmp_path / "y")
    make_run(tmp_path / "y-2", checkpoints=False)
    assert claim_folder(tmp_path, "y") == tmp_path / "y-3"
    assert (tmp_path / "y-3").is_dir()


def test_runs_that_start_at_once_get_folders_of_their_own(tmp_path: Path) -> None:
    number = 16
    together = threading.Barrier(number)
    folders: list[Path] = []

    def start() -> None:
        together.wait(PATIENCE_S)
        folders.append(claim_folder(tmp_path / "runs", "x"))

    threads = [threading.Thread(target=start) for _ in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    names = {"x", *(f"x-{k}" for k in range(2, number + 1))}
    assert {folder.name for folder in folders} == names


def test_a_folder_in_which_no_run_began_is_given_back(tmp_path: Path) -> None:
    folder = claim_folder(tmp_path, "x")
    release_folder(folder)
    assert not folder.exists()
    folder.mkdir()
    (folder / "notes.txt").touch()
    assert claim_folder(tmp_path, "x") == folder
    release_folder(folder)
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    make_run(tmp_path / "y")
    release_folder(tmp_path / "y")
    assert (tmp_path / "y" / "events.jsonl").exists()


def test_runs_of_a_name_from_the_newest_on(tmp_path: Path) -> None:
    for name in ("x", "x-2", "x-10", "x-y", "x-1", "x-03", "xx-20"):
        make_run(tmp_path / name)
    (tmp_path / "x-99").mkdir()  # no run
    assert [folder.name for folder in runs_of(tmp_path, "x")] == ["x-10", "x-2", "x"]
    assert runs_of(tmp_path, "x-2") == [tmp_path / "x-2"]


def test_workers_keep_other_runs_out_while_their_run_has_no_main_process(tmp_path: Path) -> None:
    folder = claim_folder(tmp_path, "x")
    with FolderLock(folder) as main, FolderLock(folder) as worker, FolderLock(folder) as other:
        main.require()
        worker.share()
        assert not worker.take()
        main.close()
        assert not other.take()
        assert worker.take()
        worker.close()
        assert other.take()


def test_a_folder_in_use_is_refused_until_its_run_has_ended(tmp_path: Path) -> None:
    folder = claim_folder(tmp_path, "x")
    first, second = FolderLock(folder), FolderLock(folder)
    first.require()
    assert first.take()
    assert not second.take()
    with pytest.raises(CheckpointError, match=f"{folder} is in use: .*; wait for its end"):
        second.require()
    first.close()
    assert second.take()
    assert (folder / "events.jsonl").stat().st_size == 0
    second.close()


#: No user can open it, whatever the permissions: the name is too long for any file system.
UNREADABLE = "x" * 300


@pytest.mark.parametrize(
    "use",
    [
        lambda out: evener.pretrain({"data": {"path": UNREADABLE}}, out=out),
        lambda out: evener.pretrain({"data": {"tokenizer": UNREADABLE}}, out=out),
        lambda out: evener.pretrain({"model": {"path": UNREADABLE}}, out=out),
        lambda out: evener.pretrain({"name": "a"}, out=out / UNREADABLE, resume=True),
        lambda out: trained_tokenizer(source(), 300, out / UNREADABLE),
        lambda out: prepare_corpus(source(), ByteTokenizer(), out / UNREADABLE, DataConfig()),
        lambda out: load_tokenizer(out / UNREADABLE),
        lambda out: model_folder(str(out / UNREADABLE)),
    ],
)
def test_a_folder_that_cannot_be_read_is_named(
    use: Callable[[Path], object], tmp_path: Path
) -> None:
    with pytest.raises(
        UserError, match=r"x{300}.* cannot be read: .*; give this user access to it"
    ):
        use(tmp_path)


def source() -> RecordSource:
    return RecordSource(["one text", "another"], DataConfig())
