"""Saves the team's state while it trains: rank 0 copies, a thread writes."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from evener.checkpoint import CheckpointWriter, WrittenCheckpoint
from evener.errors import CheckpointError
from evener.run.assembly.state import capture
from evener.run.ddp import Ddp

WRITE_TIMEOUT_S = 600.0
_TOO_SLOW = f"a checkpoint was not written within {WRITE_TIMEOUT_S:g} s; check the disk"


class Checkpointer:
    """Writes ``step-N`` folders; training waits for the copy only.

    Args:
        ddp: The team; every rank makes one, rank 0 writes.
        folder: Receives the checkpoints.
        keep_last: How many to keep.
        assets: Files that go into every checkpoint, by name.
        documents: JSON documents that go into every checkpoint, by file name.
        on_written: Told of each checkpoint that has reached the disk.
        on_failure: Told of each that could not be written; the previous one stays in use.
    """

    def __init__(
        self,
        ddp: Ddp,
        folder: Path,
        *,
        keep_last: int,
        assets: Mapping[str, bytes],
        documents: Mapping[str, Any],
        on_written: Callable[[WrittenCheckpoint], None],
        on_failure: Callable[[str], None],
    ) -> None:
        self._ddp = ddp
        self._assets = assets
        self._documents = documents
        self._on_written = on_written
        self._on_failure = on_failure
        self._writer = CheckpointWriter(folder, keep_last) if ddp.is_main_process else None
        self._last_step = -1
        self._failure: str | None = None  # of the last step, as far as it is known

    def save(self, cursor_state: Mapping[str, Any]) -> None:
        """Hands the present state to the writer; all ranks call it together.

        The place for it is a commit, or between epochs. A step that is already written, or being
        written, is not written again.

        Args:
            cursor_state: The data position that belongs to the state.

        Raises:
            ReplicasDifferError: Ranks hold different states (with ``DdpConfig.verify_every``).
        """
        self._ddp.assembly.engine.prepare_save()
        self._ddp.assembly.engine.verify()
        if self._writer is None:
            return
        self.report()
        if self._ddp.window == self._last_step and self._failure is None:
            return
        old = self._writer.take_finished()
        self._last_step, self._failure = self._ddp.window, None
        self._writer.submit(
            capture(
                self._ddp.assembly,
                cursor_state,
                assets=self._assets,
                documents=self._documents,
                into=old,
            )
        )

    def report(self) -> None:
        """Passes on what the writer has finished or failed at since the last call."""
        if self._writer is None:
            return
        for written in self._writer.poll_written():
            self._on_written(written)
        if (error := self._writer.poll_error()) is not None:
            if not self._is_written():
                self._failure = str(error)
            self._on_failure(str(error))

    def finish(self) -> Path | None:
        """Waits for the last write; all ranks call it together.

        Returns:
            The newest complete checkpoint, on rank 0.

        Raises:
            CheckpointError: On every rank, when the last one could not be written.
        """
        failure = ""
        if self._writer is not None:
            in_time = self._writer.wait(WRITE_TIMEOUT_S)
            self.report()
            if self._last_step >= 0 and not self._is_written():
                failure = _TOO_SLOW if not in_time else self._failure or "a checkpoint is missing"
        self._ddp.assembly.agree_on_failure(failure)
        return self._writer.last_path if self._writer is not None else None

    def _is_written(self) -> bool:
        path = self._writer.last_path if self._writer is not None else None
        return path is not None and path.name == f"step-{self._last_step}"

    def close(self) -> None:
        """Waits for what is being written; idempotent."""
        if self._writer is not None and not self._writer.close(WRITE_TIMEOUT_S):
            raise CheckpointError(_TOO_SLOW)
