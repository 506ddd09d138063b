"""Checkpoints written by a thread in the background, whole or not at all.

Files go into ``step-N.tmp-<pid>-<token>``; each is flushed to the disk, the manifest last; then the
folder is renamed to ``step-N``. A rename is atomic, so a reader sees the old state or the new one.
"""

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from safetensors.torch import save_file

from evener.checkpoint.codec import encode
from evener.checkpoint.copies import alias_table
from evener.checkpoint.manifest import (
    MANIFEST_NAME,
    TENSORS_SUFFIX,
    FileRecord,
    Manifest,
    check_file_name,
    step_name,
)
from evener.checkpoint.step_folders import remove_old, tidy, unfinished_folder
from evener.closing import Closing
from evener.errors import CheckpointError, ConfigError, UsageError
from evener.files import flush, hash_file, publish_folder

_AFTER_S: Final = 30.0  # a checkpoint is worth more than its place in the order


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a run at one step, no longer touched by training.

    Attributes:
        step: The step; checkpoints are ordered by it.
        tensors: For each stem of a file name, such as ``model``: tensors by name, on the CPU and
            owned by the snapshot (see ``copy_to_cpu``). ``model`` with the names of the model's
            ``state_dict`` and a ``config.json`` among the assets loads in ``from_pretrained``.
        documents: JSON by file name, such as ``run.json``. Encoded when submitted.
        assets: Other files by name, such as ``config.json`` or those of a tokenizer.
        copy_s: Seconds that training stood still for the copy.
        after: The checkpoint appears when all of these are set, or half a minute later.
    """

    step: int
    tensors: Mapping[str, Mapping[str, torch.Tensor]]
    documents: Mapping[str, Any]
    assets: Mapping[str, bytes]
    copy_s: float = 0.0
    after: Sequence[threading.Event] = ()


@dataclass(frozen=True, slots=True)
class WrittenCheckpoint:
    """A checkpoint that has reached the disk.

    Attributes:
        step: Its step.
        path: Its folder.
        num_bytes: Size of its files.
        write_s: Seconds the background thread spent on it.
        begin_t: When it began with it, in unix seconds.
        copy_s: Seconds that training stood still for the copy before.
    """

    step: int
    path: Path
    num_bytes: int
    write_s: float
    begin_t: float
    copy_s: float


class UnwrittenError(CheckpointError):
    """A checkpoint did not reach the disk; its snapshot can be submitted again.

    Attributes:
        snapshot: The state that was not written; nobody reads it any more.
    """

    def __init__(self, message: str, snapshot: Snapshot) -> None:
        super().__init__(message)
        self.snapshot = snapshot


@dataclass(frozen=True, slots=True)
class SkippedCheckpoint:
    """A checkpoint that was not begun, since a newer one came while it waited.

    Attributes:
        step: Its step.
        running: Step of the one that was being written all the time.
        newer: Step of the one that takes its place.
    """

    step: int
    running: int
    newer: int


class _Write(NamedTuple):
    snapshot: Snapshot
    small_files: Mapping[str, bytes]  # documents and assets


class CheckpointWriter(Closing):
    """Writes snapshots one after another in the background; one per folder and team.

    A write that fails leaves the previous checkpoint in use and never raises into training: ask
    ``poll_error``. A folder that has gone is made anew, with a warning there. The thread lives only
    while there is something to write and is no daemon, so a write that has begun ends even if the
    interpreter exits without ``close``.

    Attributes:
        last_path: The newest checkpoint that this writer has finished; ``None`` before the first.
    """

    def __init__(
        self,
        folder: Path,
        keep_last: int | None = 3,
        *,
        on_stage: Callable[[str], None] | None = None,
    ) -> None:
        """Create the folder if needed and remove what dead processes left unfinished in it.

        Args:
            folder: Receives the ``step-N`` folders.
            keep_last: How many checkpoints to keep, the newest; ``None`` keeps all.
            on_stage: Called in the writer's thread before each stage (``files``, ``manifest``,
                ``rename``, ``retention``); tests kill the process there.

        Raises:
            CheckpointError: The folder cannot be made.
            ConfigError: ``keep_last`` is below 1.
        """
        if keep_last is not None and keep_last < 1:
            raise ConfigError(f"keep_last is {keep_last}: keep at least 1, or None for all")
        self._folder = folder
        self._keep_last = keep_last
        self._on_stage = on_stage
        self._changed = threading.Condition()
        self._queued: _Write | None = None
        self._running: int | None = None  # the step that is being written
        self._closed = False
        self.last_path: Path | None = None
        self._errors: list[CheckpointError] = []
        self._outcomes: list[WrittenCheckpoint | SkippedCheckpoint] = []
        self._finished: Snapshot | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tidy(folder)
        except OSError as error:
            raise CheckpointError(
                f"checkpoint folder {folder} cannot be used: {error}; choose one that is writable"
            ) from error

    def submit(self, snapshot: Snapshot) -> None:
        """Hand over a snapshot and return at once.

        While an earlier one is being written the new one waits; one that still waits is dropped:
        the newest state is the one that loses least. ``poll`` tells which were dropped.

        Raises:
            CheckpointError: A file name or a document is not fit for a checkpoint.
            UsageError: The writer is closed.
        """
        job = _Write(snapshot, _small_files(snapshot))
        with self._changed:
            if self._closed:
                raise UsageError(
                    "submit after close: the checkpoint writer takes no more snapshots"
                )
            # The memory of a snapshot that was dropped can be used again; of two, keep the newer.
            dropped = self._queued.snapshot if self._queued is not None else None
            if dropped is not None and self._running is not None:
                skipped = SkippedCheckpoint(dropped.step, self._running, snapshot.step)
                self._outcomes.append(skipped)
            self._finished, self._queued = dropped, job
            if self._running is None:
                thread = threading.Thread(target=self._write_queued, name="evener-checkpoint")
                try:
                    thread.start()
                except RuntimeError as error:  # no thread to be had: a failed write like any other
                    self._queued = None
                    self._errors.append(self._failure(snapshot, error))
                else:
                    self._running = snapshot.step

    def take_finished(self) -> Snapshot | None:
        """Hand out a snapshot that is no longer read, so that its memory can be used again."""
        with self._changed:
            finished, self._finished = self._finished, None
            return finished

    def poll_error(self) -> CheckpointError | None:
        """Return the oldest failure that has not been returned yet, and forget it."""
        with self._changed:
            return self._errors.pop(0) if self._errors else None

    def poll(self) -> list[WrittenCheckpoint | SkippedCheckpoint]:
        """Return the checkpoints finished or skipped since the last call, oldest first."""
        with self._changed:
            outcomes, self._outcomes = self._outcomes, []
            return outcomes

    def wait(self, timeout_s: float) -> bool:
        """Wait until nothing is being written or waiting.

        Returns:
            ``False`` when the time is up before that.
        """
        with self._changed:
            return self._changed.wait_for(lambda: self._running is None, timeout_s)

    def close(self, timeout_s: float = 600.0) -> bool:
        """Take no more snapshots and wait for those handed over; may be called again.

        Returns:
            ``False`` when the time is up before all was written (the thread continues).
        """
        with self._changed:
            self._closed = True
        return self.wait(timeout_s)

    # ── in the background thread ─────────────────────────────────────────────────────────────────

    def _write_queued(self) -> None:
        while True:
            with self._changed:
                job, self._queued = self._queued, None
                self._running = None if job is None else job.snapshot.step
                if job is None:
                    self._changed.notify_all()
                    return
            error = self._try_write(job)
            with self._changed:
                if error is not None:
                    self._errors.append(error)
                if self._finished is None and not isinstance(error, UnwrittenError):
                    self._finished = job.snapshot

    def _try_write(self, job: _Write) -> CheckpointError | None:
        step = job.snapshot.step
        start_s, begin_t = time.perf_counter(), time.time()
        was_lost = not self._folder.exists()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            manifest = self._write(job)
        except Exception as error:  # whatever it was, training continues
            return self._failure(job.snapshot, error)
        num_bytes = sum(record.num_bytes for record in manifest.files.values())
        path = self._folder / step_name(step)
        write_s = time.perf_counter() - start_s
        with self._changed:
            self.last_path = path
            copy_s = job.snapshot.copy_s
            written = WrittenCheckpoint(step, path, num_bytes, write_s, begin_t, copy_s)
            self._outcomes.append(written)
        if was_lost:
            return CheckpointError(
                f"{self._folder} had gone, and earlier checkpoints with it: made it anew for "
                f"step-{step}; find out what removes it, or choose another folder"
            )
        try:
            self._reach("retention")
            if self._keep_last is not None:
                remove_old(self._folder, self._keep_last, keep=path)
        except Exception as error:
            failure = CheckpointError(
                f"older checkpoints in {self._folder} could not be removed: {error}; "
                "delete them by hand before the disk is full"
            )
            failure.__cause__ = error
            return failure
        return None

    def _write(self, job: _Write) -> Manifest:
        snapshot = job.snapshot
        with unfinished_folder(self._folder, snapshot.step) as unfinished:
            self._reach("files")
            manifest = _write_files(unfinished, job)
            self._reach("manifest")
            manifest_path = unfinished / MANIFEST_NAME
            manifest_path.write_bytes(manifest.to_bytes())
            flush(manifest_path)
            flush(unfinished)
            until_s = time.monotonic() + _AFTER_S
            for other in snapshot.after:
                other.wait(max(0.0, until_s - time.monotonic()))
            self._reach("rename")
            publish_folder(unfinished, self._folder / step_name(snapshot.step))
        return manifest

    def _failure(self, snapshot: Snapshot, cause: Exception) -> CheckpointError:
        in_use = self.last_path
        failure = UnwrittenError(
            f"checkpoint step-{snapshot.step} could not be written to {self._folder}: {cause}; "
            + (f"{in_use.name} stays in use" if in_use is not None else "nothing was replaced")
            + "; free disk space there or choose another folder",
            snapshot,
        )
        failure.__cause__ = cause
        return failure

    def _reach(self, stage: str) -> None:
        if self._on_stage is not None:
            self._on_stage(stage)


def _small_files(snapshot: Snapshot) -> dict[str, bytes]:
    """Encode the documents now, before training changes them, and check all names."""
    files: dict[str, bytes] = dict(snapshot.assets)
    names = [stem + TENSORS_SUFFIX for stem in snapshot.tensors]
    names += [*snapshot.documents, *snapshot.assets]
    for name in names:
        check_file_name(name)
        if names.count(name) > 1:
            raise CheckpointError(f"two files of a checkpoint are named {name!r}: rename one")
    for name, document in snapshot.documents.items():
        files[name] = json.dumps(encode(document, path=name), allow_nan=False).encode()
    return files


def _write_files(folder: Path, job: _Write) -> Manifest:
    records: dict[str, FileRecord] = {}
    aliases: dict[str, dict[str, str]] = {}
    for stem, tensors in job.snapshot.tensors.items():
        path = folder / (stem + TENSORS_SUFFIX)
        aliases[stem] = alias_table(tensors)
        kept = {name: value for name, value in tensors.items() if name not in aliases[stem]}
        # transformers refuses files without this entry.
        save_file(kept, path, metadata={"format": "pt"})
        records[path.name] = _flushed_record(path)
    for name, content in job.small_files.items():
        path = folder / name
        path.write_bytes(content)
        records[name] = _flushed_record(path)
    return Manifest(job.snapshot.step, records, aliases)


def _flushed_record(path: Path) -> FileRecord:
    flush(path)
    return FileRecord(path.stat().st_size, hash_file(path, "sha256"))
