"""A connection to the coordinator of an elastic team, that is made again whenever it ends.

Supervisors use it, so it loads no torch.
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
from multiprocessing.connection import wait
from typing import Final, final

from evener.closing import Closing
from evener.comm.addresses import end_when_unreachable, is_unknown_name
from evener.errors import CoordinatorLostError, EvenerError, LaunchError, TeamRefusedError
from evener.parsing import Fields, whole
from evener.protocol.formation import (
    Deadlines,
    Formation,
    ProcessState,
    read_message,
)
from evener.team.address import parse_address
from evener.team.channel import Channel, Message
from evener.team.sealed import MOST_MESSAGE_BYTES, TO_COORDINATOR, Seal, new_nonce
from evener.version import __version__

_CONNECT_S: Final = 2.0
_PAUSE_S: Final = 0.1


class CoordinatorConnection(Closing):
    """One connection, and the thread that owns it.

    Args:
        address: ``HOST:PORT`` of the coordinator.
        token: The team's; ``None`` where it has none.
        member: Name of this end.
        role: ``worker`` or ``supervisor``.
        timeout_s: Longest wait for the first connection.

    Attributes:
        address: As given.
        member: As given.
        deadlines: The team's, as the coordinator has them.
        limits: Fewest and most members of the team.
        own_address: This machine's end of the route to the coordinator.

    Raises:
        ConfigError: The address is none.
        LaunchError: Nothing answers there in time.
        TeamRefusedError: The coordinator refused this end.
    """

    def __init__(
        self, address: str, *, token: bytes | None, member: str, role: str, timeout_s: float
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
        self._is_welcome = False
        self._failure: EvenerError | None = None
        self._has_met = self._closed = False
        self._why = "no answer"  # to the last attempt to connect
        self._beat_due_s = 0.0
        self._heard_s = time.monotonic()
        self._wake_end, self._wake = socket.socketpair()
        self._wake.setblocking(False)
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
        if threading.current_thread() is not self._thread:
            self._thread.join(_CONNECT_S)

    @property
    def silent_s(self) -> float:
        """Seconds since the last message, if the coordinator is late with the next; else 0.

        Each heartbeat has an answer. One that is late is stopped, or cannot be reached.
        """
        silent_s = time.monotonic() - self._heard_s
        return silent_s if silent_s > self.deadlines.lease_s + _CONNECT_S else 0.0

    # ── what the two kinds of ends add ───────────────────────────────────────────────────────────

    @abstractmethod
    def _introduction(self) -> Message:
        """Return what this end tells of itself after the hello; the lock is held."""

    @abstractmethod
    def _begin(self, welcome: Fields) -> list[Message]:
        """Take in the welcome; return what is said first. The lock is held."""

    @abstractmethod
    def _beat(self) -> Message:
        """Return a heartbeat; the lock is held."""

    @abstractmethod
    def _hear(self, kind: str, fields: Fields) -> None:
        """Take in a message; the lock is held. Raise ValueError if it is none."""

    # ── for both ─────────────────────────────────────────────────────────────────────────────────

    def _start(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._thread.start()
        with self._changed:
            self._changed.wait_for(lambda: self._is_welcome or self._failure, timeout_s)
            failure = self._failure
            if failure is None and not self._is_welcome:
                failure = self._lost()
        if failure is not None:
            self.close()
            raise failure

    def _post(self, message: Message) -> None:
        """Send a message; the lock is held. Where the connection has ended, it is not sent."""
        if self._is_welcome:
            self._outgoing.append(message)
            self._nudge()

    def _beat_soon(self) -> None:
        self._beat_due_s = 0.0
        self._nudge()

    def _nudge(self) -> None:
        with suppress(OSError):  # full: it is awake already
            self._wake.send(b"x")

    def _fail(self, failure: EvenerError) -> None:
        with self._changed:
            self._failure = failure
            self._changed.notify_all()

    def _run(self) -> None:
        began_s = lost_s = time.monotonic()
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
                    self._why = f"the name {self._host!r} is unknown here"  # yet, as in Kubernetes
                if left_s <= 0:
                    self._fail(self._lost())
                    break
                wait([self._wake_end], min(_PAUSE_S, left_s))
                continue
            self._has_met = True
            with closing(channel):
                self._talk(channel, seal)
            lost_s = time.monotonic()
            with self._changed:
                self._is_welcome = False
                self._outgoing.clear()
                self._changed.notify_all()
        self._wake_end.close()
        self._wake.close()

    def _lost(self) -> EvenerError:
        if not self._has_met:
            return LaunchError(
                f"{self._role} {self.member} waited {self._timeout_s:.0f} s for the coordinator at "
                f"{self.address} ({self._why}): start it with `evener coordinator`, and check the "
                "address and the port"
            )
        return CoordinatorLostError(
            f"{self._role} {self.member} lost the coordinator at {self.address} and waited "
            f"{self.deadlines.patience_s:.0f} s for it (patience_s; {self._why}): check the "
            "network to its machine; if it has ended, start it again with the same arguments, or "
            "the run again to resume from its checkpoint"
        )

    def _connect(self) -> tuple[Channel, Seal]:
        connection = socket.create_connection((self._host, self._port), _CONNECT_S)
        connection.settimeout(None)  # a Channel waits by other means
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end_when_unreachable(connection, self.deadlines.host_lease_s + 4.0)  # as the other end does
        # A coordinator that is stopped reads nothing. This thread must not wait for it in a send:
        # it has to notice the silence, and to connect again.
        channel = Channel(connection, MOST_MESSAGE_BYTES, self.deadlines.lease_s + _CONNECT_S)
        self.own_address = channel.own[0]
        try:
            seal, welcome = self._meet(channel)
            with self._changed:
                least, most = (whole(n, "a limit", least=1) for n in welcome.items("limits"))
                self.limits = least, most
                self.deadlines = read_message(Deadlines, welcome.fields("deadlines"))
                first = self._begin(welcome)
                self._outgoing.extend(first)
                self._is_welcome = True
                self._changed.notify_all()
        except BaseException:
            channel.close()
            raise
        return channel, seal

    def _meet(self, channel: Channel) -> tuple[Seal, Fields]:
        deadline = time.monotonic() + _CONNECT_S
        challenge = self._next(channel, deadline)
        needs_token = challenge.flag("needs_token")
        if challenge.text("evener") != __version__:
            raise self._unproven(
                f"the coordinator at {self.address} runs evener {challenge.text('evener')}, "
                f"{self.member} runs {__version__}; install the same version on every machine"
            )
        if needs_token != (self._token is not None):
            missing = (
                f"the coordinator at {self.address} asks for a token, and {self.member} has none; "
                "give the file that the coordinator has (--token-file)"
                if needs_token
                else f"{self.member} has a token, but the coordinator at {self.address} has none; "
                "start both with the same --token-file, or both without"
            )
            raise self._unproven(missing)
        nonce = new_nonce()
        seal = Seal(self._token, (challenge.text("nonce"), nonce), TO_COORDINATOR)
        hello = {"role": self._role, "member": self.member}
        channel.tell({**seal.close(hello), "nonce": nonce})
        with self._changed:
            introduction = self._introduction()
        channel.tell(seal.close(introduction))
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
        """Return the error of a refusal that any program could send.

        While the coordinator is started again, another program may listen on its port.
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
        self._heard_s = time.monotonic()
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
                channel.tell(seal.close(message))
            ready = wait([channel.fileno(), self._wake_end], max(0.0, beat_due_s - now_s))
            if self._wake_end in ready:
                self._wake_end.recv(4096)
            heard = channel.receive()
            self._heard_s = time.monotonic() if heard else self._heard_s
            try:
                with self._changed:
                    for message in heard:
                        fields = seal.open(message)
                        self._hear(fields.text("type"), fields)
                    self._changed.notify_all()
            except ValueError:
                return
            if channel.has_ended:
                return


