"""How the launchers of several machines meet, before any rank starts, and number the ranks.

The launcher of node 0 listens where the team's store will be. The others connect, say who they are,
and learn which ranks are theirs; then the listening socket is handed on to rank 0. Messages are
lines of JSON of limited length. As with torch's own store, nothing authenticates them: use a
private network.
"""

import errno
import json
import secrets
import selectors
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from evener.comm.addresses import bind, is_unknown_name, listens_everywhere
from evener.errors import LaunchError
from evener.team.nodes import Node
from evener.team.peers import Peers
from evener.team.ranks import MAX_NPROC, LocalRanks
from evener.team.terminal import say
from evener.version import __version__

_LONGEST_LINE_BYTES = 4096
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


def meet(
    node: Node, nproc: int, *, store_waits: bool
) -> tuple[LocalRanks, socket.socket | None, Peers]:
    """Waits for the launchers of all nodes, and learns which ranks are this one's.

    Call it before any rank starts; Ctrl-C ends it.

    Args:
        node: This machine.
        nproc: Ranks that it will start.
        store_waits: Whether the socket shall go on listening; see ``launch``.

    Returns:
        The ranks of this node; on node 0 the socket on which rank 0 opens the store; and the
        connections to other launchers.

    Raises:
        LaunchError: A node did not come or was started otherwise, node 0 cannot be reached, or its
            port is in use.
    """
    if node.number > 0:
        ranks, connection = _join(node, nproc)
        return ranks, None, Peers([connection])
    listener = _listen(node, listen=True)
    if listens_everywhere(listener):
        say(
            f"evener: {node.host} is not the address of a network interface of this machine, so "
            "node 0 listens on all of them"
        )
    try:
        ranks, peers = _Host(node, nproc, listener).gather()
        if not store_waits:  # a torch script opens the port itself
            listener.close()
            listener = _listen(node, listen=False)
    except BaseException:
        listener.close()
        raise
    listener.setblocking(True)
    return ranks, listener, peers


def number_ranks(node: Node, counts: Mapping[int, int]) -> list[LocalRanks]:
    """Numbers the ranks of all nodes, node after node.

    Args:
        node: Any of them.
        counts: Ranks of each.
    """
    world_size, first, places = sum(counts.values()), 0, []
    for number in range(node.nnodes):
        places.append(
            LocalRanks(
                first=first,
                count=counts[number],
                world_size=world_size,
                host=node.host,
                port=node.port,
            )
        )
        first += counts[number]
    return places


# ── messages ─────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _Hello:
    """What a launcher says of itself."""

    version: str
    node: int
    nnodes: int
    nproc: int


def _encode(**values: object) -> bytes:
    return json.dumps(values).encode() + b"\n"


def _decode(line: bytes) -> dict[str, Any] | None:
    """Return a message; ``None`` for what none of our launchers has sent."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):  # lists in lists in lists exhaust the parser's stack
        return None
    return message if isinstance(message, dict) else None


def _parse_hello(message: Mapping[str, Any]) -> _Hello | None:
    numbers = [message.get(name) for name in ("node", "nnodes", "nproc")]
    version = message.get("evener")
    if not isinstance(version, str):
        return None
    if not all(type(n) is int and abs(n) <= _LARGEST_NUMBER for n in numbers):
        return None
    return _Hello(_printable(version)[:64], *numbers)  # type: ignore[arg-type]


def _printable(text: str) -> str:
    """Return text without what would steer a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def check_hello(node: Node, hello: _Hello, known: Mapping[int, int]) -> str:
    """What is wrong with a launcher that has come; empty if nothing is.

    Args:
        node: Node 0.
        hello: What the launcher says of itself.
        known: Ranks of the nodes that are here already.
    """
    if hello.version != __version__:
        return (
            f"node 0 runs evener {__version__}, node {hello.node} runs {hello.version}; install "
            "the same version on every machine"
        )
    if hello.nnodes != node.nnodes:
        return (
            f"node 0 was started with --nnodes {node.nnodes}, node {hello.node} with --nnodes "
            f"{hello.nnodes}; give every machine the same number"
        )
    if not 0 <= hello.node < node.nnodes or not 1 <= hello.nproc <= MAX_NPROC:
        return f"node {hello.node} of {node.nnodes} with {hello.nproc} ranks is impossible"
    if hello.node in known:
        return (
            f"two machines were started with --node-rank {hello.node}; number them from 0 to "
            f"{node.nnodes - 1}, each differently"
        )
    return ""


