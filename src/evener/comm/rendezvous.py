"""The rendezvous of a team's ranks: the store, the roll call, the network device."""

import errno
import os
import re
import secrets
import socket
import threading
import time
from concurrent.futures import Future
from datetime import timedelta
from typing import NamedTuple
from weakref import WeakValueDictionary

from evener.comm.addresses import bind, is_loopback, is_unknown_name, number_behind, numbers_of
from evener.comm.c10d import ProcessGroupGloo, Store, TCPStore
from evener.comm.messages import name_ranks
from evener.comm.wires import Wires, close_server
from evener.errors import LaunchError

_FIRST_PAUSE_S = 0.002
_LONGEST_PAUSE_S = 0.05
_BACKLOG = 512
#: For how long a host tries to reach itself: it answers at once, or the address is another's.
_OWN_HOST_S = 10.0


class MeetingPoint(NamedTuple):
    """Where ranks exchange addresses when they form a group.

    Attributes:
        store: Shared by all ranks; each group uses a prefix of its own.
        server: The server, if this process serves it; kept for as long as a group may need it.
        host: Address and port of the store's server; ``None`` for a store without one.
        host_rank: Number in the team of the rank whose process serves the store; ``None`` for
            none of them.
        devices: Network devices for Gloo.
        wires: The sockets of the devices, and those of the store that were open at the start.
    """

    store: Store
    server: Store | None
    host: tuple[str, int] | None
    host_rank: int | None
    devices: tuple[ProcessGroupGloo.Device, ...]
    wires: Wires

    def leave_behind(self) -> None:
        """Close a forked child's copies of the sockets; see ``NotInherited``."""
        self.wires.leave_behind()
        if self.server is not None and self.host is not None:
            close_server(self.host[1])


def meet(
    rank: int,
    world_size: int,
    address: str,
    port: int,
    *,
    hosts: bool,
    listen_fd: int | None,
    timeout_s: float,
) -> tuple[str, MeetingPoint]:
    """Find the other ranks of a team; all of them call it.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        address: See ``open_store``.
        port: See ``open_store``.
        hosts: See ``open_store``.
        listen_fd: See ``open_store``.
        timeout_s: How long to wait.

    Returns:
        A key, equal on all ranks and of no earlier team, and where they form their groups.

    Raises:
        LaunchError: The port is taken, or a rank cannot be reached or did not come.
    """
    deadline = time.monotonic() + timeout_s
    with Wires.opened() as wires:
        devices = choose_devices(address, port)
        store, server = open_store(
            address, port, hosts=hosts, listen_fd=listen_fd, timeout_s=timeout_s
        )
    left_s = max(1.0, deadline - time.monotonic())
    key, host_rank = call_roll(store, rank, world_size, hosts=hosts, timeout_s=left_s)
    return key, MeetingPoint(
        store=store,
        server=server,
        host=(address, port),
        host_rank=host_rank,
        devices=devices,
        wires=wires,
    )


