"""Copy the output of all ranks but the first to the terminal, with the rank before each line."""

import os
import select
import threading
import time
from typing import IO

# A "line" without end (a progress bar, binary data) is cut here.
_LONGEST_LINE_BYTES = 65_536


class OutputPump:
    """Copies pipes to descriptors, line by line, each on its own thread.

    A stopped terminal (Ctrl-S) blocks the writer, and the launcher has to keep receiving signals.
    Bytes are not decoded. If a target is closed (``| head``), the pipe is still read, so that no
    rank blocks on it.
    """

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._closed_targets: set[int] = set()
        # Rank 0 writes to the same file by itself, and pipes write only few bytes atomically. So a
        # line is written at once, without another of our lines in between.
        self._writing = threading.Lock()

    def carry(self, prefix: bytes, source: IO[bytes], target: int) -> None:
        """Copy a pipe until its end.

        Args:
            prefix: Written before every line.
            source: The pipe, buffered; closed once it has ended.
            target: Descriptor that its lines go to.
        """
        thread = threading.Thread(
            target=self._copy, args=(prefix, source, target), name="evener-output", daemon=True
        )
        thread.start()
        self._threads.append(thread)

    @property
    def is_writing(self) -> bool:
        """Whether a reader, such as a pager, blocks it."""
        return self._writing.locked()

    def finish(self, timeout_s: float) -> bool:
        """Wait until everything has been written; return whether it was in time."""
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _copy(self, prefix: bytes, source: IO[bytes], target: int) -> None:
        with source:
            while line := source.readline(_LONGEST_LINE_BYTES):
                self._write(target, prefix + line.removesuffix(b"\n") + b"\n")

    def _write(self, target: int, data: bytes) -> None:
        view = memoryview(data)
        with self._writing:
            while view and target not in self._closed_targets:
                try:
                    view = view[os.write(target, view) :]
                except BlockingIOError:  # another program has made the terminal non-blocking
                    select.select([], [target], [])
                except OSError:
                    self._closed_targets.add(target)
