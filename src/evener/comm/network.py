"""Where ranks exchange addresses, and the network devices on which they listen to one another."""

import os
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Final, final

from evener.closing import Closing
from evener.comm.addresses import is_loopback
from evener.comm.c10d import ProcessGroupGloo, Store
from evener.comm.messages import first_line
from evener.comm.wires import Wires
from evener.errors import LaunchError

#: A peer that has announced where it listens answers an attempt to connect within so long.
_PROBE_S: Final = 2.0
_MOST_ATTEMPTS: Final = 64


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

    def meet(self, number: int, numbers: Sequence[int]) -> None:
        """Announce where this rank listens, and wait until all ranks have.

        Args:
            number: This rank's number in the team.
            numbers: Those of all ranks.

        Raises:
            RuntimeError: A rank has not come in time.
        """
        host, port = next(iter(self._wires.listening), ("", 0))  # known on Linux alone
        self.store.set(_place_of(number), f"{host} {port}")
        self.store.wait([_place_of(each) for each in numbers])

    def find_unreached(self, others: Sequence[int]) -> list[int]:
        """Return the ranks that listen, and do not answer there; all are tried at once.

        Ranks that have not announced a place are not tried.
        """
        places: dict[int, tuple[str, int]] = {}
        with suppress(RuntimeError):  # the generation is over, because a member is lost
            for number in others:
                if self.store.check([_place_of(number)]):
                    host, _, port = self.store.get(_place_of(number)).decode().rpartition(" ")
                    if host:
                        places[number] = host, int(port)
        if not places:
            return []
        with ThreadPoolExecutor(min(len(places), _MOST_ATTEMPTS)) as pool:
            are_reached = [*pool.map(_answers, places.values())]
        return [number for number, ok in zip(places, are_reached, strict=True) if not ok]

    def hold(self) -> None:
        """Keep the connection until ``release`` has been called as often."""
        self._num_groups += 1

    def release(self) -> None:
        """End one use of the connection."""
        self._num_groups -= 1
        if not self._num_groups and self._connection is not None:
            self._connection.close()

    def close_in_child(self) -> None:
        """Close a forked child's copies of the sockets; see ``NotInherited``."""
        self._connection = None
        self._wires.close_in_child()


def _place_of(number: int) -> str:
    return f"place of {number}"


def _answers(place: tuple[str, int]) -> bool:
    try:
        socket.create_connection(place, _PROBE_S).close()
    except OSError:
        return False
    return True


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
