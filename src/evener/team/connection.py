"""A connection to the coordinator of a team, which reconnects whenever it ends.

Agents use it, so it does not import torch.
"""

import os
import secrets
import socket
import threading
import time
from abc import abstractmethod
from collections import deque
from contextlib import closing, suppress
from dataclasses import asdict
from math import inf
from multiprocessing.connection import wait
from typing import Final, final

from evener.closing import Closing
from evener.comm.addresses import end_when_unreachable, is_unknown_name, parse_address
from evener.comm.forks import NotInherited, close_in_children
from evener.errors import CoordinatorLostError, EvenerError, LaunchError, TeamRefusedError
from evener.parsing import Fields, whole
from evener.protocol.formation import (
    Deadlines,
    Formation,
    ProcessState,
    read_message,
)
from evener.team.terminal import say
from evener.team.wire import (
    MOST_MESSAGE_BYTES,
    TO_COORDINATOR,
    Channel,
    Message,
    Seal,
    new_nonce,
)
from evener.version import __version__

_CONNECT_S: Final = 2.0
# Hosts that are started together connect within this time; nothing is printed before.
_SILENT_S: Final = 1.0
_FIRST_PAUSE_S: Final = 0.002
_LONGEST_PAUSE_S: Final = 0.1


class CoordinatorConnection(Closing, NotInherited):
    """One connection, and the thread that owns it.

    Args:
        address: ``HOST:PORT`` of the coordinator.
        token: The team's token; ``None`` without one.
        member: Name of this end.
        role: ``worker`` or ``agent``.
        timeout_s: Longest wait for the first connection.
        has_beats: Whether the ends exchange heartbeats.

    Attributes:
        address: As given.
        member: As given.
        deadlines: The team's deadlines, from the coordinator.
        limits: Fewest and most members of the team.
        own_address: This machine's end of the route to the coordinator.

    Raises:
        ConfigError: The address is invalid.
        LaunchError: The coordinator does not answer in time.
        TeamRefusedError: The coordinator refused this end.
    """

    def __init__(
        self,
        address: str,
        *,
        token: bytes | None,
        member: str,
        role: str,
        timeout_s: float,
        has_beats: bool = True,
    ) -> None:
        host, port = parse_address(address, "the coordinator's address")
        if port is None:
            raise LaunchError(f"the coordinator's address is {address!r}; give HOST:PORT")
        self.member = member
        self.address = address
        self.deadlines = Deadlines()
        self.limits = (1, 1)
        self.own_address = ""
        self._host, self._port = host, port
        self._token = token
        self._role = role
        self._changed = threading.Condition()
        self._outgoing: deque[Message] = deque()
        self._failure: EvenerError | None = None
        self._is_welcome = self._has_met = self._closed = False
        self._why = "no answer"  # to the last attempt to connect
        self._beat_due_s = 0.0 if has_beats else inf
        self._has_beats = has_beats
        self._received_s = time.monotonic()
        self._wake_end, self._wake = socket.socketpair()
        self._wake.setblocking(False)
        close_in_children(self)
        self._thread = threading.Thread(
            target=self._run, name="evener-coordinator-connection", daemon=True
        )
        self._start(timeout_s)

    def close(self) -> None:
        """Close the connection; idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._nudge()
        self._thread.join(_CONNECT_S)

    def close_in_child(self) -> None:
        """Close a forked child's copies of the sockets; see ``NotInherited``."""
        self._wake_end.close()
        self._wake.close()

    @property
    def silent_s(self) -> float:
        """Seconds since the last message, if the coordinator's next one is late; else 0.

        Each heartbeat has an answer. If it is late, the coordinator is stopped or unreachable.
        """
        silent_s = time.monotonic() - self._received_s if self._has_beats else 0.0
        return silent_s if silent_s > self.deadlines.lease_s + _CONNECT_S else 0.0

    # ── for subclasses ───────────────────────────────────────────────────────────────────────────

    @abstractmethod
    def _introduction(self) -> Message:
        """Return the facts that this end sends after the hello; the lock is held."""

    @abstractmethod
    def _begin(self, welcome: Fields) -> list[Message]:
        """Handle the welcome; return the first messages to send. The lock is held."""

    @abstractmethod
    def _beat(self) -> Message:
        """Return a heartbeat; the lock is held."""

    @abstractmethod
    def _handle(self, kind: str, fields: Fields) -> None:
        """Handle a message; the lock is held. Raise ValueError if it is invalid."""

    def _farewell(self) -> list[Message]:
        """Return the last messages before the connection is closed on purpose."""
        return []

    def _on_break(self) -> None:
        """Handle the end of a connection, which is followed by another; the lock is held."""

    def _may_return(self) -> bool:
        """Return whether to reconnect after the connection has ended."""
        return True

    def _absent(self) -> EvenerError:
        """Return the error for a coordinator that has never answered."""
        return LaunchError(
            f"{self._role} {self.member} waited {self._timeout_s:.0f} s for the coordinator at "
            f"{self.address} ({self._why}): start it with `evener coordinator`, and check the "
            "address and the port"
        )

    # ── for all ──────────────────────────────────────────────────────────────────────────────────

    def _start(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._thread.start()
        silent_s = min(timeout_s, _SILENT_S)
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._has_met or self._failure, silent_s)
                if not (self._has_met or self._failure) and timeout_s > silent_s:
                    say(
                        f"evener: {self.member} waits for the coordinator at {self.address} "
                        f"({self._why})"
                    )
                    self._changed.wait_for(lambda: self._has_met or self._failure, timeout_s)
                if not self._has_met:
                    raise self._failure or self._absent()
        except BaseException:  # Ctrl-C, too
            self.close()
            raise

    def _post(self, message: Message) -> None:
        """Send a message; the lock is held. If the connection has ended, it is dropped."""
        if self._is_welcome:
            self._outgoing.append(message)
            self._nudge()

    def _beat_soon(self) -> None:
        self._beat_due_s = 0.0 if self._has_beats else inf
        self._nudge()

    def _nudge(self) -> None:
        with suppress(OSError):  # full, so the thread is awake already
            self._wake.send(b"x")

    def _fail(self, failure: EvenerError) -> None:
        with self._changed:
            self._failure = failure
            self._changed.notify_all()

    def _run(self) -> None:
        began_s = lost_s = time.monotonic()
        pause_s = _FIRST_PAUSE_S
        while not self._closed:
            try:
                channel, seal = self._connect()
            except TeamRefusedError as error:
                self._fail(error)
                break
            except (OSError, ValueError) as error:  # names that cannot be encoded, too
                self._why = getattr(error, "strerror", None) or str(error) or "no answer"
                due_s = began_s + self._timeout_s
                if self._has_met:
                    due_s = lost_s + self.deadlines.patience_s
                left_s = due_s - time.monotonic()
                if isinstance(error, OSError | UnicodeError) and is_unknown_name(error):
                    self._why = f"the name {self._host!r} is unknown here"  # yet, in Kubernetes
                if left_s <= 0:
                    self._fail(self._lost())
                    break
                wait([self._wake_end], min(pause_s, left_s))
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                continue
            with closing(channel):
                self._talk(channel, seal)
            lost_s, pause_s = time.monotonic(), _FIRST_PAUSE_S
            with self._changed:
                if not self._closed:
                    self._on_break()
                self._is_welcome = False
                self._outgoing.clear()
                self._changed.notify_all()
            if not self._may_return():
                self._why = "its connection has ended"
                self._fail(self._lost())
                break
        self._wake_end.close()
        self._wake.close()

    def _lost(self) -> EvenerError:
        if not self._has_met:
            return self._absent()
        return CoordinatorLostError(
            f"{self._role} {self.member} lost the coordinator at {self.address} and waited "
            f"{self.deadlines.patience_s:.0f} s for it (patience_s; {self._why}): check the "
            "network to its machine; if it has ended, start it again with the same arguments, or "
            "the run again to resume from its checkpoint"
        )

    def _connect(self) -> tuple[Channel, Seal]:
        connection = socket.create_connection((self._host, self._port), _CONNECT_S)
        connection.settimeout(None)  # a Channel has its own waits
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end_when_unreachable(connection, self.deadlines.host_lease_s + 4.0)  # like the other end
        # A stopped coordinator does not read. This thread must not block in send: it has to notice
        # the silence, and reconnect.
        channel = Channel(connection, MOST_MESSAGE_BYTES, self.deadlines.lease_s + _CONNECT_S)
        self.own_address = str(connection.getsockname()[0])
        try:
            seal, welcome = self._meet(channel)
            with self._changed:
                least, most = (whole(n, "a limit", least=1) for n in welcome.items("limits"))
                self.limits = least, most
                self.deadlines = read_message(Deadlines, welcome.fields("deadlines"))
                first = self._begin(welcome)
                self._outgoing.extend(first)
                self._is_welcome = self._has_met = True
                self._changed.notify_all()
        except BaseException:
            channel.close()
            raise
        return channel, seal

    def _meet(self, channel: Channel) -> tuple[Seal, Fields]:
        deadline = time.monotonic() + _CONNECT_S
        challenge = self._next(channel, deadline)
        if challenge.text("evener") != __version__:
            raise self._unproven(
                f"the coordinator at {self.address} runs evener {challenge.text('evener')}, "
                f"{self.member} runs {__version__}; install the same version on every machine"
            )
        nonce = new_nonce()
        seal = Seal(self._token, (challenge.text("nonce"), nonce), TO_COORDINATOR)
        hello = {"role": self._role, "member": self.member}
        channel.send({**seal.close(hello), "nonce": nonce})
        with self._changed:
            introduction = self._introduction()
        channel.send(seal.close(introduction))
        answer = self._next(channel, deadline)
        if "type" in answer and answer.text("type") == "refused":
            raise self._unproven(
                f"the coordinator at {self.address} refused {self.member}: {answer.text('why')}"
            )
        welcome = seal.open(answer.values)
        if welcome.text("type") == "refused":
            raise TeamRefusedError(
                f"the coordinator at {self.address} refused {self.member}: {welcome.text('why')}"
            )
        return seal, welcome

    def _unproven(self, why: str) -> Exception:
        """Return the error for a refusal without proof, which any program could send.

        While the coordinator is restarted, another program may listen on its port.
        """
        return ConnectionError(why) if self._has_met else TeamRefusedError(why)

    def _next(self, channel: Channel, deadline: float) -> Fields:
        message = channel.next(deadline)
        if not message:
            raise ConnectionError("it closed the connection, or is another program")
        return Fields(message)

    def _talk(self, channel: Channel, seal: Seal) -> None:
        """Send and receive until the connection ends."""
        self._beat_soon()
        self._received_s = time.monotonic()
        while not self._closed and not self.silent_s:
            now_s = time.monotonic()
            with self._changed:
                messages = list(self._outgoing)
                self._outgoing.clear()
                if now_s >= self._beat_due_s:
                    messages.append(self._beat())
                    self._beat_due_s = now_s + self.deadlines.beat_s
                beat_due_s = self._beat_due_s
            for message in messages:
                channel.send(seal.close(message))
            if channel.fileno() < 0:  # closed, because the other end does not read
                return
            left_s = max(0.0, beat_due_s - now_s) if self._has_beats else None
            ready = wait([channel.fileno(), self._wake_end], left_s)
            if self._wake_end in ready:
                self._wake_end.recv(4096)
            received = channel.receive()
            self._received_s = time.monotonic() if received else self._received_s
            try:
                with self._changed:
                    for message in received:
                        fields = seal.open(message)
                        self._handle(fields.text("type"), fields)
                    self._changed.notify_all()
            except ValueError:
                return
            if channel.has_ended:
                return
        if self._closed:
            for message in self._farewell():
                channel.send(seal.close(message))


