"""Unix sockets between the ranks of one host: they hand over memory, wake up, and notice ends."""

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
_HELLO = struct.Struct(f"={_TOKEN_BYTES}sq")  # token of the door's rank, rank that connects
_CREDENTIALS = struct.Struct("=iII")  # pid, uid, gid
_GREETING_S = 5.0  # a rank sends its greeting with its connection; a stranger may never send one
_WAKE = b"\0"


class Arrival(NamedTuple):
    """One rank's link to another.

    Attributes:
        connection: To it.
        descriptors: Of the files that it has handed over.
    """

    connection: socket.socket
    descriptors: list[int]

    def drop(self) -> None:
        """Close the connection, and the descriptors that nobody has taken."""
        self.connection.close()
        for descriptor in self.descriptors:
            os.close(descriptor)


@final
class Door:
    """A Unix socket without a path at which one rank waits for the others.

    Others find it by a random name, in the network namespace of the ranks. A process that connects
    must belong to the same user and know a random token.
    """

    def __init__(self) -> None:
        """Open the door.

        Raises:
            OSError: A sandbox refuses such sockets, or there are no descriptors left.
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
        """Close it; connections stay."""
        self._listener.close()

    def meet(
        self,
        rank: int,
        doors: Sequence[tuple[str, str]],
        descriptors: Sequence[int],
        timeout_s: float,
    ) -> dict[int, Arrival]:
        """Connect to every other rank and swap descriptors; all ranks do so at the same time.

        Args:
            rank: This rank.
            doors: Name and token of each rank's door.
            descriptors: What to hand over; as many on every rank.
            timeout_s: Deadline.

        Raises:
            OSError: A rank did not come in time, or is another user's.
        """
        deadline = time.monotonic() + timeout_s
        arrivals: dict[int, Arrival] = {}
        try:
            for other in range(rank):
                connection = _unix_socket()
                arrivals[other] = Arrival(connection, [])
                connection.settimeout(_left(deadline))
                name, token = doors[other]
                connection.connect(_address(name))
                _check_user(connection)
                hello = _HELLO.pack(bytes.fromhex(token), rank)
                socket.send_fds(connection, [hello], list(descriptors))
            while len(arrivals) < len(doors) - 1:
                self._listener.settimeout(_left(deadline))
                connection, _ = self._listener.accept()
                other, received = self._admit(connection, len(descriptors))
                if not rank < other < len(doors) or other in arrivals:
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
        """Return which rank has come and what it hands over; -1 for a stranger."""
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

    A byte wakes a rank up; where memory does not keep the order of writes, it also says that the
    sender has arrived. The end of a connection says that the rank has gone.

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
        """Send a byte; nothing happens where the rank has gone, or has plenty to read."""
        with suppress(OSError):
            self._connections[rank].send(_WAKE, socket.MSG_NOSIGNAL)

    def count(self, rank: int) -> int:
        """Return how many bytes have come from a rank."""
        return self._received[rank]

    def wait(self, timeout_s: float) -> None:
        """Wait until a byte comes or a connection ends, and take in what there is."""
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
        raise TimeoutError("a rank did not come in time")
    return left_s


def _check_user(connection: socket.socket) -> None:
    """Refuse a process of another user.

    Raises:
        PermissionError: It is another's.
    """
    if sys.platform == "linux":
        answer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, uid, _ = _CREDENTIALS.unpack(answer)
        if uid != os.getuid():
            raise PermissionError(f"the peer is a process of user {uid}")


def _receive(connection: socket.socket, size: int, count: int) -> tuple[bytes, list[int]]:
    """Return so many bytes, and the descriptors that came with them.

    Raises:
        OSError: The connection has ended, or brought fewer descriptors.
    """
    # Close-on-exec from the start: the user's threads may start processes at any time.
    flags = socket.MSG_CMSG_CLOEXEC | socket.MSG_WAITALL
    message, received, *_ = socket.recv_fds(connection, size, count, flags)
    if len(message) < size or len(received) < count:
        for descriptor in received:
            os.close(descriptor)
        raise ConnectionError("a rank ended its connection, or no more descriptors can be opened")
    return message, received
