"""Saves the team's state while it trains: the main process copies, a thread writes."""

import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Final

from evener.checkpoint import Snapshot, WrittenCheckpoint, step_name, write_checkpoint
from evener.errors import CheckpointError
from evener.loop.loop import Loop
from evener.loop.saved_state import capture
from evener.team.terminal import warn

WRITE_TIMEOUT_S = 600.0

RETRY_S: Final = 600.0
"""Seconds for which the last save of a run is retried by default."""

_PAUSE_S: Final = 5.0
"""Seconds between two attempts of the last save."""

_ROUND_S: Final = 10.0
"""Longest time between two messages of the main process to ranks that wait for the last save."""

_TOO_SLOW = f"a checkpoint was not written within {WRITE_TIMEOUT_S:g} s; check the disk"


class Checkpointer:
    """Writes ``step-N`` folders; training waits for the copy only.

    One snapshot is held and one write is under way at a time. A write that fails is a warning
    during training, and the next save is the retry; only the last save of a run is repeated.

    Args:
        ddp: The team; every rank makes one, the main process writes.
        folder: Receives the checkpoints.
        keep_last: How many to keep.
        assets: Files that go into every checkpoint, by name.
        documents: JSON documents that go into every checkpoint, by file name.
        retry_s: Seconds for which ``finish`` repeats a write that fails.

    Attributes:
        path: The newest complete checkpoint: on the main process; after ``finish`` on all ranks.

    Raises:
        CheckpointError: The folder cannot be made.
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
        self._failure = ""  # of the last write, if it failed
        #: A step that was due while another was being written, and that other step.
        self._late: tuple[int, int] | None = None
        self._has_folder = ddp.is_main_process
        try:
            if self._has_folder:
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(
                f"checkpoint folder {folder} cannot be used: {error}; choose one that is writable"
            ) from error
        ddp.assembly.team.call_on_handover(self._hand_over)

    def _hand_over(self) -> None:
        """Finish what this rank is writing: another rank writes from now on."""
        try:
            self.close()
        except CheckpointError as error:
            warn(str(error))
        self._tell_late(is_over=True)
        self._snapshot, self._has_folder = None, False

    def move(self, suffix: str) -> None:
        """Write to a folder of its own from now on, which has this at the end of its name."""
        self._hand_over()
        self._folder = self._folder.with_name(f"{self._folder.name}{suffix}")

    def save(self, cursor_state: Mapping[str, Any]) -> None:
        """Begin to write the present state; all ranks call it together.

        The place for it is a commit, or between epochs. A step that is already written, or being
        written, is not written again. While another step is being written, this one is skipped,
        unless it is the last one: see ``finish``.

        Args:
            cursor_state: The data position that belongs to the state.

        Raises:
            ReplicasDifferError: Ranks hold different states (with ``DdpConfig.verify_every``).
        """
        self._agree()
        self.report()
        self._tell_late()
        if not self._ddp.is_main_process or self._is_written():
            return
        if self._write is None:
            # The team may have continued without this rank, if it was stopped in a commit.
            self._ddp.assembly.team.membership.await_lease()
            self._begin(cursor_state)
        elif not self._is_of_present():
            assert self._snapshot is not None
            self._late = self._ddp.window, self._snapshot.step

    def finish(self, cursor_state: Mapping[str, Any]) -> bool:
        """Write the present state and wait until it is on disk; all ranks call it together.

        Args:
            cursor_state: The data position that belongs to the state.

        Returns:
            Whether it is over; otherwise the main process was lost, and the next one has to save.

        Raises:
            CheckpointError: On every rank, when it could not be written in ``retry_s``.
            ReplicasDifferError: As in ``save``.
        """
        self._agree()
        self._tell_late()
        engine = self._ddp.assembly.engine
        round_s = min(_ROUND_S, self._ddp.assembly.comm.timeout_s / 4)
        until_s = time.monotonic() + self._retry_s
        while True:
            own: list[Any] | None = None
            if self._ddp.is_main_process:
                is_over, failure = self._write_last(cursor_state, round_s, until_s)
                own = [is_over, failure, self.path and str(self.path)]
            # The others wait in here, no longer than a round: their own deadline is not ours.
            heard = engine.collectives.hear_main("writing the last checkpoint", own)
            if heard is None:
                return engine.generations.is_alone
            is_over, failure, path = heard
            self.path = path and Path(path)
            if failure:
                raise CheckpointError(failure)
            if is_over:
                return True

    def report(self) -> None:
        """Report what has become of a write, once it has ended."""
        if self._write is None or not self._write.done():
            return
        write, self._write, self._failure = self._write, None, ""
        try:
            written = write.result()
        except CheckpointError as error:
            assert self._snapshot is not None
            self._failure = str(error)
            self._miss(self._snapshot.step, self._failure)
            return
        self.path = written.path
        self._ddp.events.checkpoint(written)
        if written.remark:
            warn(written.remark)

    def close(self) -> None:
        """Wait for what is being written; idempotent.

        Raises:
            CheckpointError: It takes too long.
        """
        if self._write is not None:
            wait([self._write], WRITE_TIMEOUT_S)
            if not self._write.done():
                raise CheckpointError(_TOO_SLOW)
            self.report()

    def _agree(self) -> None:
        """Compare the ranks' states, and bring together what is to be saved."""
        self._ddp.assembly.engine.prepare_save()
        self._ddp.assembly.engine.verify()

    def _is_of_present(self) -> bool:
        return self._snapshot is not None and self._snapshot.step == self._ddp.window

    def _is_written(self) -> bool:
        return self.path == self._folder / step_name(self._ddp.window)

    def _begin(self, cursor_state: Mapping[str, Any]) -> None:
        """Copy the present state, and begin to write it; nothing else is being written."""
        if self._has_folder and not self._folder.exists():
            warn(
                f"{self._folder} had gone, and earlier checkpoints with it: made it anew for step-"
                f"{self._ddp.window}; find out what removes it, or choose another folder"
            )
        self._snapshot = capture(
            self._ddp.assembly,
            [cursor_state],
            assets=self._assets,
            documents=self._documents,
            # A killed run resumes from this step, whose windows must be in its events.
            after=self._ddp.events.pending(),
            into=self._snapshot,
        )
        self._start(self._snapshot)

    def _start(self, snapshot: Snapshot) -> None:
        self._has_folder = True
        writer = ThreadPoolExecutor(1, thread_name_prefix="evener-checkpoint")
        self._write = writer.submit(
            write_checkpoint, self._folder, snapshot, keep_last=self._keep_last
        )
        # The thread ends with its write, for which the interpreter waits.
        writer.shutdown(wait=False)

    def _write_last(
        self, cursor_state: Mapping[str, Any], round_s: float, until_s: float
    ) -> tuple[bool, str]:
        """Work on the last save for up to ``round_s`` seconds, on the main process.

        Returns:
            Whether it is over, and the reason if it has failed.
        """
        end_s = time.monotonic() + round_s
        while (left_s := end_s - time.monotonic()) > 0:
            if self._write is not None:
                wait([self._write], left_s)
                self.report()
            elif self._is_written():
                return True, ""
            elif not self._is_of_present():
                self._begin(cursor_state)
            elif (patience_s := until_s - time.monotonic()) <= 0:
                tried = f"; it was tried for {self._retry_s:g} s (checkpoint.retry_s)"
                return True, self._failure + (tried if self._retry_s else "")
            else:
                assert self._snapshot is not None
                time.sleep(min(_PAUSE_S, patience_s, round_s))
                self._start(self._snapshot)
        is_stuck = self._write is not None and time.monotonic() > until_s + WRITE_TIMEOUT_S
        return is_stuck, _TOO_SLOW if is_stuck else ""

    def _tell_late(self, *, is_over: bool = False) -> None:
        """Report the step that was skipped, once ``finish`` cannot write it any more."""
        if self._late is None or (self._late[0] == self._ddp.window and not is_over):
            return
        (step, running), self._late = self._late, None
        self._miss(
            step,
            f"checkpoint step-{step} is skipped: step-{running} was not yet written when it was "
            "due; save less often (checkpoint.every), or to a faster disk",
        )

    def _miss(self, step: int, reason: str) -> None:
        warn(reason)
        self._ddp.events.tell("checkpoint_missed", window=step, reason=reason)
