import errno
import json
import math
import resource
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from evener.checkpoint import (
    CheckpointWriter,
    SkippedCheckpoint,
    Snapshot,
    WrittenCheckpoint,
    copy_to_cpu,
    find_newest,
    open_checkpoint,
)
from evener.checkpoint import (
    writer as writer_module,
)
from evener.errors import CheckpointError, ConfigError, UsageError

TIMEOUT_S = 100.0


def snapshot(step: int, **documents: Any) -> Snapshot:
    tensors = {"model": {"w": torch.full((64,), float(step))}, "optimizer": {}}
    return Snapshot(
        step, tensors, {"run.json": {"step": step, **documents}}, {"config.json": b"{}"}
    )


def save(folder: Path, *steps: int, keep_last: int | None = None) -> None:
    with CheckpointWriter(folder, keep_last) as writer:
        for step in steps:
            writer.submit(snapshot(step))
            assert writer.wait(TIMEOUT_S)
        error = writer.poll_error()
        assert error is None, error


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


class Gate:
    """Holds the writer's thread before a stage until it is opened."""

    def __init__(self, stage: str) -> None:
        self.stage = stage
        self.reached = threading.Event()
        self.opened = threading.Event()

    def __call__(self, stage: str) -> None:
        if stage == self.stage:
            self.reached.set()
            assert self.opened.wait(TIMEOUT_S)


def test_everything_comes_back(tmp_path: Path) -> None:
    weight = torch.randn(3, 4, dtype=torch.float64)
    model = {
        "embed": weight,
        "half": torch.randn(5).bfloat16(),
        "head": weight,
        "n": torch.tensor(3),
    }
    document = {
        "lr": 0.1 + 0.2,
        "best": math.inf,
        "betas": (0.9, 0.999),
        "by_rank": {0: "a", 1: None},
    }
    with CheckpointWriter(tmp_path / "new" / "folder") as writer:
        writer.submit(
            Snapshot(
                12, {"model": copy_to_cpu(model)}, {"run.json": document}, {"vocab.txt": b"\0a"}
            )
        )
        assert writer.wait(TIMEOUT_S)
        assert writer.poll_error() is None
        assert writer.last_path == tmp_path / "new" / "folder" / "step-12"
        (written,) = writer.poll()
        assert writer.poll() == []
    assert (written.step, written.path) == (12, writer.last_path)

    found = find_newest(tmp_path / "new" / "folder")
    assert found is not None
    assert found.step == 12
    tensors = found.tensors("model")
    assert {name: (t.dtype, t.tolist()) for name, t in tensors.items()} == {
        name: (t.dtype, t.tolist()) for name, t in model.items()
    }
    assert tensors["head"] is tensors["embed"]
    assert found.document("run.json") == document
    assert found.asset("vocab.txt") == b"\0a"
    manifest = json.loads((found.path / "manifest.json").read_bytes())
    assert manifest["aliases"] == {"model": {"head": "embed"}}
    assert sum(entry["bytes"] for entry in manifest["files"].values()) == written.num_bytes
    assert "world" not in json.dumps(manifest)
    with pytest.raises(CheckpointError, match=r"no file 'x\.json'; it has model\.safetensors"):
        found.document("x.json")


def test_documents_are_frozen_when_submitted(tmp_path: Path) -> None:
    gate = Gate("files")
    state = {"epoch": 1}
    writer = CheckpointWriter(tmp_path, on_stage=gate)
    writer.submit(Snapshot(1, {}, {"run.json": state}, {}))
    state["epoch"] = 2
    gate.opened.set()
    assert writer.close(TIMEOUT_S)
    assert open_checkpoint(tmp_path / "step-1").document("run.json") == {"epoch": 1}


def test_newest_is_by_number_and_retention_keeps_the_newest(tmp_path: Path) -> None:
    save(tmp_path, 8, 9, 10, keep_last=2)
    assert names(tmp_path) == ["step-10", "step-9"]
    found = find_newest(tmp_path)
    assert found is not None
    assert found.step == 10