class _Patience:
    """Growing pauses up to a deadline; short ones, so that Ctrl-C is heard."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._pause_s = _FIRST_PAUSE_S

    @property
    def left_s(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def pause(self) -> bool:
        """Wait a little; ``False`` once the deadline has passed."""
        if self.left_s <= 0:
            return False
        time.sleep(min(self._pause_s, self.left_s))
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        return True


def open_store(
    address: str, port: int, *, hosts: bool, listen_fd: int | None, timeout_s: float
) -> tuple[TCPStore, TCPStore | None]:
    """Connect to the team's store as soon as it is there; on one rank, serve it too.

    Args:
        address: Name or number of the host that serves the store; it is served there alone, see
            ``bind``.
        port: Its port.
        hosts: Whether this process serves it.
        listen_fd: A socket that already listens on ``port``, to serve on; the store closes it. Not
            needed while an earlier team of this process has its store there: that one is used.
        timeout_s: How long to wait for a server elsewhere.

    Returns:
        The store as a client sees it, and the server. They are two, so that a process can end its
        server first: process groups keep the client, and close their connections later.

    Raises:
        LaunchError: The port is taken, the address is unknown, or nobody serves it in time.
    """
    server = _servers.get((address, port)) if hosts else None
    if hosts and server is None:
        server = _servers[address, port] = _serve(address, port, listen_fd, timeout_s)
    patience = _Patience(timeout_s)
    number = _reach(
        address,
        port,
        patience,
        f"nothing listens on {address}:{port} after {timeout_s:.0f} s ({{}}): start rank 0 there, "
        "and check the address, the port and the firewall between the hosts",
    )
    try:
        return _client(number, port, patience.left_s), server
    except (RuntimeError, TimeoutError) as error:
        raise LaunchError(
            f"{address}:{port} takes connections but does not answer as the store of a team "
            f"({first_line(error)}): is another program using the port, or has rank 0 ended?"
        ) from None


#: Stores that this process serves, for as long as a team holds them.
_servers: WeakValueDictionary[tuple[str, int], TCPStore] = WeakValueDictionary()


def _serve(address: str, port: int, listen_fd: int | None, timeout_s: float) -> TCPStore:
    # A socket that is handed down is bound and does not listen yet; a launcher has made it here.
    descriptor = _listen_within_reach(address, port, timeout_s) if listen_fd is None else listen_fd
    with socket.socket(fileno=os.dup(descriptor)) as server:
        own_number = number_behind(address, server.getsockname())
    try:
        return TCPStore(
            own_number,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=descriptor,
            timeout=timedelta(seconds=max(1.0, timeout_s)),
        )
    except RuntimeError as error:
        raise LaunchError(
            f"{address}:{port} takes connections but does not answer as rank 0's store "
            f"({first_line(error)}): is that the address of another host than rank 0's?"
        ) from None


def _listen_within_reach(address: str, port: int, timeout_s: float) -> int:
    """Return a socket that listens on ``port``, where ``address`` leads to this host."""
    with listen(address, port) as listener:
        # A server of torch's is its own first client, and would try for minutes.
        _reach(
            address,
            port,
            _Patience(min(timeout_s, _OWN_HOST_S)),
            f"rank 0 serves the team's store, and does not reach itself at {address}:{port} "
            "({}): give the address of the host that rank 0 runs on (MASTER_ADDR)",
        )
        return listener.detach()


def _client(address: str, port: int, timeout_s: float) -> TCPStore:
    timeout = timedelta(seconds=max(1.0, timeout_s))
    answer: Future[TCPStore] = Future()

    def ask() -> None:
        try:
            answer.set_result(TCPStore(address, port, wait_for_workers=False, timeout=timeout))
        except Exception as error:  # raised where it is waited for
            answer.set_exception(error)

    # A thread, because torch waits without end for a silent server, and ignores Ctrl-C.
    threading.Thread(target=ask, name="evener-store", daemon=True).start()
    try:
        return answer.result(timeout.total_seconds())
    except TimeoutError:
        raise TimeoutError(f"silent for {timeout.total_seconds():.0f} s") from None


def listen(address: str, port: int) -> socket.socket:
    """Return a socket that listens for the clients of the team's store, on this address alone.

    Args:
        address: Where others will look for it; see ``bind``.
        port: 0 takes one that is free.

    Raises:
        LaunchError: The port is in use, or not allowed.
    """
    try:
        return bind(address, port, _BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise LaunchError(
                f"port {port} is in use on {address}, so the team's store cannot listen there: end "
                "the other program (perhaps an earlier run), or choose another port"
            ) from None
        raise LaunchError(
            f"the team's store cannot listen on {address}:{port} ({error.strerror}): rank 0 must "
            "run on the host with that address, and ports below 1024 need root"
        ) from None


def _reach(address: str, port: int, patience: _Patience, failed: str) -> str:
    """Try to connect until it works; return the number that answered.

    Raises:
        LaunchError: The address is unknown, or patience is at its end, which ``failed`` tells: with
            the reason in the place of ``{}``.
    """
    while True:
        try:
            # Also keeps torch from printing a stack trace for each attempt that comes too early.
            attempt_s = max(0.1, min(2.0, patience.left_s))
            with socket.create_connection((address, port), attempt_s) as connection:
                return number_behind(address, connection.getpeername())
        except (OSError, UnicodeError) as error:
            if is_unknown_name(error):
                raise LaunchError(
                    f"the address {address!r} of rank 0 is unknown here: give a name or number "
                    "that this host can resolve (MASTER_ADDR)"
                ) from None
            detail = getattr(error, "strerror", None) or "no answer"
        if not patience.pause():
            raise LaunchError(failed.replace("{}", detail))  # an address may hold braces


def call_roll(
    store: Store, rank: int, world_size: int, *, hosts: bool, timeout_s: float
) -> tuple[str, int | None]:
    """Wait until all ranks are here, and agree on a key that no earlier team has used.

    A store may outlive a team: torchrun keeps one over its restarts, with the keys of workers that
    have died. So nothing found there is believed unless it answers a token made just now.

    Args:
        store: Shared by the ranks, and perhaps by teams before them.
        rank: This rank.
        world_size: Number of ranks.
        hosts: Whether this process serves the store; only rank 0's word counts.
        timeout_s: How long to wait.

    Returns:
        The key, equal on all ranks, and the rank whose process serves the store, if one does.

    Raises:
        LaunchError: A rank did not come, or was started for another world size.
    """
    patience = _Patience(timeout_s)
    try:
        if rank == 0:
            return _call(store, world_size, hosts, patience)
        return _answer(store, rank, world_size, patience)
    except RuntimeError as error:
        raise LaunchError(
            f"rank {rank} lost the store while the team of {world_size} was forming "
            f"({first_line(error)}): rank 0 or its agent has ended, and its output says why"
        ) from None


def _call(
    store: Store, world_size: int, hosts: bool, patience: _Patience
) -> tuple[str, int | None]:
    key = secrets.token_hex(8)
    asked: dict[int, str] = {}
    absent = set(range(1, world_size))
    while True:
        for other in sorted(absent):
            token = _get(store, f"evener/hello/{other}")
            if token and token != asked.get(other):
                asked[other] = token
                store.set(f"evener/roll/{other}", f"{token} {key} {world_size}")
            mine, _, theirs = _get(store, f"evener/here/{other}").partition(" ")
            if mine == key and int(theirs) != world_size:
                raise LaunchError(_unlike_worlds(0, world_size, other, int(theirs)))
            if mine == key:
                absent.discard(other)
        if not absent:
            store.set(f"evener/go/{key}", "rank" if hosts else "agent")
            return key, 0 if hosts else None
        if not patience.pause():
            raise LaunchError(
                f"rank 0 waited {patience.timeout_s:.0f} s for {name_ranks(sorted(absent))} of "
                f"{world_size} to join: start what is missing, or look at its output"
            )


def _answer(
    store: Store, rank: int, world_size: int, patience: _Patience
) -> tuple[str, int | None]:
    token = secrets.token_hex(8)
    store.set(f"evener/hello/{rank}", token)
    key = ""
    while True:
        if not key:
            answer = _get(store, f"evener/roll/{rank}").split()
            if answer and answer[0] == token:
                key = answer[1]
                store.set(f"evener/here/{rank}", f"{key} {world_size}")
                if int(answer[2]) != world_size:
                    raise LaunchError(_unlike_worlds(rank, world_size, 0, int(answer[2])))
        elif served_by := _get(store, f"evener/go/{key}"):
            return key, 0 if served_by == "rank" else None
        if not patience.pause():
            twice = f"rank 0 to call the roll: was another process started as rank {rank}, too?"
            whom = "some rank to join (rank 0 says which)" if key else twice
            waited = f"waited {patience.timeout_s:.0f} s for {whom}"
            raise LaunchError(f"rank {rank} of {world_size} {waited}")


def _unlike_worlds(rank: int, world_size: int, other: int, theirs: int) -> str:
    return (
        f"rank {rank} was started for {world_size} ranks and rank {other} for {theirs}: give all "
        "the same world size (WORLD_SIZE)"
    )


def _get(store: Store, key: str) -> str:
    # check() first: get() would wait for the key, and ignore Ctrl-C.
    return store.get(key).decode() if store.check([key]) else ""


def choose_devices(address: str, port: int) -> tuple[ProcessGroupGloo.Device, ...]:
    """Return the network devices on which this rank listens to its peers.

    As ``devices_at``, with loopback where rank 0 is on a loopback address, else the address from
    which this host reaches rank 0.
    """
    host = numbers_of(address)[0] if is_loopback(address) else own_address(address, port)
    return devices_at(host)


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


def first_line(error: BaseException) -> str:
    """Return the part of a message from torch that says what happened, without paths and stack."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    text = lines[0].partition(". This is typically")[0]
    return re.sub(r"^\[[^]]*/[^]]*\] ", "", text).strip()
