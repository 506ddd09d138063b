"""Where ranks exchange addresses, and the network devices on which they listen to one another."""

import os
import socket
from typing import final

from evener.closing import Closing
from evener.comm.addresses import is_loopback
from evener.comm.c10d import ProcessGroupGloo, Store
from evener.comm.messages import first_line
from evener.comm.wires import Wires
from evener.errors import LaunchError


@final
class MeetingPoint:
    """Where the ranks of a team exchange addresses when they form a group.

    Args:
        store: Shared by all ranks; each group uses a prefix of its own.
        reached_at: Name or number of this host at which the other ranks reach it.
        host_rank: Number in the team of the rank whose process answers for the store; ``None`` for
            none of them.
        connection: To the store; closed with the last group that holds this place.

    Raises:
        LaunchError: See ``devices_at``.
    """

    def __init__(
        self,
        store: Store,
        reached_at: str,
        *,
        host_rank: int | None = None,
        connection: Closing | None = None,
    ) -> None:
        self.store = store
        self.host_rank = host_rank
        with Wires.opened() as self._wires:
            self.devices = devices_at(reached_at)
        self._connection = connection
        self._num_groups = 0

    @property
    def listening(self) -> list[tuple[str, int]]:
        """Numbers and ports at which this rank listens to its peers."""
        return self._wires.listening

    def hold(self) -> None:
        """Keep the connection until ``release`` has been called as often."""
        self._num_groups += 1

    def release(self) -> None:
        """End one use of the connection."""
        self._num_groups -= 1
        if not self._num_groups and self._connection is not None:
            self._connection.close()

    def leave_behind(self) -> None:
        """Close a forked child's copies of the sockets; see ``NotInherited``."""
        self._connection = None
        self._wires.leave_behind()


def devices_at(host: str) -> tuple[ProcessGroupGloo.Device, ...]:
    """Return the network devices that listen at an address of this host.

    ``GLOO_SOCKET_IFNAME`` (names, comma separated) takes precedence where it is set.

    Args:
        host: Name or number at which peers reach this host.

    Raises:
        LaunchError: A network interface of that name is not there, or has no address; or the host
            is another one.
    """
    wanted = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if names := [name for name in wanted.split(",") if name]:
        try:
            return tuple(ProcessGroupGloo.create_device(interface=name) for name in names)
        except RuntimeError as error:
            raise LaunchError(
                f"GLOO_SOCKET_IFNAME is {wanted!r} ({first_line(error)}): name interfaces of this "
                f"host with an address, of {', '.join(n for _, n in socket.if_nameindex())}"
            ) from None
    try:
        return (ProcessGroupGloo.create_device(hostname=host),)
    except RuntimeError as error:
        raise LaunchError(
            f"this rank cannot listen at {host} ({first_line(error)}): give an address of this "
            "machine that the others reach (--address, EVENER_ADDRESS)"
        ) from None


def own_address(address: str, port: int) -> str:
    """Return the number of this host as seen from ``address``; 127.0.0.1 without a network.

    Args:
        address: Name or number of any host, this one included.
        port: Of it; any will do, nothing is sent.
    """
    # Many hosts map their own name to 127.0.1.1, where no peer finds them: then ask for the address
    # of the default route. A datagram socket sends nothing on connect.
    for target in (address, "192.0.2.1", "2001:db8::1"):
        try:
            family, kind, _, _, where = socket.getaddrinfo(target, port, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(where)
                own = str(probe.getsockname()[0])
        except OSError:
            continue
        if not is_loopback(own):
            return own
    return "127.0.0.1"
