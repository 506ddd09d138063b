"""One connection between two processes: messages are lines of JSON, and bytes may follow one.

Ranks speak to their supervisor over it, and the launchers of several machines to one another.
"""

import json
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any, Final
from weakref import WeakSet

#: Set by the supervisor of a rank: the descriptor of the rank's end.
CHANNEL_FD: Final = "EVENER_CHANNEL_FD"

#: Where a rank is, as its supervisor sees it.
JOINING: Final = "joining"
"""It waits for the other ranks of the team."""
JOINED: Final = "joined"
LEFT: Final = "left"
"""It has closed its connections to them."""
READY: Final = "ready"
"""A worker of a managed run begins to train."""
DONE: Final = "done"
"""A worker of a managed run has trained to the end."""

#: A message. The bytes that belong to it are its ``"payload"``, a ``bytearray``.
Message = dict[str, Any]

_CHUNK_BYTES = 1 << 20
_PAYLOAD_BYTES = "payload_bytes"
_LOOK_S = 0.5

_ends: "WeakSet[Channel | socket.socket]" = WeakSet()


class Channel:
    """One end of a connection. Any thread may tell; one thread receives. Nothing is unpickled.

    It ends with this process, and with ``exec``; a forked child closes its copy, which would hide
    that. Between processes of one host it is a socket pair, which leaves nothing in any folder.

    Args:
        end: The socket, which is this object's from now on.
        limit_bytes: Longest message, without bytes that follow; a longer one ends the connection.
            For connections that anybody may open; ``None`` for those between one's own processes.
        send_s: The connection ends if the other end takes nothing in for so long while a message is
            sent; ``None`` waits for as long as its process lives.

    Attributes:
        has_ended: Whether the other end, or this one, is closed.
    """

    def __init__(
        self, end: socket.socket, limit_bytes: int | None = None, send_s: float | None = None
    ) -> None:
        end.set_inheritable(False)
        self.has_ended = False
        self._end = end
        self._send_s = send_s
        self._limit_bytes = limit_bytes
        self._sending = threading.Lock()
        self._unread = bytearray()
        self._begun: Message | None = None  # its payload is still to come
        self._waiting: list[Message] = []
        close_in_children(self)

    def fileno(self) -> int:
        """Return the descriptor, to wait on."""
        return self._end.fileno()

    @property
    def own(self) -> tuple[str, int]:
        """Number and port of this end."""
        return _number_and_port(self._end.getsockname())

    @property
    def peer(self) -> tuple[str, int]:
        """Number and port of the other end; raises OSError when it has gone."""
        return _number_and_port(self._end.getpeername())

    def tell(self, message: Mapping[str, Any], payload: Sequence[memoryview] = ()) -> None:
        """Send a message; one that has gone misses nothing."""
        num_bytes = sum(part.nbytes for part in payload)
        size = {_PAYLOAD_BYTES: num_bytes} if num_bytes else {}
        line = json.dumps({**message, **size}).encode() + b"\n"
        with self._sending, suppress(OSError, ValueError):  # closed by another thread
            for part in (memoryview(line), *payload):
                self._send(part.cast("B"))

    def _send(self, part: memoryview) -> None:
        """Send all of it, whatever timeout the socket has: half a message would damage the next."""
        taken_s = time.monotonic()
        while part:
            try:
                part = part[self._end.send(part, socket.MSG_DONTWAIT) :]
                taken_s = time.monotonic()
            except BlockingIOError:
                late_s = time.monotonic() - taken_s
                if self._send_s is not None and late_s >= self._send_s:
                    self.close()
                    raise
                with selectors.DefaultSelector() as selector:
                    selector.register(self._end, selectors.EVENT_WRITE)
                    selector.select(_LOOK_S)  # another thread may close this end meanwhile

    def receive(self) -> list[Message]:
        """Return the messages that have come and are whole; one that is not a JSON object is empty.

        It does not wait. ``has_ended`` is true from the last message on.
        """
        messages, self._waiting = self._waiting, []
        while not self.has_ended:
            try:
                chunk = self._end.recv(_CHUNK_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except OSError:
                chunk = b""
            self._unread += chunk
            messages += self._cut()
            is_too_long = self._limit_bytes is not None and len(self._unread) > self._limit_bytes
            if is_too_long:
                messages.append({})
            if is_too_long or not chunk:
                self.close()
        return messages

    def next(self, deadline: float) -> Message | None:
        """Wait for the next message.

        Args:
            deadline: On the monotonic clock.

        Returns:
            The message; ``None`` when the connection has ended.

        Raises:
            TimeoutError: None has come.
        """
        while not self._waiting:
            self._waiting = self.receive()
            if self._waiting or self.has_ended:
                break
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            wait([self.fileno()], left_s)
        return self._waiting.pop(0) if self._waiting else None

    def close(self) -> None:
        """Close this end; idempotent."""
        self.has_ended = True
        self._end.close()

    def _cut(self) -> Iterator[Message]:
        while True:
            if self._begun is None:
                line, newline, rest = self._unread.partition(b"\n")
                if not newline:
                    return
                self._unread = rest
                self._begun = _parse(line)
            message = self._begun
            num_bytes = message.get(_PAYLOAD_BYTES, 0) if self._limit_bytes is None else 0
            if len(self._unread) < num_bytes:
                return
            if num_bytes:
                message["payload"] = self._unread[:num_bytes]
                del self._unread[:num_bytes]
            self._begun = None
            yield message


def _number_and_port(end: Sequence[Any]) -> tuple[str, int]:
    # A socket that listens on all addresses gives those of IPv4 in the form of IPv6.
    return str(end[0]).removeprefix("::ffff:"), int(end[1])


def _parse(line: bytes | bytearray) -> Message:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):  # lists in lists in lists exhaust the parser's stack
        return {}
    return message if isinstance(message, dict) else {}


def close_in_children(end: "Channel | socket.socket") -> None:
    """Have every child that is forked from now on close its copy of an end."""
    _ends.add(end)


def _close_all() -> None:
    for end in list(_ends):
        end.close()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_close_all)
