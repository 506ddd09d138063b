"""Messages between a process and the workers that it has started: JSON, and bytes beside it."""

import json
import socket
import struct
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from evener.comm.forks import NotInherited, leave_behind_in_children

_HEAD = struct.Struct("!IQ")
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Message:
    """One message.

    Attributes:
        kind: What it is about.
        document: JSON.
        payload: Bytes that belong to it.
    """

    kind: str
    document: Mapping[str, Any] = field(default_factory=dict)
    payload: bytearray = field(default_factory=bytearray)


class Channel(NotInherited):
    """One end of a socket pair. Any thread may send; one thread receives.

    Nothing is unpickled from it.
    """

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        leave_behind_in_children(self)
        self._sending = threading.Lock()
        self._unread = bytearray()

    def send(
        self,
        kind: str,
        document: Mapping[str, Any] | None = None,
        payload: Sequence[memoryview] = (),
    ) -> None:
        """Sends a message.

        Raises:
            OSError: The other end is closed.
        """
        text = json.dumps([kind, document or {}]).encode()
        head = _HEAD.pack(len(text), sum(part.nbytes for part in payload))
        with self._sending:
            self.socket.sendall(head + text)
            for part in payload:
                self.socket.sendall(part)

    def receive(self, *, wait: bool = True) -> list[Message] | None:
        """Reads what has come.

        Args:
            wait: Wait until something comes; else return at once.

        Returns:
            Messages that are whole, possibly none yet; ``None`` when the other end is closed.

        Raises:
            BlockingIOError: Nothing has come, and it shall not wait.
        """
        try:
            chunk = self.socket.recv(_CHUNK_BYTES, 0 if wait else socket.MSG_DONTWAIT)
        except ConnectionError:
            return None
        if not chunk:
            return None
        self._unread += chunk
        messages = []
        while (message := self._cut()) is not None:
            messages.append(message)
        return messages

    def _cut(self) -> Message | None:
        unread = self._unread
        if len(unread) < _HEAD.size:
            return None
        text_bytes, payload_bytes = _HEAD.unpack_from(unread)
        start = _HEAD.size + text_bytes
        end = start + payload_bytes
        if len(unread) < end:
            return None
        kind, document = json.loads(bytes(unread[_HEAD.size : start]))
        payload = unread[start:end]
        del unread[:end]
        return Message(kind, document, payload)

    def leave_behind(self) -> None:
        """Closes the copy that a forked child has of this end; see ``NotInherited``."""
        self.socket.close()

    def close(self) -> None:
        """Closes this end; idempotent."""
        self.socket.close()
