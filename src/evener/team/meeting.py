"""How the launchers of several machines meet, before any rank starts, and number the ranks.

The launcher of node 0 listens. The others connect, say who they are, and learn which ranks are
theirs, and on which port rank 0 opens the team's store. Messages are of limited length. As with
torch's own store, nothing authenticates them: use a private network.

The launchers keep their connections while ranks run, and node 0 passes on what each says. It keeps
listening, too: a launcher that comes then is refused. A connection that breaks does not end the
ranks, which have connections of their own, but explains why they lose one another.
"""

import errno
import secrets
import socket
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from multiprocessing.connection import wait

from evener.closing import Closing
from evener.comm.addresses import (
    bind,
    end_when_unreachable,
    is_unknown_name,
    listens_everywhere,
)
from evener.errors import ConfigError, LaunchError
from evener.parsing import Fields
from evener.team.address import check_port, parse_address
from evener.team.channel import Channel, Message
from evener.team.supervisor import MAX_NPROC, LocalRanks
from evener.team.terminal import printable, say
from evener.version import __version__

# ── what the user says ───────────────────────────────────────────────────────────────────────────

#: Where nodes meet unless the user says otherwise; torchrun's default, too.
DEFAULT_PORT = 29_500
#: Seconds that nodes wait for one another unless the user says otherwise.
DEFAULT_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """What the user said about machines; without ``nnodes`` the run is on this one alone.

    Attributes:
        nnodes: Number of machines.
        node_rank: Number of this one, from 0.
        master_addr: Host of node 0, or ``HOST:PORT``.
        port: Where machines meet; for a run on this one alone, port of the store.
    """

    nnodes: int | None = None
    node_rank: int | None = None
    master_addr: str | None = None
    port: int | None = None

    @property
    def given(self) -> Mapping[str, object]:
        """The options that the user gave, by their names on the command line."""
        named = {
            "--nnodes": self.nnodes,
            "--node-rank": self.node_rank,
            "--master-addr": self.master_addr,
        }
        return {name: value for name, value in named.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """This machine among those of a run.

    Attributes:
        number: Its number, from 0.
        nnodes: How many there are, 2 or more.
        host: Name or number of node 0.
        port: Where node 0 listens.
        timeout_s: Longest wait for the others.
    """

    number: int
    nnodes: int
    host: str
    port: int
    timeout_s: float

    @property
    def where(self) -> str:
        """The meeting point in words."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def choose_node(options: NodeOptions, timeout_s: float) -> Node | None:
    """Return this machine's place among several; ``None`` where the run is on this one alone.

    Args:
        options: What the user said about machines.
        timeout_s: Longest wait for the others.

    Raises:
        ConfigError: An option is missing, impossible, or does not fit the others.
    """
    nnodes = options.nnodes
    if nnodes is None:
        if options.given:
            name, value = next(iter(options.given.items()))
            raise ConfigError(
                f"{name} is {value}, but --nnodes is missing; give the number of machines, or "
                f"leave {name} out to run on this one alone"
            )
        return None
    if nnodes < 1:
        raise ConfigError(f"--nnodes is {nnodes}; give the number of machines, 1 or more")
    number = options.node_rank
    if nnodes > 1 and (number is None or options.master_addr is None):
        missing = "--node-rank" if number is None else "--master-addr"
        raise ConfigError(
            f"--nnodes is {nnodes}, but {missing} is missing; give each machine its number "
            f"(--node-rank 0 to {nnodes - 1}) and all of them the address of node 0 "
            "(--master-addr)"
        )
    if number is not None and not 0 <= number < nnodes:
        raise ConfigError(
            f"--node-rank is {number}, but --nnodes is {nnodes}; machines are numbered from 0 to "
            f"{nnodes - 1}"
        )
    if nnodes == 1:
        return None
    assert number is not None
    assert options.master_addr is not None
    host, chosen = _split_address(options.master_addr, options.port)
    return Node(number=number, nnodes=nnodes, host=host, port=chosen, timeout_s=timeout_s)


def _split_address(address: str, port: int | None) -> tuple[str, int]:
    """Host and port of node 0, of which the port may be given in either place or in neither."""
    host, own = parse_address(address, "--master-addr")
    if own is not None and port is not None and own != port:
        raise ConfigError(
            f"--master-addr is {address!r}, but --port is {port}; name one port, the same on "
            "every machine"
        )
    return host, check_port(own or port or DEFAULT_PORT, "--port")


# ── how launchers meet ───────────────────────────────────────────────────────────────────────────

_LONGEST_MESSAGE_BYTES = 4096
_LARGEST_NUMBER = 10**6
_BACKLOG = 512
# Connections that have not said yet who they are. A launcher speaks as soon as it has connected, so
# the oldest of them can be closed for a new one: it was none, or comes again.
_MOST_STRANGERS = 32
_MOST_REFUSALS = 8  # are printed; what is printed for each attempt would fill a disk
_SILENCE_S = 10.0
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0
_CONNECT_S = 5.0
# A machine that has not answered for so long is taken for gone; the ranks have longer timeouts.
_UNREACHABLE_S = 10.0
_FAREWELL = {"leaving": True}


class Peers(Closing):
    """The launchers that this one is connected to: all others on node 0, node 0 elsewhere.

    Args:
        names: What people know each by.
        door: On node 0, refuses launchers that come now.
    """

    def __init__(
        self, names: Mapping[Channel, str] | None = None, door: "_Host | None" = None
    ) -> None:
        self._names = dict(names or {})
        self._door = door
        self._lost: list[str] = []

    def filenos(self) -> list[int]:
        """Return the descriptors to wait on."""
        visitors = self._door.filenos() if self._door is not None else []
        return [*(one.fileno() for one in self._names if not one.has_ended), *visitors]

    def tell(self, message: Message) -> None:
        """Tell the other launchers, as far as they can be reached."""
        for channel in self._names:
            channel.tell(message)

    def hear(self) -> list[Message]:
        """Return the messages received since the last call, and forward each of them."""
        if self._door is not None:
            self._door.look()
        heard = []
        for source, name in [*self._names.items()]:
            messages = source.receive()
            heard += [(source, message) for message in messages if message != _FAREWELL]
            if source.has_ended or _FAREWELL in messages:
                del self._names[source]
                source.close()
                if _FAREWELL not in messages:
                    self._lost.append(name)
        for source, message in heard:
            for channel in self._names:
                if channel is not source:
                    channel.tell(message)
        return [message for _, message in heard]

    def take_lost(self) -> list[str]:
        """Return the names of those whose connection broke off since the last call."""
        lost, self._lost = self._lost, []
        return lost

    def close(self) -> None:
        """Take leave of the others, and close the connections."""
        self.tell(_FAREWELL)
        for channel in self._names:
            channel.close()
        if self._door is not None:
            self._door.close()


def meet(
    node: Node, nproc: int, *, store_waits: bool
) -> tuple[LocalRanks, socket.socket | None, Peers]:
    """Wait for the launchers of all nodes, and learns which ranks are this one's.

    Call it before any rank starts; Ctrl-C ends it.

    Args:
        node: This machine.
        nproc: Ranks that it will start.
        store_waits: Whether the store's socket shall listen already; see ``launch``.

    Returns:
        The ranks of this node; on node 0 the socket on which rank 0 opens the store, on a port of
        its own; and the connections to other launchers.

    Raises:
        LaunchError: A node did not come or was started otherwise, node 0 cannot be reached, or its
            port is in use.
    """
    if node.number > 0:
        ranks, channel = _join(node, nproc)
        return ranks, None, Peers({channel: f"node 0 ({node.host})"})
    listener = _listen(node, node.port, _BACKLOG)
    if listens_everywhere(listener):
        say(
            f"evener: {node.host} is not the address of a network interface of this machine, so "
            "node 0 listens on all of them"
        )
    with ExitStack() as unless_met:
        unless_met.enter_context(closing(listener))
        # A torch script opens the port itself, and can do so only where nobody listens.
        store = unless_met.enter_context(_listen(node, 0, _BACKLOG if store_waits else 0))
        ranks, peers = _Host(node, nproc, listener).gather(store.getsockname()[1])
        unless_met.pop_all()
    return ranks, store, peers


def _open(connection: socket.socket) -> Channel:
    connection.setblocking(False)
    end_when_unreachable(connection, _UNREACHABLE_S)
    return Channel(connection, _LONGEST_MESSAGE_BYTES)


def check_hello(node: Node, hello: Message, known: Mapping[int, int]) -> str:
    """Return what is wrong with a launcher that has come; empty if nothing is.

    Args:
        node: Node 0.
        hello: What the launcher says of itself.
        known: Ranks of the nodes that are here already.

    Raises:
        ValueError: No launcher says such a thing.
    """
    fields = Fields(hello)
    version = printable(fields.text("evener"))[:64]
    number, nnodes, nproc = (
        fields.whole(name, least=-_LARGEST_NUMBER, most=_LARGEST_NUMBER)
        for name in ("node", "nnodes", "nproc")
    )
    if version != __version__:
        return (
            f"node 0 runs evener {__version__}, node {number} runs {version}; install the same "
            "version on every machine"
        )
    if nnodes != node.nnodes:
        return (
            f"node 0 was started with --nnodes {node.nnodes}, node {number} with --nnodes "
            f"{nnodes}; give every machine the same number"
        )
    if not 0 <= number < nnodes or not 1 <= nproc <= MAX_NPROC:
        return f"node {number} of {nnodes} with {nproc} ranks is impossible"
    if number in known:
        return (
            f"two machines were started with --node-rank {number}; number them from 0 to "
            f"{nnodes - 1}, each differently"
        )
    return ""


# ── node 0 ───────────────────────────────────────────────────────────────────────────────────────


def _listen(node: Node, port: int, backlog: int) -> socket.socket:
    try:
        return bind(node.host, port, backlog)
    except OSError as error:
        raise LaunchError(
            f"node 0 cannot listen on port {node.port} ({error.strerror}): end the program that "
            "uses it (perhaps an earlier run), or give every machine another with --port; "
            "--master-addr must be an address of node 0"
        ) from None


class _Host:
    """Node 0 while it waits for the others, and while it refuses those that come later.

    Whoever reaches the port can connect, so no connection ends the wait: a launcher that does not
    fit is told why and ends, and node 0 prints the same and keeps waiting.
    """

    def __init__(self, node: Node, nproc: int, listener: socket.socket) -> None:
        self._node = node
        self._nproc = nproc
        self._listener = listener
        self._token = secrets.token_hex(8)
        self._is_reached = False  # by itself, under the address that all are given
        self._strangers: list[Channel] = []  # oldest first
        self._nodes: dict[Channel, Message] = {}
        self._refusals: list[str] = []

    def gather(self, port: int) -> tuple[LocalRanks, Peers]:
        """Wait until all are here, and tell each which ranks are its own.

        Args:
            port: Where rank 0 opens the store.
        """
        self._listener.setblocking(False)
        try:
            with closing(self._call_oneself()):
                self._wait()
        except BaseException as error:
            for channel in self._nodes:
                if isinstance(error, LaunchError):
                    channel.tell({"error": str(error)})
                channel.close()
            self.close()
            raise
        counts = self._counts
        world_size = sum(counts.values())
        names, host = {}, self._node.host
        for channel, hello in self._nodes.items():
            first = sum(count for number, count in counts.items() if number < hello["node"])
            names[channel] = f"node {hello['node']}"
            with suppress(OSError):  # it has just gone
                names[channel] += f" ({channel.peer[0]})"
                if listens_everywhere(self._listener):
                    # A service or a forwarded address may lead to the port of the meeting alone.
                    host = channel.own[0]
            place = {"world_size": world_size, "host": host, "port": port}
            channel.tell({"first_rank": first, **place})
        own = LocalRanks(count=self._nproc, world_size=world_size, host=host, port=port)
        return own, Peers(names, self)

    def filenos(self) -> list[int]:
        """Return the descriptors on which visitors come and speak."""
        return [self._listener.fileno(), *(one.fileno() for one in self._strangers)]

    def look(self) -> None:
        """Take in who has come and what they say, without waiting."""
        self._welcome()
        for stranger in [*self._strangers]:
            self._hear(stranger)

    def close(self) -> None:
        """Stop listening; connected nodes keep their connections."""
        self._listener.close()
        for stranger in self._strangers:
            stranger.close()

    @property
    def _counts(self) -> dict[int, int]:
        return {0: self._nproc, **{one["node"]: one["nproc"] for one in self._nodes.values()}}

    def _call_oneself(self) -> Channel:
        # Rank 0 is going to meet its own store under this address: a wrong one is noticed here.
        try:
            address = (self._node.host, self._node.port)
            own = Channel(socket.create_connection(address, _CONNECT_S))
        except (OSError, UnicodeError) as error:
            why = getattr(error, "strerror", None) or "no answer"
            raise LaunchError(self._is_no_address(why)) from None
        own.tell({"token": self._token})
        return own

    def _is_no_address(self, why: str) -> str:
        return (
            f"node 0 does not reach itself at {self._node.where} ({why}): --master-addr must be an "
            "address of node 0 that every machine can reach (`ip address` lists them)"
        )

    def _wait(self) -> None:
        started = time.monotonic()
        said = False
        while not self._is_reached or len(self._nodes) < self._node.nnodes - 1:
            waited_s = time.monotonic() - started
            if waited_s >= self._node.timeout_s:
                refused = f"; refused: {self._refusals[-1]}" if self._refusals else ""
                raise LaunchError(
                    f"node 0 waited {self._node.timeout_s:.0f} s at {self._node.where} for "
                    f"{self._missing}: start the same command there with its --node-rank, or look "
                    f"at its output{refused}"
                )
            if waited_s > 1.0 and not said:
                said = True
                say(f"evener: node 0 waits at {self._node.where} for {self._missing}")
            left_s = min(_LONGEST_PAUSE_S, self._node.timeout_s - waited_s)
            ready = wait([*self.filenos(), *(node.fileno() for node in self._nodes)], left_s)
            # Nothing more on its way: this process may merely have been held up for so long.
            if not ready and not self._is_reached and waited_s > _CONNECT_S:
                raise LaunchError(self._is_no_address("another machine has this address"))
            self._drop_those_that_went()
            self.look()

    @property
    def _missing(self) -> str:
        """The nodes that are not here, in words; empty once the team has met."""
        absent = [str(n) for n in range(self._node.nnodes) if n not in self._counts]
        if not absent:
            return ""
        return f"node{'s' if len(absent) > 1 else ''} {', '.join(absent)} of {self._node.nnodes}"

    def _welcome(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._make_room()
            return  # else it has gone again
        self._strangers.append(_open(connection))
        # At once: what has said who it is can no longer be taken for the oldest stranger.
        self._hear(self._strangers[-1])
        if len(self._strangers) > _MOST_STRANGERS:
            self._make_room()

    def _make_room(self) -> None:
        """Drop the stranger that has been silent for longest."""
        if self._strangers:
            self._strangers.pop(0).close()
        else:  # all descriptors are in use elsewhere; wait would return at once
            time.sleep(_FIRST_PAUSE_S)

    def _hear(self, stranger: Channel) -> None:
        messages = stranger.receive()
        if not messages and not stranger.has_ended:
            return
        self._strangers.remove(stranger)
        hello = messages[0] if messages else {}
        self._is_reached |= hello.get("token") == self._token
        if self._admits(stranger, hello) and not stranger.has_ended:
            self._nodes[stranger] = hello
            stranger.tell({"waiting": True})
        else:
            stranger.close()

    def _admits(self, stranger: Channel, hello: Message) -> bool:
        """Return whether a launcher fits; one that does not is told why."""
        if self._missing:
            # One that went and comes again may be heard before the end of its first connection is.
            self._drop_those_that_went()
        try:
            wrong = check_hello(self._node, hello, self._counts)
        except ValueError:
            return False
        if wrong:
            with suppress(OSError):
                wrong = f"{wrong} (from {stranger.peer[0]})"
            stranger.tell({"error": wrong})
            if wrong not in self._refusals and len(self._refusals) < _MOST_REFUSALS:
                self._refusals.append(wrong)
                absent = self._missing
                then = f"still waiting for {absent}" if absent else "the run continues without it"
                say(f"evener: refused a launcher: {wrong}; {then}")
        return not wrong

    def _drop_those_that_went(self) -> None:
        """Drop launchers that ended before all were here, or that are none and say more."""
        for channel in [*self._nodes]:
            if channel.receive() or channel.has_ended:
                del self._nodes[channel]
                channel.close()


# ── the other nodes ──────────────────────────────────────────────────────────────────────────────


def _join(node: Node, nproc: int) -> tuple[LocalRanks, Channel]:
    deadline = time.monotonic() + node.timeout_s
    pause_s, said = _FIRST_PAUSE_S, False
    closed_at: float | None = None
    while True:
        left_s = deadline - time.monotonic()
        try:
            address = (node.host, node.port)
            with ExitStack() as unless_met:
                connection = socket.create_connection(address, max(0.1, min(_CONNECT_S, left_s)))
                channel = unless_met.enter_context(closing(_open(connection)))
                ranks = _ask(node, nproc, channel, deadline)
                if ranks is not None:
                    unless_met.pop_all()
                    return ranks, channel
            # Node 0 does that to the oldest of many connections which have not said who they are.
            closed_at = closed_at or time.monotonic()
            if time.monotonic() - closed_at >= min(_SILENCE_S, node.timeout_s):
                raise LaunchError(_is_no_answer(node, "closed the connection"))
            why = "it closed the connection"
        except (OSError, UnicodeError) as error:
            if is_unknown_name(error):
                raise LaunchError(
                    f"the address {node.host!r} of node 0 is unknown here: give a name or number "
                    "that this machine can resolve (--master-addr)"
                ) from None
            why = getattr(error, "strerror", None) or "no answer"
        if time.monotonic() >= deadline:
            raise LaunchError(
                f"node {node.number} waited {node.timeout_s:.0f} s for node 0, but nothing listens "
                f"on {node.where} ({why}): start node 0 there, and check the address, the port and "
                "the firewall between the machines"
            )
        if pause_s > 0.5 and not said:
            said = True
            say(f"evener: node {node.number} waits for node 0 at {node.where} ({why})")
        time.sleep(min(pause_s, max(0.0, deadline - time.monotonic())))
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _ask(node: Node, nproc: int, channel: Channel, deadline: float) -> LocalRanks | None:
    """Say who this node is, and wait for its ranks; ``None`` if it ends before any answer.

    Raises:
        LaunchError: Node 0 refused it, did not answer in time, or is something else.
    """
    channel.tell(
        {"evener": __version__, "node": node.number, "nnodes": node.nnodes, "nproc": nproc}
    )
    try:
        answer = _first_answer(node, channel, deadline)
        if answer is None:
            return None
        if answer.get("waiting") is True:
            answer = channel.next(deadline)
    except TimeoutError:
        raise LaunchError(
            f"node {node.number} waited {node.timeout_s:.0f} s at {node.where} for node 0 to name "
            "its ranks: another node is missing (node 0 says which), or what listens there is "
            "something else"
        ) from None
    if answer is None:
        raise LaunchError(_is_no_answer(node, "closed the connection"))
    if isinstance(answer.get("error"), str):
        raise LaunchError(printable(answer["error"]))
    try:
        fields = Fields(answer)
        first, world_size, port = map(fields.whole, ("first_rank", "world_size", "port"))
        host = fields.text("host")
    except ValueError:
        raise LaunchError(_is_no_answer(node, "answered something else")) from None
    return LocalRanks(first=first, count=nproc, world_size=world_size, host=host, port=port)


def _is_no_answer(node: Node, what: str) -> str:
    return (
        f"{node.where} {what} when node {node.number} asked for its ranks: node 0 has ended "
        f"(its output says why), its team is complete already (is --node-rank {node.number} "
        "started twice?), or another program uses that port"
    )


def _first_answer(node: Node, channel: Channel, deadline: float) -> Message | None:
    """Return node 0's first answer; if it does not come at once, print what is waited for."""
    try:
        return channel.next(min(deadline, time.monotonic() + _SILENCE_S))
    except TimeoutError:
        if time.monotonic() >= deadline:
            raise
        host, port = channel.peer
        say(
            f"evener: {host} port {port} accepted the connection of node {node.number} "
            f"{_SILENCE_S:.0f} s ago and has not answered; waiting for it until "
            f"{node.timeout_s:.0f} s are over. Is that node 0 of this run, or another program?"
        )
        return channel.next(deadline)
