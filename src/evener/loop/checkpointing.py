"""Save the team's state during training: the main process copies it, a thread writes it."""

import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Final

from evener.checkpoint import (
    Snapshot,
    WrittenCheckpoint,
    fence_writers,
    step_name,
    write_checkpoint,
)
from evener.engine.membership_change import MembershipChange
from evener.errors import CheckpointError
from evener.loop.loop import Loop
from evener.loop.saved_state import capture
from evener.team.terminal import warn

RETRY_S: Final = 600.0
"""Seconds for which the last save of a run is retried by default."""

_PAUSE_S: Final = 5.0
"""Seconds between two attempts of the last save."""

_WRITE_S: Final = 1800.0
"""Longest wait of the other ranks for the last checkpoint, beyond ``retry_s``."""


class Checkpointer:
    """Writes ``step-N`` folders; training waits only for the copy.

    One snapshot is held and one write is under way at a time. A write that fails is a warning
    during training, and the next save is the retry; only the last save of a run is repeated.

    Args:
        ddp: The team; every rank makes one, the main process writes.
        folder: Receives the checkpoints.
        keep_last: How many to keep.
        assets: Files that go into every checkpoint, by name.
        documents: JSON documents that go into every checkpoint, by file name.
        retry_s: Seconds for which ``finish`` repeats a save that fails.

    Attributes:
        path: The newest complete checkpoint: on the main process; after ``finish`` on all ranks.

    Raises:
        CheckpointError: The folder cannot be created.
    """

    def __init__(
        self,
        ddp: Loop,
        folder: Path,
        *,
        keep_last: int,
        assets: Mapping[str, bytes] | None = None,
        documents: Mapping[str, Any] | None = None,
        retry_s: float = RETRY_S,
    ) -> None:
        self.path: Path | None = None
        self._ddp = ddp
        self._folder = folder
        self._keep_last = keep_last
        self._assets = assets
        self._documents = documents
        self._retry_s = retry_s
        self._snapshot: Snapshot | None = None  # the last one; its memory is used again
        self._write: Future[WrittenCheckpoint] | None = None
        self._step = -1  # of the last write
        self._is_writer = False  # whether this process has stopped former writers from publishing
        #: Why a step was skipped that was due while another was being written.
        self._skipped: dict[int, str] = {}
        try:
            if ddp.is_main_process:
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(
                f"checkpoint folder {folder} cannot be used: {error}; choose one that is writable"
            ) from error
        ddp.assembly.team.call_on_handover(self._hand_over)
        ddp.assembly.engine.generations.call_on_change(self._change)

    def _hand_over(self) -> None:
        """Finish the current write: another rank writes from now on."""
        self.close()
        self._snapshot, self._is_writer = None, False

    def _change(self, change: MembershipChange) -> None:
        """Note that the team has changed: another rank may be the writer now."""
        self._is_writer &= self._ddp.is_main_process

    def _check(self) -> None:
        """Raise CheckpointError if the team has continued without this process.

        A process that saves alone has no lease: its coordinator is lost.
        """
        assembly = self._ddp.assembly
        if not (assembly.engine.generations.is_alone or assembly.team.membership.may_write()):
            raise CheckpointError(
                "the team has continued without this process, which was stopped or cut off; its "
                "new main process saves"
            )

    def move(self, suffix: str) -> None:
        """Write to another folder from now on, whose name ends with ``suffix``."""
        self._hand_over()
        self._folder = self._folder.with_name(f"{self._folder.name}{suffix}")

    def save(self, cursor_state: Mapping[str, Any]) -> None:
        """Begin to write the present state; all ranks call it together.

        Call it in a commit, or between epochs. A step that is already written, or being
        written, is not written again. While another step is being written, this one is skipped,
        unless it is the last one: see ``finish``.

        Args:
            cursor_state: The data position that belongs to the state.

        Raises:
            ReplicasDifferError: Ranks hold different states (with ``DdpConfig.verify_every``).
        """
        self._agree()
        self.report()
        if not self._ddp.is_main_process or self._is_written():
            return
        if self._write is None:
            # The team may have continued without this rank, if it was stopped in a commit.
            self._ddp.assembly.team.membership.await_lease()
            self._begin(cursor_state)
        elif self._step != self._ddp.window:
            self._skipped[self._ddp.window] = (
                f"checkpoint step-{self._ddp.window} is skipped: step-{self._step} was not yet "
                "written when it was due; save less often (checkpoint.every), or to a faster disk"
            )

    def finish(self, cursor_state: Mapping[str, Any]) -> bool:
        """Write the present state and wait until it is on disk; all ranks call it together.

        Args:
            cursor_state: The data position that belongs to the state.

        Returns:
            Whether it is done; otherwise the main process was lost, and the next one has to save.

        Raises:
            CheckpointError: On every rank, if it could not be written in ``retry_s``.
            ReplicasDifferError: As in ``save``.
        """
        self._agree()
        engine, own = self._ddp.assembly.engine, None
        if self._ddp.is_main_process:
            with engine.team.in_phase("saving"):
                own = [self._write_last(cursor_state), self.path and str(self.path)]
        answer = engine.collectives.take_from_main(
            "writing the last checkpoint", own, timeout_s=self._retry_s + _WRITE_S
        )
        if answer is None:
            return engine.generations.is_alone
        failure, path = answer
        self.path = path and Path(path)
        if failure:
            raise CheckpointError(failure)
        return True

    def _write_last(self, cursor_state: Mapping[str, Any]) -> str:
        """Write the present state; return why it could not be written, empty if it could."""
        until_s = time.monotonic() + self._retry_s
        self._await_write()
        while not self._is_written():
            self._begin(cursor_state)
            if failure := self._await_write():
                if (left_s := until_s - time.monotonic()) <= 0:
                    tried = f"; it was tried for {self._retry_s:g} s (checkpoint.retry_s)"
                    return failure + (tried if self._retry_s else "")
                time.sleep(min(_PAUSE_S, left_s))
        return ""

    def report(self) -> str:
        """Report the outcome of a write that has ended, and steps that were skipped.

        Returns:
            Why the write failed; empty if it did not.
        """
        # Not yet that of the present state: `finish` may write it.
        for step in self._skipped.keys() - {self._ddp.window}:
            self._miss(step, self._skipped.pop(step))
        if self._write is None or not self._write.done():
            return ""
        write, self._write = self._write, None
        try:
            written = write.result()
        except CheckpointError as error:
            self._miss(self._step, str(error))
            return str(error)
        self.path = written.path
        self._ddp.events.checkpoint(written)
        if written.remark:
            warn(written.remark)
        return ""

    def close(self) -> None:
        """Wait for what is being written; idempotent."""
        self._await_write()
        while self._skipped:
            self._miss(*self._skipped.popitem())

    def _await_write(self) -> str:
        if self._write is not None:
            wait([self._write])
        return self.report()

    def _agree(self) -> None:
        """Compare the ranks' states, and gather what is to be saved."""
        self._ddp.assembly.engine.prepare_save()

    def _is_written(self) -> bool:
        return self.path == self._folder / step_name(self._ddp.window)

    def _begin(self, cursor_state: Mapping[str, Any]) -> None:
        """Copy the present state, and begin to write it; nothing else is being written."""
        if self.path is not None and not self._folder.exists():
            warn(
                f"{self._folder} was removed, and earlier checkpoints with it: created it again "
                f"for step-{self._ddp.window}; find out what removes it, or choose another folder"
            )
        self._step = self._ddp.window
        self._skipped.pop(self._step, None)
        self._snapshot = capture(
            self._ddp.assembly,
            [cursor_state],
            assets=self._assets,
            documents=self._documents,
            # A killed run resumes from this step, whose windows must be in its events.
            after=self._ddp.events.pending(),
            into=self._snapshot,
        )
        if not self._is_writer:
            fence_writers(self._folder)
            self._is_writer = True
        writer = ThreadPoolExecutor(1, thread_name_prefix="evener-checkpoint")
        self._write = writer.submit(
            write_checkpoint,
            self._folder,
            self._snapshot,
            keep_last=self._keep_last,
            check=self._check,
        )
        # The thread ends with its write, and the interpreter waits for it at exit.
        writer.shutdown(wait=False)

    def _miss(self, step: int, reason: str) -> None:
        warn(reason)
        self._ddp.events.emit("checkpoint_missed", window=step, reason=reason)