# ── node 0 ───────────────────────────────────────────────────────────────────────────────────────


def _listen(node: Node, *, listen: bool) -> socket.socket:
    try:
        listener = bind(node.host, node.port)
        try:
            if listen:
                listener.listen(_BACKLOG)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise LaunchError(
            f"node 0 cannot listen on port {node.port} ({error.strerror}): end the program that "
            "uses it (perhaps an earlier run), or give every machine another with --port; "
            "--master-addr must be an address of node 0"
        ) from None
    return listener


@dataclass(slots=True)
class _Host:
    """Node 0 while it waits for the others.

    Whoever reaches the port can connect, so no connection ends the wait: a launcher that does not
    fit is told why and ends, and node 0 prints the same and keeps waiting.
    """

    node: Node
    nproc: int
    listener: socket.socket
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    _strangers: dict[socket.socket, bytearray] = field(default_factory=dict)
    _nodes: dict[socket.socket, _Hello] = field(default_factory=dict)
    _refusals: list[str] = field(default_factory=list)
    _is_reached: bool = False

    def gather(self) -> tuple[LocalRanks, Peers]:
        """Waits until all are here, and tells each which ranks are its own."""
        token = secrets.token_hex(8)
        self.listener.setblocking(False)
        self._selector.register(self.listener, selectors.EVENT_READ)
        try:
            with self._call_oneself(token):
                self._wait(token)
            places = number_ranks(self.node, self._counts)
            for connection, hello in self._nodes.items():
                place = places[hello.node]
                self._tell(connection, first_rank=place.first, world_size=place.world_size)
            peers = Peers([*self._nodes])
            self._nodes.clear()  # they stay open
            return places[0], peers
        except LaunchError as error:
            for connection in self._nodes:
                self._tell(connection, error=str(error))
            raise
        finally:
            for connection in [*self._strangers, *self._nodes]:
                self._drop(connection)
            self._selector.close()

    @property
    def _counts(self) -> dict[int, int]:
        return {0: self.nproc, **{hello.node: hello.nproc for hello in self._nodes.values()}}

    def _call_oneself(self, token: str) -> socket.socket:
        # Rank 0 is going to meet its own store under this address: a wrong one is noticed here.
        try:
            own = socket.create_connection((self.node.host, self.node.port), _CONNECT_S)
        except (OSError, UnicodeError) as error:
            why = getattr(error, "strerror", None) or "no answer"
            raise LaunchError(self._is_no_address(why)) from None
        own.sendall(_encode(token=token))
        return own

    def _is_no_address(self, why: str) -> str:
        return (
            f"node 0 does not reach itself at {self.node.where} ({why}): --master-addr must be an "
            "address of node 0 that every machine can reach (`ip address` lists them)"
        )

    def _wait(self, token: str) -> None:
        started = time.monotonic()
        said = False
        while not self._is_reached or len(self._nodes) < self.node.nnodes - 1:
            waited_s = time.monotonic() - started
            if waited_s >= self.node.timeout_s:
                refused = f"; refused: {self._refusals[-1]}" if self._refusals else ""
                raise LaunchError(
                    f"node 0 waited {self.node.timeout_s:.0f} s at {self.node.where} for "
                    f"{self._missing}: start the same command there with its --node-rank, or look "
                    f"at its output{refused}"
                )
            if waited_s > 1.0 and not said:
                said = True
                say(f"evener: node 0 waits at {self.node.where} for {self._missing}")
            left_s = min(_LONGEST_PAUSE_S, self.node.timeout_s - waited_s)
            ready = self._selector.select(left_s)
            # Nothing more on its way: this process may merely have been held up for so long.
            if not ready and not self._is_reached and waited_s > _CONNECT_S:
                raise LaunchError(self._is_no_address("another machine has this address"))
            for key, _ in ready:
                if key.fileobj is self.listener:
                    self._welcome(token)
                elif key.fileobj in self._nodes:
                    self._drop(key.fileobj)  # it ended before all were here, or is none of ours
                elif key.fileobj in self._strangers:
                    self._read(key.fileobj, token)

    @property
    def _missing(self) -> str:
        absent = [str(n) for n in range(self.node.nnodes) if n not in self._counts]
        return f"node{'s' if len(absent) > 1 else ''} {', '.join(absent)} of {self.node.nnodes}"

    def _welcome(self, token: str) -> None:
        try:
            connection, _ = self.listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._make_room()
            return  # else it has gone again
        connection.setblocking(False)
        self._strangers[connection] = bytearray()
        self._selector.register(connection, selectors.EVENT_READ)
        # At once: what has said who it is can no longer be taken for the oldest stranger.
        self._read(connection, token)
        if len(self._strangers) > _MOST_STRANGERS:
            self._make_room()

    def _make_room(self) -> None:
        """Drops the stranger that has been silent for longest."""
        if self._strangers:
            self._drop(next(iter(self._strangers)))
        else:  # all descriptors are in use elsewhere; select would return at once
            time.sleep(_FIRST_PAUSE_S)

    def _read(self, connection: socket.socket, token: str) -> None:
        try:
            chunk = connection.recv(_LONGEST_LINE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        line = self._strangers[connection]
        line += chunk
        if not chunk or len(line) > _LONGEST_LINE_BYTES:
            self._drop(connection)
            return
        if not line.endswith(b"\n"):
            return
        message = _decode(bytes(line)) or {}
        hello = _parse_hello(message)
        if message.get("token") == token:
            self._is_reached = True
            self._drop(connection)
        elif hello is None:
            self._drop(connection)
        else:
            self._answer(connection, hello)

    def _answer(self, connection: socket.socket, hello: _Hello) -> None:
        # One that went and comes again may be heard before the end of its first connection is.
        for known in [known for known in self._nodes if _has_stirred(known)]:
            self._drop(known)
        if wrong := check_hello(self.node, hello, self._counts):
            self._refuse(connection, wrong)
        else:
            del self._strangers[connection]
            self._nodes[connection] = hello
            self._tell(connection, waiting=True)

    def _refuse(self, connection: socket.socket, wrong: str) -> None:
        with suppress(OSError):
            wrong = f"{wrong} (from {connection.getpeername()[0]})"
        self._tell(connection, error=wrong)
        self._drop(connection)
        if wrong not in self._refusals and len(self._refusals) < _MOST_REFUSALS:
            self._refusals.append(wrong)
            say(f"evener: refused a launcher: {wrong}; still waiting for {self._missing}")

    def _tell(self, connection: socket.socket, **values: object) -> None:
        with suppress(OSError):  # it is missed where its ranks should be
            connection.sendall(_encode(**values))

    def _drop(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        self._nodes.pop(connection, None)
        self._strangers.pop(connection, None)
        connection.close()


def _has_stirred(connection: socket.socket) -> bool:
    """Return whether a launcher that has nothing more to say has closed or said something."""
    try:
        connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


# ── the other nodes ──────────────────────────────────────────────────────────────────────────────


class _ClosedError(Exception):
    """What listens at the address closed the connection before it had answered."""


def _join(node: Node, nproc: int) -> tuple[LocalRanks, socket.socket]:
    deadline = time.monotonic() + node.timeout_s
    pause_s, said = _FIRST_PAUSE_S, False
    closed_at: float | None = None
    while True:
        left_s = deadline - time.monotonic()
        try:
            address = (node.host, node.port)
            connection = socket.create_connection(address, max(0.1, min(_CONNECT_S, left_s)))
            try:
                return _ask(node, nproc, connection, deadline), connection
            except BaseException:
                connection.close()
                raise
        except _ClosedError:
            # Node 0 does that to the oldest of many connections which have not said who they are.
            closed_at = closed_at or time.monotonic()
            if time.monotonic() - closed_at >= min(_SILENCE_S, node.timeout_s):
                raise LaunchError(_is_no_answer(node, "closed the connection")) from None
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


def _ask(node: Node, nproc: int, connection: socket.socket, deadline: float) -> LocalRanks:
    """Says who this node is, and waits for its ranks.

    Raises:
        LaunchError: Node 0 refused it, did not answer in time, or is something else.
        _ClosedError: The connection ended before any answer.
    """
    hello = {"evener": __version__, "node": node.number, "nnodes": node.nnodes, "nproc": nproc}
    answers = _Answers(connection)
    try:
        connection.sendall(_encode(**hello))
        line = answers.first(node, deadline)
        if not line:
            raise _ClosedError
        if (_decode(line) or {}).get("waiting") is True:
            line = answers.next(deadline)
    except TimeoutError:
        raise LaunchError(
            f"node {node.number} waited {node.timeout_s:.0f} s at {node.where} for node 0 to name "
            "its ranks: another node is missing (node 0 says which), or what listens there is "
            "something else"
        ) from None
    except OSError:
        if not answers.have_come:
            raise _ClosedError from None
        line = b""
    answer = _decode(line) or {}
    if isinstance(answer.get("error"), str):
        raise LaunchError(_printable(answer["error"]))
    first, world_size = answer.get("first_rank"), answer.get("world_size")
    if type(first) is not int or type(world_size) is not int:
        what = "answered something else" if line else "closed the connection"
        raise LaunchError(_is_no_answer(node, what))
    return LocalRanks(
        first=first, count=nproc, world_size=world_size, host=node.host, port=node.port
    )


def _is_no_answer(node: Node, what: str) -> str:
    return (
        f"{node.where} {what} when node {node.number} asked for its ranks: node 0 has ended "
        f"(its output says why), its team is complete already (is --node-rank {node.number} "
        "started twice?), or another program uses that port"
    )


@dataclass(slots=True)
class _Answers:
    """Lines that come over a connection, of limited length."""

    connection: socket.socket
    have_come: bool = False
    _rest: bytes = b""

    def first(self, node: Node, deadline: float) -> bytes:
        """The first line, which node 0 sends at once; prints whom it waits for if it does not."""
        try:
            return self.next(min(deadline, time.monotonic() + _SILENCE_S))
        except TimeoutError:
            if time.monotonic() >= deadline:
                raise
            host, port = self.connection.getpeername()[:2]
            say(
                f"evener: {host} port {port} accepted the connection of node {node.number} "
                f"{_SILENCE_S:.0f} s ago and has not answered; waiting for it until "
                f"{node.timeout_s:.0f} s are over. Is that node 0 of this run, or another program?"
            )
            return self.next(deadline)

    def next(self, deadline: float) -> bytes:
        """The next line; empty when the connection has ended. Raises ``TimeoutError``."""
        while b"\n" not in self._rest and len(self._rest) <= _LONGEST_LINE_BYTES:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            self.connection.settimeout(left_s)
            chunk = self.connection.recv(_LONGEST_LINE_BYTES)
            if not chunk:
                break
            self._rest += chunk
            self.have_come = True
        line, _, self._rest = self._rest.partition(b"\n")
        return line
