"""The sockets of a process group, so that an operation can be ended which waits for a hung peer."""

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self, final

_FOLDER = Path("/proc/self/fd")


@final
class Wires:
    """Connections that a process group has opened.

    Gloo can neither abort an operation nor say which sockets it uses; but on Linux a process can
    list its own. Those that are new after a group was formed, and look like Gloo's, are taken for
    the group's. They are remembered by inode, as a descriptor may be used again. Elsewhere nothing
    is remembered, and nothing is cut.
    """

    def __init__(self) -> None:
        self._inodes: frozenset[str] = frozenset()

    @classmethod
    @contextmanager
    def of_group(cls) -> Iterator[Self]:
        """Takes those that are opened inside the block."""
        wires = cls()
        before = set(_sockets().values())
        yield wires
        new = {fd: inode for fd, inode in _sockets().items() if inode not in before}
        wires._inodes = frozenset(inode for fd, inode in new.items() if _is_connected(fd))

    def cut(self) -> None:
        """Ends the connections that are still open, as if the peers had closed theirs."""
        for descriptor, inode in _sockets().items():
            if inode in self._inodes:
                with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                    connection.shutdown(socket.SHUT_RDWR)
        self._inodes = frozenset()


def _sockets() -> dict[int, str]:
    """Every socket of this process: its inode by descriptor; empty where they are not listed."""
    if sys.platform != "linux":
        return {}
    found = {}
    for entry in _FOLDER.iterdir():
        with suppress(OSError):  # it was closed since, such as that of the listing itself
            inode = str(entry.readlink())
            if inode.startswith("socket:"):
                found[int(entry.name)] = inode
    return found


def _is_connected(descriptor: int) -> bool:
    """Whether it is a TCP connection such as Gloo's: without delay."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            connection.getpeername()
            return bool(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
    except OSError:
        return False
