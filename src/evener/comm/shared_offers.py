"""Offers of the ranks of one host, from which a communicator over shared memory is formed."""

import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, final

from evener.comm.base import Communicator
from evener.comm.shared_barrier import ControlPage
from evener.comm.shared_links import LinkListener, Links
from evener.comm.shared_memory import SharedMemory

_FORM_S = 30.0  # the longest that connecting on one host may take, however busy it is
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")


@dataclass(frozen=True, slots=True)
class Spot:
    """Where a rank runs, and how others can map its memory.

    Attributes:
        rank: Its number in the team.
        host: Name of its host, for messages.
        kernel: Names the running system: hosts and virtual machines have one each.
        network: Names its network namespace, in which Unix sockets are found; containers have
            their own.
        user: Id of its user.
        cores: Processors that it may use.
        listener: Name of its socket.
        token: A rank that connects must send it.
        obstacle: Why it cannot share memory; empty if it can.
    """

    rank: int
    host: str
    kernel: str = ""
    network: int = 0
    user: int = 0
    cores: tuple[int, ...] = ()
    listener: str = ""
    token: str = ""
    obstacle: str = ""


class Joined(NamedTuple):
    """The resources of a rank after all have connected.

    Attributes:
        pages: The page of each rank, by rank.
        links: To the others.
        memory: The memory of its tensors.
        spins: Whether there is a core for each rank.
    """

    pages: list[ControlPage]
    links: Links
    memory: SharedMemory
    spins: bool


@final
class MemoryOffer:
    """What a rank offers: a listener, a control page and memory."""

    def __init__(self, comm: Communicator, memory: SharedMemory | None) -> None:
        self._listener: LinkListener | None = None
        self._page = -1
        self._memory = memory
        self._brings_memory = memory is None
        spot = Spot(comm.number, platform.node())
        try:
            self.spot = self._prepare(spot)
        except (OSError, AttributeError) as error:  # an old C library has no memfd_create
            self.spot = replace(spot, obstacle=f"{type(error).__name__}: {error}")

    def _prepare(self, spot: Spot) -> Spot:
        if sys.platform != "linux":
            return replace(spot, obstacle=f"{sys.platform} has no memory files without a name")
        self._page = ControlPage.create()
        self._memory = self._memory or SharedMemory(spot.rank)
        self._listener = LinkListener()
        return replace(
            spot,
            kernel=_kernel(),
            network=_network(),
            user=os.getuid(),
            cores=tuple(os.sched_getaffinity(0)),
            listener=self._listener.name,
            token=self._listener.token,
        )

    def form(self, comm: Communicator, spots: Sequence[Spot]) -> Joined:
        """Connect to all other ranks; all ranks call it together.

        Raises:
            OSError: It has failed on this rank; received descriptors are closed.
        """
        if self._listener is None or self._memory is None:
            raise OSError("this rank has nothing to share")
        listeners = [(spot.listener, spot.token) for spot in spots]
        own = (self._page, self._memory.descriptor)
        arrivals = self._listener.connect_all(
            comm.rank, listeners, own, min(comm.timeout_s, _FORM_S)
        )
        pages = []
        try:
            for rank, number in enumerate(comm.numbers):
                if rank == comm.rank:
                    pages.append(ControlPage(self._page))
                    continue
                received = arrivals[rank].descriptors
                self._memory.meet(number, received.pop())
                pages.append(ControlPage(received[0]))
                os.close(received.pop())
        except BaseException:
            for arrival in arrivals.values():
                arrival.drop()
            raise
        cores = {core for spot in spots for core in spot.cores}
        connections = {rank: arrival.connection for rank, arrival in arrivals.items()}
        links = Links(connections, comm.world_size)
        return Joined(pages, links, self._memory, len(cores) >= comm.world_size)

    def close(self) -> None:
        """Release resources that only the formation needs."""
        if self._listener is not None:
            self._listener.close()
        if self._page >= 0:
            os.close(self._page)
        if self._brings_memory and self._memory is not None:
            self._memory.release()


def place_of_this_process() -> str:
    """Return a text that is the same for processes that may be able to share memory."""
    if sys.platform != "linux":
        return platform.node()
    return f"{_kernel()} {_network()} {os.getuid()}"


def _kernel() -> str:
    return _BOOT_ID.read_text().strip()


def _network() -> int:
    return _NETWORK.stat().st_ino


def find_obstacle(spots: Sequence[Spot]) -> str:
    """Return why these ranks cannot share memory; empty if they can."""
    for spot in spots:
        if spot.obstacle:
            return f"rank {spot.rank} cannot share memory ({spot.obstacle})"
    first = spots[0]
    for spot in spots:
        both = f"rank {first.rank} runs {{}} and rank {spot.rank} {{}}"
        if spot.kernel != first.kernel:
            return both.format(f"on host {first.host}", f"on {spot.host}")
        if spot.network != first.network:
            return both.format("in one network namespace", "in another (containers?)")
        if spot.user != first.user:
            return both.format(f"as user {first.user}", f"as user {spot.user}")
    return ""