@final
class AgentConnection(CoordinatorConnection):
    """An agent's connection, to report its processes; see ``CoordinatorConnection``."""

    def __init__(self, address: str, *, token: bytes | None, timeout_s: float = 10.0) -> None:
        self._workers: frozenset[str] = frozenset()
        self._known: dict[str, Message] = {}
        self._members: set[str] = set()
        self._held: Formation | None = None  # the newest generation
        self._run_has_ended = False
        self._node: Message | None = None  # this host, in a fixed team
        self._place: Fields | None = None
        self._missing = ""  # hosts that have not connected
        self._refusal: LaunchError | None = None
        self._is_dismissed = False  # the coordinator has ended normally
        self._relayed: list[Message] = []
        name = f"{socket.gethostname()}/{os.getpid()}/{secrets.token_hex(4)}"
        super().__init__(address, token=token, member=name, role="agent", timeout_s=timeout_s)

    @property
    def workers(self) -> frozenset[str]:
        """Ids of the living workers, by the last message; none once the connection has failed."""
        return frozenset() if self._failure else self._workers

    def attend(self, member: str) -> None:
        """Report with each heartbeat that a worker's process runs, until it has ended."""
        with self._changed:
            self._members.add(member)

    @property
    def run_has_ended(self) -> bool:
        """Whether the coordinator has reported that the run has ended for new workers."""
        return self._run_has_ended

    def report_state(self, member: str, state: ProcessState, reason: str = "") -> None:
        """Report the state of a worker's process, also to a restarted coordinator.

        Args:
            member: The worker's id.
            state: The state.
            reason: How its process ended, such as ``killed by SIGKILL``.
        """
        message = {"type": "process", "member": member, "state": str(state), "reason": reason}
        with self._changed:
            self._known[member] = message
            if state in (ProcessState.GONE, ProcessState.FINISHED):
                self._members.discard(member)
            self._post(message)

    # ── a fixed team ─────────────────────────────────────────────────────────────────────────────

    def enter(
        self, node: int, nnodes: int, nproc: int, port: int, *, timeout_s: float
    ) -> tuple[int, int, str, int]:
        """Register this host, and wait for its place in a fixed team.

        Args:
            node: Its number.
            nnodes: Hosts of the team.
            nproc: Ranks that it starts.
            port: On node 0, a port for the script's process groups.
            timeout_s: Longest wait for the other hosts.

        Returns:
            The first rank of this host, the ranks of the team, and node 0's address and port.

        Raises:
            LaunchError: This host is refused, or another one did not connect.
        """
        began_s, is_announced = time.monotonic(), False
        with self._changed:
            self._node = {
                "type": "node", "number": node, "nnodes": nnodes, "nproc": nproc, "port": port,
            }  # fmt: skip
            self._post(self._node)
            while self._place is None:
                if failure := self._refusal or self._failure:
                    raise failure
                waited_s = time.monotonic() - began_s
                missing = self._missing or "the coordinator's answer"
                if waited_s >= timeout_s:
                    raise LaunchError(
                        f"node {node} waited {timeout_s:.0f} s at {self.address} for {missing}: "
                        "start the same command there with its --node-rank, or look at its output"
                    )
                if waited_s >= _SILENT_S and not is_announced:
                    is_announced = True
                    say(f"evener: node {node} waits at {self.address} for {missing}")
                self._changed.wait(min(timeout_s - waited_s, _SILENT_S))
            place = self._place
        world_size, port = place.whole("world_size", least=1), place.whole("port", least=0)
        return place.whole("first", least=0), world_size, place.text("host"), port

    def relay(self, content: Message) -> None:
        """Send a message to the agents of the other hosts."""
        with self._changed:
            self._post({"type": "relay", "content": content})

    def take_relayed(self) -> list[Message]:
        """Return the messages of other agents since the last call."""
        with self._changed:
            relayed, self._relayed = self._relayed, []
        return relayed

    def _introduction(self) -> Message:
        # A restarted coordinator must not continue from an older generation: a worker of it may
        # come back that is not in the newest one.
        return {"held": None if self._held is None else asdict(self._held)}

    def _begin(self, welcome: Fields) -> list[Message]:
        node = [] if self._node is None else [self._node]
        return [*node, *self._known.values()]

    def _beat(self) -> Message:
        return {"type": "beat", "members": list(self._members)}

    def _farewell(self) -> list[Message]:
        return [{"type": "farewell"}]

    def _on_break(self) -> None:
        if self._place is not None and not self._is_dismissed:
            self._relayed.append({"lost": f"node 0 ({self._host})"})

    def _handle(self, kind: str, fields: Fields) -> None:
        if kind == "formed":
            self._held, self._run_has_ended = read_message(Formation, fields), False
        elif kind == "ended":
            self._run_has_ended = True
        elif kind == "beaten" and "workers" in fields:  # they have changed
            self._workers = frozenset(fields.texts("workers"))
        elif kind == "place":
            self._place = fields
        elif kind == "missing":
            self._missing = fields.text("nodes")
        elif kind == "refused_node":
            self._refusal = LaunchError(fields.text("why"))
        elif kind == "farewell":
            self._is_dismissed = True
        elif kind == "relayed":
            self._relayed.append(fields.fields("content").values)