def test_retention_never_deletes_what_was_just_written_nor_what_is_not_ours(tmp_path: Path) -> None:
    save(tmp_path, 50)
    (tmp_path / "step-60").mkdir()
    (tmp_path / "step-60" / "notes.txt").write_text("mine")
    (tmp_path / "keep").mkdir()
    save(tmp_path, 3, keep_last=1)
    assert names(tmp_path) == ["keep", "step-3", "step-50", "step-60"]


@pytest.mark.parametrize("keep_last", [0, -1])
def test_keep_last_below_one_is_refused(tmp_path: Path, keep_last: int) -> None:
    with pytest.raises(ConfigError, match="keep_last"):
        CheckpointWriter(tmp_path, keep_last)


def test_same_step_again_replaces_the_folder(tmp_path: Path) -> None:
    save(tmp_path, 5)
    (tmp_path / "step-5" / "model.safetensors").write_bytes(b"damaged")
    save(tmp_path, 5)
    assert names(tmp_path) == ["step-5"]
    assert open_checkpoint(tmp_path / "step-5").tensors("model")["w"][0] == 5.0


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def rewrite(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_bytes())
    path.write_text(json.dumps({**content, **changes}))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped bit": (lambda p: flip_a_byte(p / "model.safetensors"), "model.safetensors .*SHA-256"),
    "cut short": (lambda p: (p / "run.json").write_bytes(b"{"), r"run\.json is damaged: it has 1 "),
    "file gone": (lambda p: (p / "run.json").unlink(), r"run\.json is missing"),
    "no manifest": (lambda p: (p / "manifest.json").unlink(), r"manifest\.json is missing"),
    "torn manifest": (lambda p: (p / "manifest.json").write_bytes(b'{"for'), "not JSON"),
    "binary manifest": (lambda p: (p / "manifest.json").write_bytes(b"\xff\xfe"), "not JSON"),
    "foreign manifest": (
        lambda p: (p / "manifest.json").write_text('{"name": "app"}'),
        "not of an",
    ),
    "list manifest": (lambda p: (p / "manifest.json").write_text("[1]"), "not of an evener"),
    "future version": (lambda p: rewrite(p / "manifest.json", version=99), "version 99 is unknown"),
    "edited manifest": (lambda p: rewrite(p / "manifest.json", aliases={}, step=21), "checksum"),
    "renamed folder": (lambda p: p.rename(p.with_name("step-21")), "is of step 20, not of 21"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_checkpoint_is_skipped_by_name_and_reason(tmp_path: Path, name: str) -> None:
    damage, reason = DAMAGE[name]
    save(tmp_path, 10, 20)
    damage(tmp_path / "step-20")
    skipped: list[tuple[str, str]] = []
    found = find_newest(tmp_path, lambda path, why: skipped.append((path.name, why)))
    assert found is not None
    assert found.step == 10
    assert len(skipped) == 1
    assert skipped[0][0] in {"step-20", "step-21"}
    with pytest.raises(CheckpointError, match=reason):
        raise CheckpointError(skipped[0][1])
    with pytest.raises(CheckpointError, match=reason):
        open_checkpoint(tmp_path / skipped[0][0])


def test_nothing_usable_is_none(tmp_path: Path) -> None:
    assert find_newest(tmp_path / "missing") is None
    (tmp_path / "step-007").mkdir()
    (tmp_path / "step-3").write_text("a file")
    skipped: list[str] = []
    assert find_newest(tmp_path, lambda path, why: skipped.append(path.name)) is None
    assert skipped == ["step-3"]
    with pytest.raises(CheckpointError, match="does not exist"):
        open_checkpoint(tmp_path / "step-8")


def test_pickled_file_is_never_unpickled(tmp_path: Path) -> None:
    save(tmp_path, 1)
    torch.save({"w": torch.ones(1)}, tmp_path / "step-1" / "model.safetensors")
    assert find_newest(tmp_path) is None


def test_submit_does_not_wait_and_only_the_newest_waiting_snapshot_is_written(
    tmp_path: Path,
) -> None:
    gate = Gate("files")
    writer = CheckpointWriter(tmp_path, None, on_stage=gate)
    writer.submit(snapshot(1))
    assert gate.reached.wait(TIMEOUT_S)
    for step in (2, 3, 4):
        writer.submit(snapshot(step))
    assert writer.last_path is None
    assert not writer.wait(0.0)
    gate.opened.set()
    assert writer.wait(TIMEOUT_S)
    done = writer.poll()
    assert [one.step for one in done if isinstance(one, WrittenCheckpoint)] == [1, 4]
    skipped = [one for one in done if isinstance(one, SkippedCheckpoint)]
    assert skipped == [SkippedCheckpoint(2, 1, 3), SkippedCheckpoint(3, 1, 4)]
    assert writer.poll() == []
    assert names(tmp_path) == ["step-1", "step-4"]
    assert writer.close(TIMEOUT_S)


def test_memory_is_handed_out_only_when_no_longer_read(tmp_path: Path) -> None:
    gate = Gate("files")
    writer = CheckpointWriter(tmp_path, None, on_stage=gate)
    first, second, third = snapshot(1), snapshot(2), snapshot(3)
    writer.submit(first)
    assert gate.reached.wait(TIMEOUT_S)
    assert writer.take_finished() is None
    writer.submit(second)
    assert writer.take_finished() is None
    writer.submit(third)
    assert writer.take_finished() is second
    gate.opened.set()
    assert writer.wait(TIMEOUT_S)
    assert writer.take_finished() in (first, third)
    assert writer.take_finished() is None
    writer.close(TIMEOUT_S)


def test_closed_writer_refuses_and_leaves_no_thread(tmp_path: Path) -> None:
    before = threading.active_count()
    writer = CheckpointWriter(tmp_path)
    writer.submit(snapshot(1))
    assert writer.close(TIMEOUT_S)
    assert writer.close(TIMEOUT_S)
    with pytest.raises(UsageError, match="after close"):
        writer.submit(snapshot(2))
    for thread in threading.enumerate():
        if thread.name == "evener-checkpoint":
            thread.join(TIMEOUT_S)
    assert threading.active_count() == before
    assert names(tmp_path) == ["step-1"]


def test_full_disk_keeps_the_previous_and_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(tensors: object, path: Path, metadata: object) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    writer = CheckpointWriter(tmp_path)
    writer.submit(snapshot(1))
    assert writer.wait(TIMEOUT_S)
    with monkeypatch.context() as patch:
        patch.setattr(writer_module, "save_file", full)
        writer.submit(snapshot(2))
        assert writer.wait(TIMEOUT_S)
    assert writer.last_path == tmp_path / "step-1"
    error = writer.poll_error()
    assert error is not None
    assert "step-2 could not be written" in str(error)
    assert "No space left" in str(error)
    assert "step-1 stays in use" in str(error)
    assert isinstance(error.__cause__, OSError)
    assert writer.poll_error() is None
    assert names(tmp_path) == ["step-1"], "a failed write gives its space back"
    writer.submit(snapshot(3))
    assert writer.close(TIMEOUT_S)
    assert writer.last_path == tmp_path / "step-3"


@pytest.fixture
def small_files_only() -> Iterator[None]:
    """The kernel refuses to let a file grow beyond 64 KiB, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_kernel_that_refuses_to_write_keeps_the_previous(
    tmp_path: Path, small_files_only: None
) -> None:
    with CheckpointWriter(tmp_path) as writer:
        writer.submit(snapshot(1))
        assert writer.wait(TIMEOUT_S)
        writer.submit(Snapshot(2, {"model": {"w": torch.ones(1 << 20)}}, {}, {}))
        assert writer.wait(TIMEOUT_S)
        error = writer.poll_error()
    assert error is not None
    assert "step-2" in str(error)
    assert names(tmp_path) == ["step-1"]


def test_failing_retention_is_reported_and_the_new_checkpoint_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(writer_module, "remove_old", refuse)
    with CheckpointWriter(tmp_path, 1) as writer:
        writer.submit(snapshot(1))
        assert writer.wait(TIMEOUT_S)
        assert writer.last_path == tmp_path / "step-1"
        error = writer.poll_error()
    assert error is not None
    assert "could not be removed: read-only" in str(error)


def test_no_thread_to_be_had_is_a_failed_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    writer = CheckpointWriter(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        writer.submit(snapshot(1))
    assert writer.wait(0.0)
    assert "step-1 could not be written" in str(writer.poll_error())
    writer.submit(snapshot(2))
    assert writer.close(TIMEOUT_S)
    assert names(tmp_path) == ["step-2"]


@pytest.mark.parametrize("name", ["../out.json", "a/b.json", "", "..", "manifest.json"])
def test_file_names_that_leave_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    with CheckpointWriter(tmp_path) as writer, pytest.raises(CheckpointError):
        writer.submit(Snapshot(1, {}, {name: {}}, {}))


def test_bad_content_is_refused_where_it_is_made(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path) as writer:
        with pytest.raises(CheckpointError, match=r"run\.json\.state\.x is of type Tensor"):
            writer.submit(snapshot(1, state={"x": torch.ones(1)}))
        with pytest.raises(CheckpointError, match=r"two files .* 'config\.json'"):
            writer.submit(Snapshot(1, {}, {"config.json": {}}, {"config.json": b""}))


def test_unusable_folder_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file/checkpoints cannot be used"):
        CheckpointWriter(tmp_path / "file" / "checkpoints")


def test_start_removes_only_what_dead_writers_left(tmp_path: Path) -> None:
    gate = Gate("rename")
    alive = CheckpointWriter(tmp_path, on_stage=gate)
    alive.submit(snapshot(1))
    assert gate.reached.wait(TIMEOUT_S)
    (in_progress,) = names(tmp_path)
    for name in ("step-2.tmp-99-0123abcd", "step-2.tmp-mine", "step-2.tmp", "notes.tmp-1-0123abcd"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    (tmp_path / "step-3.tmp-99-0123abcd").write_text("a file")
    (tmp_path / "step-4.tmp-99-0123abcd").symlink_to(tmp_path / "step-2.tmp")
    CheckpointWriter(tmp_path).close(TIMEOUT_S)
    assert names(tmp_path) == sorted(
        [
            in_progress,
            "step-2.tmp-mine",
            "step-2.tmp",
            "notes.tmp-1-0123abcd",
            "step-3.tmp-99-0123abcd",
            "step-4.tmp-99-0123abcd",
        ]
    )
    gate.opened.set()
    assert alive.close(TIMEOUT_S)
    assert open_checkpoint(tmp_path / "step-1").step == 1


@pytest.mark.parametrize(
    ("replacement", "left"),
    [
        ("not there yet", ["step-4"]),
        ("whole", ["step-4"]),
        ("damaged", ["step-4", "step-4.replaced-99-0123abcd"]),
    ],
)
def test_replacement_cut_short_is_found_and_settled(
    tmp_path: Path, replacement: str, left: list[str]
) -> None:
    save(tmp_path, 4)
    (tmp_path / "step-4").rename(tmp_path / "step-4.replaced-99-0123abcd")
    found = find_newest(tmp_path)
    assert found is not None
    assert found.step == 4
    if replacement == "whole":
        shutil.copytree(found.path, tmp_path / "step-4")
    if replacement == "damaged":
        (tmp_path / "step-4").mkdir()
    CheckpointWriter(tmp_path).close(TIMEOUT_S)
    assert names(tmp_path) == left
    assert find_newest(tmp_path) is not None
