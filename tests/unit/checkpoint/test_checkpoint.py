import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from evener.checkpoint import (
    Snapshot,
    copy_to_cpu,
    encode_document,
    fence_writers,
    find_newest,
    open_checkpoint,
    write_checkpoint,
)
from evener.checkpoint import (
    writer as writer_module,
)
from evener.errors import CheckpointError
from helpers.tampering import NESTED

TIMEOUT_S = 100.0


def snapshot(step: int) -> Snapshot:
    tensors = {"model": {"w": torch.full((64,), float(step))}, "optimizer": {}}
    files = {"run.json": encode_document("run.json", {"step": step}), "config.json": b"{}"}
    return Snapshot(step, tensors, files)


def save(folder: Path, *steps: int, keep_last: int | None = None) -> None:
    for step in steps:
        assert write_checkpoint(folder, snapshot(step), keep_last=keep_last).remark == ""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


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
    files = {"run.json": encode_document("run.json", document), "vocab.txt": b"\0a"}
    folder = tmp_path / "new" / "folder"
    written = write_checkpoint(folder, Snapshot(12, {"model": copy_to_cpu(model)}, files))
    assert (written.step, written.path) == (12, folder / "step-12")

    found = find_newest(folder)
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
    assert written.num_bytes == sum(
        (found.path / name).stat().st_size for name in manifest["files"]
    )
    assert "world" not in json.dumps(manifest)
    with pytest.raises(CheckpointError, match=r"no file 'x\.json'; it has model\.safetensors"):
        found.document("x.json")


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


def replace(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


def make_huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)  # a hole: it takes no room


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped bit": (lambda p: flip_a_byte(p / "model.safetensors"), "model.safetensors .*SHA-256"),
    "cut short": (lambda p: (p / "run.json").write_bytes(b"{"), r"run\.json is damaged: its SHA"),
    "file gone": (lambda p: (p / "run.json").unlink(), r"run\.json is missing"),
    "no manifest": (lambda p: (p / "manifest.json").unlink(), r"manifest\.json is missing"),
    "foreign manifest": (
        lambda p: (p / "manifest.json").write_text('{"name": "app"}'),
        "not of an",
    ),
    "nested manifest": (lambda p: (p / "manifest.json").write_bytes(NESTED), "nested"),
    "FIFO": (lambda p: replace(p / "run.json", os.mkfifo), "not a regular file"),
    "huge manifest": (lambda p: replace(p / "manifest.json", make_huge), "larger than"),
    "future version": (lambda p: rewrite(p / "manifest.json", version=99), "version 99 is unknown"),
    "edited manifest": (lambda p: rewrite(p / "manifest.json", aliases={}, step=21), "checksum"),
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
    assert skipped[0][0] == "step-20"
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


def test_whoever_may_not_write_any_more_leaves_nothing(tmp_path: Path) -> None:
    save(tmp_path, 1)

    def check() -> None:
        assert names(tmp_path)[1:], "its folder can be fenced off from here on"
        raise RuntimeError("the team has continued without this process")

    with pytest.raises(CheckpointError, match=r"step-2 could not .* continued without"):
        write_checkpoint(tmp_path, snapshot(2), check=check)
    assert names(tmp_path) == ["step-1"]


#: A main process that is stopped between its last look and the rename.
STOPPED_MAIN = """
import os, signal, sys
from pathlib import Path
import torch
from evener import files
from evener.checkpoint import Snapshot, write_checkpoint
from evener.errors import CheckpointError

rename = Path.rename

def failpoint(self, target):
    if ".tmp-" in self.name:
        os.kill(os.getpid(), signal.SIGSTOP)
    return rename(self, target)

Path.rename = failpoint
try:
    write_checkpoint(Path(sys.argv[1]), Snapshot(5, {"model": {"w": torch.zeros(3)}}, {}))
except CheckpointError as error:
    sys.exit(f"refused: {error}")
"""


