"""Carries the output of the ranks after the first to the terminal, marking lines with the rank."""

import os
import select
import selectors
import socket
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import IO

_CHUNK_BYTES = 65_536
# A "line" without end (a progress bar, binary data) is cut here.
_LONGEST_LINE_BYTES = 65_536


@dataclass(slots=True)
class _Stream:
    prefix: bytes
    source: IO[bytes]
    target: int
    rest: bytearray = field(default_factory=bytearray)


class OutputPump:
    """Copies pipes to descriptors, line by line, on a thread of its own.

    A thread, because a terminal that has been stopped (Ctrl-S) blocks the writer, and the launcher
    has to keep receiving signals. Bytes are not decoded. When a target is closed (``| head``), the
    pipe is still read, so that no rank blocks on it.
    """

    def __init__(self) -> None:
        self._new: deque[_Stream] = deque()
        self._wakers: tuple[socket.socket, ...] = ()  # made by ``start``: its end, and ours
        self._is_last = False  # no more pipes will come
        self._closed_targets: set[int] = set()
        self._writing = False
        self._thread = threading.Thread(target=self._run, name="evener-output", daemon=True)

    def carry(self, prefix: bytes, source: IO[bytes], target: int) -> None:
        """Add a pipe, until ``finish`` is called.

        Args:
            prefix: A mark for every line.
            source: The pipe, closed once it has ended.
            target: Descriptor that its lines go to.
        """
        self._new.append(_Stream(prefix, source, target))
        self._wake()

    def start(self) -> None:
        """Start copying."""
        self._wakers = socket.socketpair()
        self._wake()
        self._thread.start()

    @property
    def is_writing(self) -> bool:
        """Whether it is held up by a reader, such as a pager."""
        return self._writing

    def finish(self, timeout_s: float) -> bool:
        """Wait until every pipe has ended.

        Args:
            timeout_s: Longest wait; a process that left its rank's group may keep a pipe open.

        Returns:
            Whether all output has been copied.
        """
        if not self._is_last:
            self._is_last = True
            for ours in self._wakers[1:]:
                ours.close()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _wake(self) -> None:
        for ours in self._wakers[1:]:
            ours.send(b"x")

    def _run(self) -> None:
        woken = self._wakers[0]
        with woken, selectors.DefaultSelector() as selector:
            selector.register(woken, selectors.EVENT_READ)
            while selector.get_map():
                for key, _ in selector.select():
                    stream: _Stream | None = key.data
                    if stream is None:
                        if not woken.recv(64):  # ``finish`` was called
                            selector.unregister(woken)
                        while self._new:
                            new = self._new.popleft()
                            selector.register(new.source, selectors.EVENT_READ, new)
                        continue
                    chunk = os.read(stream.source.fileno(), _CHUNK_BYTES)
                    self._take(stream, chunk)
                    if not chunk:
                        selector.unregister(stream.source)
                        stream.source.close()

    def _take(self, stream: _Stream, chunk: bytes) -> None:
        stream.rest += chunk
        *lines, rest = bytes(stream.rest).split(b"\n")
        if rest and (not chunk or len(rest) >= _LONGEST_LINE_BYTES):
            lines.append(rest)
            rest = b""
        stream.rest[:] = rest
        # Rank 0 writes to the same place by itself, and the atomic size of a pipe is small.
        for line in lines:
            self._write(stream.target, stream.prefix + line + b"\n")

    def _write(self, target: int, data: bytes) -> None:
        view = memoryview(data)
        self._writing = True
        while view and target not in self._closed_targets:
            try:
                view = view[os.write(target, view) :]
            except BlockingIOError:  # someone has made the terminal non-blocking
                select.select([], [target], [])
            except OSError:
                self._closed_targets.add(target)
        self._writing = False
