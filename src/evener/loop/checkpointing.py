"""Saves the team's state while it trains: the main process copies, a thread writes.

A save that fails is tried again, in the training thread, when its pause is over: at a commit, or at
the end of the run. Until then the snapshot waits in memory, or gives way to a newer one.
"""

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from evener.checkpoint import CheckpointWriter, Snapshot, UnwrittenError, WrittenCheckpoint
from evener.errors import CheckpointError
from evener.loop.loop import Loop
from evener.loop.saved_state import capture
from evener.team.terminal import warn

WRITE_TIMEOUT_S = 600.0

RETRY_S: Final = 600.0
"""For so long the last save of a run is tried again, where nothing else is said."""

FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 60.0
"""The pause before a save is tried again doubles with each attempt, from the first to this."""

_ROUND_S: Final = 10.0
"""So often, at least, the other ranks hear that the main process is still at it."""

_TOO_SLOW = f"a checkpoint was not written within {WRITE_TIMEOUT_S:g} s; check the disk"


class Checkpointer:
    """Writes ``step-N`` folders; training waits for the copy only.

    Args:
        ddp: The team; every rank makes one, the main process writes.
        folder: Receives the checkpoints.
        keep_last: How many to keep.
        assets: Files that go into every checkpoint, by name.
        documents: JSON documents that go into every checkpoint, by file name.
        retry_s: Seconds for which ``finish`` tries the last one again.
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
        self._ddp = ddp
        self._assets = assets
        self._documents = documents
        self._retry_s = retry_s
        self._folder = folder
        self._keep_last = keep_last
        self._writer: CheckpointWriter | None = None  # while this rank is the main process
        self._open()
        ddp.assembly.team.call_on_handover(self._hand_over)
        self._last_step = -1
        self._unwritten: Snapshot | None = None  # failed, and waits to be tried again
        self._failure = ""  # of the last attempt
        self._pause_s = FIRST_PAUSE_S
        self._retry_at_s = 0.0
        self._gives_up_s = math.inf
        #: What ``finish`` has heard of the newest complete checkpoint.
        self._finished: Path | None = None

    def _open(self) -> None:
        """Open a writer on the main process, and on no other rank."""
        if not self._ddp.is_main_process:
            # This rank was the main process of an elastic team that has continued without it. What
            # it is writing ends in the writer's thread.
            self._writer = self._unwritten = None
        elif self._writer is None:
            self._writer = CheckpointWriter(self._folder, self._keep_last)

    def _hand_over(self) -> None:
        """Finish what this rank is writing: another rank writes from now on."""
        try:
            self.close()
        except CheckpointError as error:
            warn(str(error))
        self._writer, self._unwritten, self._last_step = None, None, -1
        self._gives_up_s = math.inf

    def move(self, suffix: str) -> None:
        """Write to a folder of its own from now on, which has this at the end of its name."""
        self._hand_over()
        self._folder = self._folder.with_name(f"{self._folder.name}{suffix}")

    def save(self, cursor_state: Mapping[str, Any]) -> None:
        """Pass the present state to the writer; all ranks call it together.

        The place for it is a commit, or between epochs. A step that is already written, or being
        written, is not written again; one that failed is tried again at once.

        Args:
            cursor_state: The data position that belongs to the state.

        Raises:
            ReplicasDifferError: Ranks hold different states (with ``DdpConfig.verify_every``).
        """
        engine, window = self._ddp.assembly.engine, self._ddp.window
        engine.prepare_save()
        engine.verify()
        self._open()  # not before: the main rank may have been lost, and this one be the next
        writer = self._writer
        self.report()
        old = self._unwritten
        if old is not None and old.step == window:
            self._try_again()
            return
        if writer is None or (
            window == self._last_step and (self._is_written() or not writer.wait(0.0))
        ):
            return
        if old is not None:
            self._miss(
                old.step,
                f"checkpoint step-{old.step}, which could not be written, gives way to step-"
                f"{window}; free disk space there",
            )
        self._unwritten, self._last_step, self._pause_s = None, window, FIRST_PAUSE_S
        writer.submit(
            capture(
                self._ddp.assembly,
                [cursor_state],
                assets=self._assets,
                documents=self._documents,
                # A killed run resumes from this step, whose windows must be in its events.
                after=self._ddp.events.pending(),
                into=old or writer.take_finished(),
            )
        )

    def report(self) -> None:
        """Pass on what the writer has finished or failed at, and try again what is due."""
        self._collect()
        if time.monotonic() >= self._retry_at_s:
            self._try_again()

    def _try_again(self) -> None:
        if self._writer is not None and self._unwritten is not None:
            snapshot, self._unwritten = self._unwritten, None
            self._writer.submit(snapshot)

    def _collect(self) -> None:
        """Pass on what the writer has finished, failed at or skipped since the last call."""
        writer = self._writer
        for done in writer.poll() if writer is not None else ():
            if isinstance(done, WrittenCheckpoint):
                self._ddp.events.checkpoint(done)
                continue
            self._miss(
                done.step,
                f"checkpoint step-{done.step} is skipped: step-{done.running} was not yet "
                f"written when step-{done.newer} came, which takes its place; save less "
                "often (checkpoint.every), or to a faster disk",
            )
        while writer is not None and (error := writer.poll_error()) is not None:
            if isinstance(error, UnwrittenError):
                self._note_failure(error)
            else:  # only what is old could not be removed, or has gone
                warn(str(error))

    def _note_failure(self, error: UnwrittenError) -> None:
        step, self._failure = error.snapshot.step, str(error)
        now_s, text = time.monotonic(), str(error)
        if step != self._last_step:
            text += f". The next attempt is step-{self._last_step}"
        elif now_s < self._gives_up_s:
            pause_s = min(self._pause_s, self._gives_up_s - now_s)
            self._unwritten, self._retry_at_s = error.snapshot, now_s + pause_s
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
            text += f". The next attempt is in {pause_s:.3g} s"
        self._miss(step, text)

    def _miss(self, step: int, reason: str) -> None:
        warn(reason)
        self._ddp.events.tell("checkpoint_missed", window=step, reason=reason)

    @property
    def path(self) -> Path | None:
        """Return the newest complete checkpoint: on the main process; after ``finish`` on all."""
        return self._writer.last_path if self._writer is not None else self._finished

    def finish(self) -> bool:
        """Wait for the last write, and try it again; all ranks call it together.

        Returns:
            Whether it is over; otherwise the main process was lost, and the next one has to save.

        Raises:
            CheckpointError: On every rank, when the last one could not be written in ``retry_s``.
        """
        ddp, assembly = self._ddp, self._ddp.assembly
        self._gives_up_s = time.monotonic() + self._retry_s
        round_s = min(_ROUND_S, assembly.comm.timeout_s / 4)
        is_waiting, failure = True, ""
        while is_waiting:
            own: list[Any] | None = None
            if ddp.is_main_process:
                own = [*self._finish_round(round_s), self.path and str(self.path)]
            # The others wait in here, no longer than a round: their own deadline is not ours.
            heard = assembly.engine.hear_main(own)
            if heard is None:
                break
            is_waiting, failure, path = heard
            self._finished = None if path is None else Path(path)
        self._gives_up_s = math.inf
        if failure:
            raise CheckpointError(failure)
        return assembly.engine.is_alone or not is_waiting

    def _finish_round(self, round_s: float) -> tuple[bool, str]:
        """Wait up to ``round_s`` seconds for the last write, on the main process.

        Returns:
            Whether all ranks have to wait another round, and the reason if the write has failed.
        """
        writer = self._writer
        if writer is None:
            return False, ""
        end_s = time.monotonic() + round_s
        while (left_s := end_s - time.monotonic()) > 0:
            if not writer.wait(left_s):
                break
            self._collect()
            if self._last_step < 0 or self._is_written():
                return False, ""
            if self._unwritten is None:
                tried = f"; it was tried for {self._retry_s:g} s (checkpoint.retry_s)"
                return False, self._failure + (tried if self._retry_s else "")
            # The last attempt is made when the time is up, however long its pause was to be.
            due_s = min(self._retry_at_s, self._gives_up_s)
            time.sleep(max(0.0, min(due_s, end_s) - time.monotonic()))
            if time.monotonic() >= due_s:
                self._try_again()
        if time.monotonic() > self._gives_up_s + WRITE_TIMEOUT_S:
            return False, _TOO_SLOW
        return True, ""

    def _is_written(self) -> bool:
        path = self.path
        return path is not None and path.name == f"step-{self._last_step}"

    def close(self) -> None:
        """Wait for what is being written, and try once more what failed; idempotent."""
        if self._writer is None:
            return
        self._collect()
        self._gives_up_s = -math.inf
        self._try_again()
        is_done = self._writer.close(WRITE_TIMEOUT_S)
        self._collect()
        if not is_done:
            raise CheckpointError(_TOO_SLOW)
