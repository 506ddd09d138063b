"""The sockets of a process group: to be cut under a hung operation, or closed in a forked child."""

import json
import os
import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self, final

from evener.comm.addresses import end_when_unreachable
from evener.comm.forks import NotInherited

_FOLDER = Path("/proc/self/fd")
_ESTABLISHED = 1  # a state in Linux's TCP_INFO


@final
class Wires(NotInherited):
    """Sockets that torch has opened for a group or a store.

    Gloo can neither abort an operation nor say which sockets it uses; but on Linux a process can
    list its own. They are remembered by inode, as a descriptor may be used again. Elsewhere nothing
    is remembered, and nothing is cut.
    """

    def __init__(self, inodes: Iterable[str] = ()) -> None:
        self._inodes = frozenset(inodes)
        self._num_connections = len(self._inodes)

    @classmethod
    @contextmanager
    def opened(cls) -> Iterator[Self]:
        """Collect those that begin to listen inside the block.

        Another thread may open such a socket meanwhile. So these are closed in forked children, and
        never cut.
        """
        wires, before = cls(), list_sockets()
        yield wires
        found = {fd: inode for fd, inode in _sockets().items() if inode not in before}
        own = {fd: inode for fd, inode in found.items() if _listens_at(fd)}
        _keep_from_programs(own)
        wires._inodes = frozenset(own.values())

    @classmethod
    def between(
        cls,
        exchange: Callable[[bytes], list[bytes]],
        *,
        before: frozenset[str] = frozenset(),
        silence_s: float | None = None,
    ) -> Self:
        """Collect connections between processes: both ends are theirs, in two of them.

        Args:
            exchange: Gives every process the value of each; all call it together.
            before: ``list_sockets`` of a moment when they were not open yet.
            silence_s: A machine that has not answered for so long ends connections to it, also
                while nothing is exchanged; ``None`` for no limit.
        """
        found = [(fd, inode) for fd, inode in _sockets().items() if inode not in before]
        ends = {fd: end for fd, _ in found if (end := _ends(fd))}
        own = json.dumps([*ends.values()]).encode()
        far = [
            [there, here]
            for each in exchange(own)
            if each != own
            for here, there in json.loads(each)
        ]
        wired = {fd: inode for fd, inode in found if ends.get(fd) in far}
        _keep_from_programs(wired)
        if silence_s is not None:
            for descriptor in wired:
                with suppress(OSError), _tcp(descriptor) as connection:
                    end_when_unreachable(connection, silence_s)
        return cls(wired.values())

    @property
    def listening(self) -> list[tuple[str, int]]:
        """Number and port of those at which torch listens for peers; empty where unknown."""
        return [place for fd in self._own() if (place := _listens_at(fd))]

    def cut(self) -> None:
        """End the connections that are still open, as if the peers had closed theirs."""
        for descriptor in self._own():
            with suppress(OSError), _tcp(descriptor) as connection:
                connection.shutdown(socket.SHUT_RDWR)
        self._inodes = frozenset()

    @property
    def is_broken(self) -> bool:
        """Return whether a connection was closed since, by a peer or by torch."""
        return sum(map(_is_connected, self._own())) < self._num_connections

    def close_in_child(self) -> None:
        """Close a forked child's copies; the parent and its peers notice nothing."""
        for descriptor in self._own():
            with suppress(OSError):
                os.close(descriptor)

    def _own(self) -> list[int]:
        return [fd for fd, inode in _sockets().items() if inode in self._inodes]


def close_server(port: int) -> None:
    """Close a forked child's copies of a server's sockets: of listening ones and of accepted ones.

    Args:
        port: On which this process serves. Clients of it come at any time, so their sockets cannot
            be remembered.
    """
    for descriptor in _sockets():
        with suppress(OSError), _tcp(descriptor) as end:
            if end.getsockname()[1] == port:
                os.close(descriptor)


def list_sockets() -> frozenset[str]:
    """Return what identifies the sockets that this process has open; see ``Wires.between``."""
    return frozenset(_sockets().values())


def _keep_from_programs(descriptors: Iterable[int]) -> None:
    """Close descriptors in programs that this process starts; Gloo leaves them to ``os.system``."""
    for descriptor in descriptors:
        with suppress(OSError):
            os.set_inheritable(descriptor, False)


def _sockets() -> dict[int, str]:
    """Return the inode of every socket of this process, by descriptor; empty if unknown."""
    if sys.platform != "linux":
        return {}
    found = {}
    for entry in _FOLDER.iterdir():
        with suppress(OSError):  # it was closed since, such as that of the listing itself
            inode = str(entry.readlink())
            if inode.startswith("socket:"):
                found[int(entry.name)] = inode
    return found


def _ends(descriptor: int) -> list[str]:
    """Own and far address of a TCP connection; empty for any other socket."""
    with suppress(OSError), _tcp(descriptor) as end:
        both = end.getsockname(), end.getpeername()
        return [f"{host.removeprefix('::ffff:')} {port}" for host, port, *_ in both]
    return []


def _is_connected(descriptor: int) -> bool:
    """Return whether neither side of a TCP connection has closed it."""
    with suppress(OSError), _tcp(descriptor) as end:
        return end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _ESTABLISHED
    return False


def _listens_at(descriptor: int) -> tuple[str, int] | None:
    with suppress(OSError), _tcp(descriptor) as end:
        if end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            host, port, *_ = end.getsockname()
            return str(host), int(port)
    return None


@contextmanager
def _tcp(descriptor: int) -> Iterator[socket.socket]:
    """Use a TCP socket, which stays open; raise ``OSError`` for any other descriptor."""
    end = socket.socket(fileno=descriptor)
    try:
        if end.family not in (socket.AF_INET, socket.AF_INET6):
            raise OSError("no TCP socket")
        yield end
    finally:
        end.detach()