def test_a_main_process_that_was_stopped_before_its_rename_publishes_nothing(
    tmp_path: Path,
) -> None:
    save(tmp_path, 1)
    with subprocess.Popen(
        [sys.executable, "-c", STOPPED_MAIN, str(tmp_path)], stderr=subprocess.PIPE, text=True
    ) as stopped:
        try:
            pid, status = os.waitpid(stopped.pid, os.WUNTRACED)
            assert (pid, os.WIFSTOPPED(status)) == (stopped.pid, True)
            fence_writers(tmp_path)  # another process is the main one now
            save(tmp_path, 5)
        finally:
            stopped.send_signal(signal.SIGCONT)
        _, told = stopped.communicate(timeout=TIMEOUT_S)
    assert stopped.returncode == 1
    assert "refused: checkpoint step-5 could not be written" in told
    newest = find_newest(tmp_path)
    assert newest is not None
    assert newest.step == 5
    assert newest.tensors("model")["w"].tolist() == [5.0] * 64, "that of the new main process"
    save(tmp_path, 6)
    assert names(tmp_path) == ["step-1", "step-5", "step-6"], "what it left is removed"


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
    save(tmp_path, 1)
    with pytest.raises(CheckpointError, match="step-2"):
        write_checkpoint(tmp_path, Snapshot(2, {"model": {"w": torch.ones(1 << 20)}}, {}))
    assert names(tmp_path) == ["step-1"]


def test_failing_retention_is_reported_and_the_new_checkpoint_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(writer_module, "remove_old", refuse)
    written = write_checkpoint(tmp_path, snapshot(1), keep_last=1)
    assert "could not be removed: read-only" in written.remark
    assert names(tmp_path) == ["step-1"]


def test_a_document_with_a_tensor_is_refused_by_its_place() -> None:
    with pytest.raises(CheckpointError, match=r"run\.json\.state\.x is of type Tensor"):
        encode_document("run.json", {"state": {"x": torch.ones(1)}})


class Gate(threading.Event):
    """Holds a checkpoint before it appears, until it is set."""

    def __init__(self) -> None:
        super().__init__()
        self.reached = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.reached.set()
        return super().wait(TIMEOUT_S)


def test_a_write_removes_only_what_dead_writers_left(tmp_path: Path) -> None:
    gate = Gate()
    alive = Snapshot(1, {}, {}, after=[gate])
    thread = threading.Thread(target=write_checkpoint, args=(tmp_path, alive))
    thread.start()
    assert gate.reached.wait(TIMEOUT_S)
    kept = {"step-2.tmp-mine", "step-2.tmp", "notes.tmp-1-0123abcd"}
    for name in ("step-2.tmp-99-0123abcd", *kept):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    (tmp_path / "step-3.tmp-99-0123abcd").write_text("a file")
    (tmp_path / "step-4.tmp-99-0123abcd").symlink_to(tmp_path / "step-2.tmp")
    save(tmp_path, 5)
    assert {"step-5", "step-2.tmp-99-0123abcd"} <= {*names(tmp_path)}, "not while another writes"
    gate.set()
    thread.join(TIMEOUT_S)
    assert open_checkpoint(tmp_path / "step-1").step == 1
    save(tmp_path, 6)
    kept |= {"step-3.tmp-99-0123abcd", "step-4.tmp-99-0123abcd"}
    assert names(tmp_path) == sorted({"step-1", "step-5", "step-6", *kept})


@pytest.mark.parametrize(
    ("replacement", "left"),
    [
        ("not there yet", ["step-4", "step-9"]),
        ("complete", ["step-4", "step-9"]),
        ("damaged", ["step-4", "step-4.replaced-99-0123abcd", "step-9"]),
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
    if replacement == "complete":
        shutil.copytree(found.path, tmp_path / "step-4")
    if replacement == "damaged":
        (tmp_path / "step-4").mkdir()
    save(tmp_path, 9)
    assert names(tmp_path) == left
    shutil.rmtree(tmp_path / "step-9")
    assert find_newest(tmp_path) is not None
