"""Write a checkpoint: complete, or not at all.

Files go into ``step-N.tmp-<pid>-<token>``; each is flushed to the disk, the manifest last; then the
folder is renamed to ``step-N``. A rename is atomic, so a reader sees the old state or the new one.
"""

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import save_file

from evener.checkpoint.copies import alias_table
from evener.checkpoint.manifest import (
    MANIFEST_NAME,
    TENSORS_SUFFIX,
    Manifest,
    parse_name,
    step_name,
)
from evener.errors import CheckpointError
from evener.files import flush, hash_file, new_folder, unique_suffix

_AFTER_S: Final = 30.0
"""Longest wait for ``Snapshot.after``, in seconds: then the checkpoint matters more."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a run at one step, no longer touched by training.

    Attributes:
        step: The step; checkpoints are ordered by it.
        tensors: For each stem of a file name, such as ``model``: tensors by name, on the CPU and
            owned by the snapshot (see ``copy_to_cpu``). ``model`` with the names of the model's
            ``state_dict`` and a file ``config.json`` loads in ``from_pretrained``.
        files: Content of other files by name, such as ``config.json``, those of a tokenizer, or
            JSON of ``encode_document``.
        copy_s: Seconds that training stood still for the copy.
        after: The checkpoint appears when all of these are set, or half a minute later.
    """

    step: int
    tensors: Mapping[str, Mapping[str, torch.Tensor]]
    files: Mapping[str, bytes]
    copy_s: float = 0.0
    after: Sequence[threading.Event] = ()


@dataclass(frozen=True, slots=True)
class WrittenCheckpoint:
    """A checkpoint that has reached the disk.

    Attributes:
        step: Its step.
        path: Its folder.
        num_bytes: Size of its files without the manifest.
        write_s: Seconds that it took to write.
        begin_t: When that began, in unix seconds.
        copy_s: Seconds that training stood still for the copy before.
        remark: Why older checkpoints could not be removed; empty if they could.
    """

    step: int
    path: Path
    num_bytes: int
    write_s: float
    begin_t: float
    copy_s: float
    remark: str


def write_checkpoint(
    folder: Path,
    snapshot: Snapshot,
    *,
    keep_last: int | None = None,
    check: Callable[[], object] | None = None,
) -> WrittenCheckpoint:
    """Write a snapshot to ``folder/step-N``, and remove what dead writers left in ``folder``.

    Args:
        folder: Receives the ``step-N`` folders; made if it does not exist.
        snapshot: What to write.
        keep_last: How many checkpoints to keep, the newest; ``None`` keeps all.
        check: Raises an error if this process may not write to the run any more. It is called when
            the unfinished folder exists: see ``fence_writers``.

    Raises:
        CheckpointError: It could not be written; earlier checkpoints are untouched.
    """
    start_s, begin_t = time.perf_counter(), time.time()
    path = folder / step_name(snapshot.step)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(folder), new_folder(path) as unfinished:
            if check is not None:
                check()
            num_bytes = _write_files(unfinished, snapshot)
            until_s = time.monotonic() + _AFTER_S
            for other in snapshot.after:
                other.wait(max(0.0, until_s - time.monotonic()))
    except Exception as error:  # safetensors has classes of its own
        raise CheckpointError(
            f"checkpoint step-{snapshot.step} could not be written to {folder}: {error}; earlier "
            "checkpoints are untouched; free disk space there or choose another folder"
        ) from error
    write_s, remark = time.perf_counter() - start_s, ""
    try:
        if keep_last is not None:
            remove_old(folder, keep_last, keep=path)
    except OSError as error:
        remark = (
            f"older checkpoints in {folder} could not be removed: {error}; "
            "delete them by hand before the disk is full"
        )
    return WrittenCheckpoint(
        snapshot.step, path, num_bytes, write_s, begin_t, snapshot.copy_s, remark
    )


def fence_writers(folder: Path) -> None:
    """Make checkpoints fail that other processes have begun to write to a folder.

    A process that takes over from another writer calls it first. That writer may only be stopped,
    and may wake up at any time, also between its last check and its rename. Its unfinished folder
    has another name by then, so that the rename fails. If it makes one later, its ``check`` fails.
    """
    with suppress(OSError):
        for path in list(folder.iterdir()):
            step, kind = parse_name(path.name)
            if kind == "tmp":
                with suppress(OSError):  # it has been published, or removed
                    path.rename(folder / f"{step_name(step)}.tmp-{unique_suffix()}")


def _write_files(folder: Path, snapshot: Snapshot) -> int:
    """Write all files to the disk, the manifest last; return the size of the others in bytes."""
    aliases: dict[str, dict[str, str]] = {}
    for stem, tensors in snapshot.tensors.items():
        aliases[stem] = alias_table(tensors)
        kept = {name: value for name, value in tensors.items() if name not in aliases[stem]}
        # transformers refuses files without this entry.
        save_file(kept, folder / (stem + TENSORS_SUFFIX), metadata={"format": "pt"})
    for name, content in snapshot.files.items():
        (folder / name).write_bytes(content)
    files = sorted(folder.iterdir())
    for file in files:
        flush(file)
    hashes = {file.name: hash_file(file, "sha256") for file in files}
    manifest = folder / MANIFEST_NAME
    manifest.write_bytes(Manifest(snapshot.step, hashes, aliases).to_bytes())
    flush(manifest)
    flush(folder)
    return sum(file.stat().st_size for file in files)


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Remove what dead writers left behind in ``folder``, and keep others from removing the rest.

    The lock is the kernel's (``flock``): it ends with the process, however that ends, also inside
    another container, where process numbers mean nothing. Those that write share it; only who has
    it alone removes anything. Without locks, as on Windows and some network file systems, nothing
    is ever removed: garbage is better than a lost checkpoint.
    """
    if sys.platform == "win32":
        yield
        return
    import fcntl

    lock = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove_leftovers(folder)
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_SH)
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_UN)  # a process that was forked meanwhile has it, too
        os.close(lock)


def _remove_leftovers(folder: Path) -> None:
    """Remove what was not finished; touches only folders with names that evener gives."""
    for path in list(folder.iterdir()):
        step, kind = parse_name(path.name)
        final = folder / step_name(step)
        if kind == "replaced" and not os.path.lexists(final):
            path.rename(final)  # the writer was killed between its two renames
        elif kind == "tmp" or (kind == "replaced" and _has_manifest(final)):
            shutil.rmtree(path, ignore_errors=True)


def remove_old(folder: Path, keep_last: int, *, keep: Path) -> None:
    """Delete all but the newest ``keep_last`` checkpoints, never ``keep``.

    Folders without a manifest neither count nor are deleted: evener has not written them.

    Raises:
        OSError: A folder cannot be deleted.
    """
    found: list[tuple[int, Path]] = []
    for path in folder.iterdir():
        step, kind = parse_name(path.name)
        if not kind and not path.is_symlink() and _has_manifest(path):
            found.append((step, path))
    for _, path in sorted(found, reverse=True)[keep_last:]:
        if path != keep:
            # Renamed first, so that a deletion cut short leaves no half of a checkpoint.
            doomed = path.with_name(f"{path.name}.tmp-{unique_suffix()}")
            path.rename(doomed)
            shutil.rmtree(doomed)


def _has_manifest(path: Path) -> bool:
    return (path / MANIFEST_NAME).is_file()
