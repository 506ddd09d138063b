"""Unix sockets between the ranks of one host: to pass memory, to wake up, and to notice ends."""

import hmac
import os
import secrets
import select
import socket
import struct
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple, final

_TOKEN_BYTES = 16
_HELLO = struct.Struct(f"={_TOKEN_BYTES}sq")  # token of the listening rank, rank that connects
_CREDENTIALS = struct.Struct("=iII")  # pid, uid, gid
_GREETING_S = 5.0  # a rank sends its greeting at once; another process may never send one
_WAKE = b"\0"


class Arrival(NamedTuple):
    """One rank's link to another.

    Attributes:
        connection: To it.
        descriptors: File descriptors that it has sent.
    """

    connection: socket.socket
    descriptors: list[int]

    def drop(self) -> None:
        """Close the connection, and the descriptors that are not used yet."""
        self.connection.close()
        for descriptor in self.descriptors:
            os.close(descriptor)


@final
class LinkListener:
    """A Unix socket without a path, on which one rank accepts connections of the others.

    It has a random name in the network namespace of the ranks. A process that connects must belong
    to the same user and send a random token.
    """

    def __init__(self) -> None:
        """Listen.

        Raises:
            OSError: A sandbox refuses such sockets, or no descriptors are left.
        """
        self.name = secrets.token_hex(16)
        self.token = secrets.token_hex(_TOKEN_BYTES)
        self._listener = _unix_socket()
        try:
            self._listener.bind(_address(self.name))
            self._listener.listen(socket.SOMAXCONN)
        except OSError:
            self._listener.close()
            raise

    def close(self) -> None:
        """Stop listening; connections stay open."""
        self._listener.close()

    def connect_all(
        self,
        rank: int,
        listeners: Sequence[tuple[str, str]],
        descriptors: Sequence[int],
        timeout_s: float,
    ) -> dict[int, Arrival]:
        """Connect to every other rank and exchange descriptors; all ranks call it together.

        Args:
            rank: This rank.
            listeners: Name and token of each rank's listener.
            descriptors: To send; the same number on every rank.
            timeout_s: Deadline.

        Raises:
            OSError: A rank did not connect in time, or belongs to another user.
        """
        deadline = time.monotonic() + timeout_s
        arrivals: dict[int, Arrival] = {}
        try:
            for other in range(rank):
                connection = _unix_socket()
                arrivals[other] = Arrival(connection, [])
                connection.settimeout(_left(deadline))
                name, token = listeners[other]
                connection.connect(_address(name))
                _check_user(connection)
                hello = _HELLO.pack(bytes.fromhex(token), rank)
                socket.send_fds(connection, [hello], list(descriptors))
            while len(arrivals) < len(listeners) - 1:
                self._listener.settimeout(_left(deadline))
                connection, _ = self._listener.accept()
                other, received = self._admit(connection, len(descriptors))
                if not rank < other < len(listeners) or other in arrivals:
                    Arrival(connection, received).drop()
                    continue
                arrivals[other] = Arrival(connection, received)
                socket.send_fds(connection, [_WAKE], list(descriptors))
            for other in range(rank):
                connection, received = arrivals[other]
                connection.settimeout(_left(deadline))
                received += _receive(connection, len(_WAKE), len(descriptors))[1]
        except BaseException:
            self.close()  # otherwise ranks that have connected would wait for an answer
            for arrival in arrivals.values():
                arrival.drop()
            raise
        return arrivals

    def _admit(self, connection: socket.socket, count: int) -> tuple[int, list[int]]:
        """Return the rank that has connected and its descriptors; -1 for another process."""
        received: list[int] = []
        try:
            _check_user(connection)
            connection.settimeout(_GREETING_S)
            message, received = _receive(connection, _HELLO.size, count)
            token, other = _HELLO.unpack(message)
        except (OSError, struct.error):
            return -1, received
        knows = hmac.compare_digest(token, bytes.fromhex(self.token))
        return (other if knows else -1), received


@final
class Links:
    """The connections of one rank to the others.

    A byte wakes a rank up. If memory does not keep the order of writes, it also means that the
    sender has arrived. The end of a connection means that the rank has gone.

    Attributes:
        gone: Ranks whose connection has ended.
    """

    def __init__(self, connections: dict[int, socket.socket], world_size: int) -> None:
        self._connections = connections
        self._by_descriptor = {each.fileno(): rank for rank, each in connections.items()}
        self._poll = select.poll()
        for connection in connections.values():
            connection.setblocking(False)
            self._poll.register(connection, select.POLLIN)
        self._received = [0] * world_size
        self.gone: set[int] = set()

    def wake(self, rank: int) -> None:
        """Send a byte; it is dropped if the rank has gone, or if the socket's buffer is full."""
        with suppress(OSError):
            self._connections[rank].send(_WAKE, socket.MSG_NOSIGNAL)

    def count(self, rank: int) -> int:
        """Return the number of bytes received from a rank."""
        return self._received[rank]

    def wait(self, timeout_s: float) -> None:
        """Wait until a byte comes or a connection ends, and read what has come."""
        for descriptor, _ in self._poll.poll(timeout_s * 1000):
            rank = self._by_descriptor[descriptor]
            try:
                count = len(self._connections[rank].recv(4096))
            except BlockingIOError:
                continue
            except OSError:  # reset: the peer has ended with bytes unread
                count = 0
            self._received[rank] += count
            if not count:
                self.gone.add(rank)
                self._poll.unregister(descriptor)

    def cut(self) -> None:
        """End the connections; a thread that waits on them wakes up."""
        for connection in self._connections.values():
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the descriptors; no thread waits on them."""
        for connection in self._connections.values():
            connection.close()


def _unix_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)


def _address(name: str) -> str:
    return f"\0evener-{name}"


def _left(deadline: float) -> float:
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("a rank did not connect in time")
    return left_s


def _check_user(connection: socket.socket) -> None:
    """Refuse a process of another user.

    Raises:
        PermissionError: The peer belongs to another user.
    """
    if sys.platform == "linux":
        answer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, uid, _ = _CREDENTIALS.unpack(answer)
        if uid != os.getuid():
            raise PermissionError(f"the peer is a process of user {uid}")


def _receive(connection: socket.socket, size: int, count: int) -> tuple[bytes, list[int]]:
    """Return ``size`` bytes and the ``count`` descriptors that came with them.

    Raises:
        OSError: The connection has ended, or fewer descriptors came.
    """
    # Close-on-exec from the start: the user's threads may start processes at any time.
    flags = socket.MSG_CMSG_CLOEXEC | socket.MSG_WAITALL
    message, received, *_ = socket.recv_fds(connection, size, count, flags)
    if len(message) < size or len(received) < count:
        for descriptor in received:
            os.close(descriptor)
        raise ConnectionError("a rank ended its connection, or no more descriptors can be opened")
    return message, received