@final
class SupervisorConnection(CoordinatorConnection):
    """How a supervisor tells the coordinator about its processes; see ``CoordinatorConnection``."""

    def __init__(self, address: str, *, token: bytes | None, timeout_s: float = 10.0) -> None:
        self._workers: frozenset[str] = frozenset()
        self._known: dict[str, Message] = {}
        self._members: set[str] = set()
        self._held: Formation | None = None  # the newest generation
        self._run_has_ended = False
        name = f"{socket.gethostname()}/{os.getpid()}/{secrets.token_hex(4)}"
        super().__init__(address, token=token, member=name, role="supervisor", timeout_s=timeout_s)

    @property
    def workers(self) -> frozenset[str]:
        """Ids of the workers that live, as last heard; none once the connection has failed."""
        return frozenset() if self._failure else self._workers

    def attend(self, member: str) -> None:
        """Report with each heartbeat that a worker's process runs, until it has ended."""
        with self._changed:
            self._members.add(member)

    @property
    def run_has_ended(self) -> bool:
        """Whether the coordinator has reported that the run has ended for new workers."""
        return self._run_has_ended

    def tell(self, member: str, state: ProcessState, reason: str = "") -> None:
        """Report the state of a worker's process; a restarted coordinator is told again.

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

    def _introduction(self) -> Message:
        # A restarted coordinator must not continue from an older generation, of which a worker may
        # come back that was left out of the newest one.
        return {"held": None if self._held is None else asdict(self._held)}

    def _begin(self, welcome: Fields) -> list[Message]:
        return list(self._known.values())

    def _beat(self) -> Message:
        return {"type": "beat", "members": list(self._members)}

    def _hear(self, kind: str, fields: Fields) -> None:
        if kind == "formed":
            self._held, self._run_has_ended = read_message(Formation, fields), False
        elif kind == "ended":
            self._run_has_ended = True
        elif kind == "beaten" and "workers" in fields:  # they have changed
            self._workers = frozenset(fields.texts("workers"))
