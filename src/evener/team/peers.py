"""What the launchers of several machines tell one another while their ranks run.

They keep the connections over which they have met. A message is a line of JSON; node 0 passes it
on. A connection that breaks says nothing about the ranks, which have connections of their own.
"""

import json
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

_LONGEST_LINE_BYTES = 4096


class Peers:
    """The launchers that this one is connected to: all others on node 0, node 0 elsewhere."""

    def __init__(self, connections: Sequence[socket.socket] = ()) -> None:
        self._lines = dict.fromkeys(connections, b"")
        for connection in connections:
            connection.setblocking(False)

    @property
    def descriptors(self) -> list[int]:
        """What to wait on."""
        return [connection.fileno() for connection in self._lines]

    def tell(self, **message: object) -> None:
        """Tells the other launchers, as far as they can be reached."""
        self._send(json.dumps(message).encode() + b"\n", [*self._lines])

    def hear(self) -> list[dict[str, Any]]:
        """Messages that have come since the last call."""
        messages = []
        for connection in [*self._lines]:
            for line in self._read(connection):
                with suppress(ValueError, RecursionError):
                    message = json.loads(line)
                    if isinstance(message, dict):
                        messages.append(message)
                        self._send(line + b"\n", [c for c in self._lines if c is not connection])
        return messages

    def close(self) -> None:
        """Closes the connections."""
        for connection in self._lines:
            connection.close()
        self._lines.clear()

    def _send(self, data: bytes, connections: Sequence[socket.socket]) -> None:
        for connection in connections:
            with suppress(OSError):
                connection.sendall(data)

    def _read(self, connection: socket.socket) -> list[bytes]:
        try:
            chunk = connection.recv(_LONGEST_LINE_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            chunk = b""
        *lines, rest = (self._lines[connection] + chunk).split(b"\n")
        self._lines[connection] = rest
        if not chunk or len(rest) > _LONGEST_LINE_BYTES:
            del self._lines[connection]
            connection.close()
        return lines
