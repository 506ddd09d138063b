"""A connection to the coordinator of a team, that is made again whenever it ends.

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
from math import inf
from multiprocessing.connection import wait
from typing import Final, final

from evener.closing import Closing
from evener.comm.addresses import is_unknown_name
from evener.errors import CoordinatorLostError, EvenerError, LaunchError, TeamRefusedError
from evener.parsing import Fields, whole
from evener.protocol.formation import (
    Deadlines,
    Formation,
    ProcessState,
    read_message,
)
from evener.team.address import parse_address
from evener.team.channel import Channel, Message, close_in_children
from evener.team.sealed import MOST_MESSAGE_BYTES, TO_COORDINATOR, Seal, new_nonce
from evener.version import __version__

_CONNECT_S: Final = 2.0
_FIRST_PAUSE_S: Final = 0.002
_LONGEST_PAUSE_S: Final = 0.1


class CoordinatorConnection(Closing):
    """One connection, and the thread that owns it.

    Args:
        address: ``HOST:PORT`` of the coordinator.
        token: The team's; ``None`` where it has none.
        member: Name of this end.
        role: ``worker`` or ``supervisor``.
        timeout_s: Longest wait for the first connection.
        has_beats: Whether each end shows the other that it lives.

    Attributes:
        address: As given.
        member: As given.
        deadlines: The team's, as the coordinator has them.
        limits: Fewest and most members of the team.

    Raises:
        ConfigError: The address is none.
        LaunchError: Nothing answers there in time.
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
        self._host, self._port = host, port
        self._token = token
        self._role = role
        self._changed = threading.Condition()
        self._outgoing: deque[Message] = deque()
        self._is_welcome = False
        self._failure: EvenerError | None = None
        self._trouble = "no answer"  # why the last attempt to connect failed
        self._has_met = self._closed = False
        self._beat_due_s = 0.0 if has_beats else inf
        self._has_beats = has_beats
        self._heard_s = time.monotonic()
        self._wake_end, self._wake = socket.socketpair()
        self._wake.setblocking(False)
        for end in (self._wake_end, self._wake):
            close_in_children(end)
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
        silent_s = time.monotonic() - self._heard_s if self._has_beats else 0.0
        return silent_s if silent_s > self.deadlines.lease_s + _CONNECT_S else 0.0

    # ── what the two kinds of ends add ───────────────────────────────────────────────────────────

    @abstractmethod
    def _introduction(self) -> Message:
        """Return what the hello says beside role and member; the lock is held."""

    @abstractmethod
    def _begin(self, welcome: Fields) -> list[Message]:
        """Take in the welcome; return what is said first. The lock is held."""

    @abstractmethod
    def _beat(self, now_s: float) -> Message:
        """Return a heartbeat; the lock is held."""

    @abstractmethod
    def _hear(self, kind: str, fields: Fields) -> None:
        """Take in a message; the lock is held. Raise ValueError if it is none."""

    def _may_return(self) -> bool:
        """Return whether a connection that has ended is made again."""
        return True

    def _absent(self, why: str) -> EvenerError:
        """Return the error of a coordinator that has never answered."""
        return LaunchError(
            f"{self._role} {self.member} waited {self._timeout_s:.0f} s for the coordinator at "
            f"{self.address} ({why}): start it with `evener coordinator`, and check the "
            "address and the port"
        )

    # ── for both ─────────────────────────────────────────────────────────────────────────────────

    def _start(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._thread.start()
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._has_met or self._failure, timeout_s)
                if not self._has_met:
                    raise self._failure or self._absent(self._trouble)
        except BaseException:  # Ctrl-C, too
            self.close()
            raise

    def _post(self, message: Message) -> None:
        """Send a message; the lock is held. Where the connection has ended, it is not sent."""
        if self._is_welcome:
            self._outgoing.append(message)
            self._nudge()

    def _beat_soon(self) -> None:
        self._beat_due_s = 0.0 if self._has_beats else inf
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
        pause_s = _FIRST_PAUSE_S
        while not self._closed:
            try:
                channel, seal = self._connect()
            except TeamRefusedError as error:
                self._fail(error)
                break
            except (OSError, ValueError) as error:  # names that cannot be encoded, too
                why = self._trouble = getattr(error, "strerror", None) or str(error) or "no answer"
                due_s = began_s + self._timeout_s
                if self._has_met:
                    due_s = lost_s + self.deadlines.patience_s
                left_s = due_s - time.monotonic()
                is_unknown = isinstance(error, OSError | UnicodeError) and is_unknown_name(error)
                if left_s <= 0 or (is_unknown and not self._has_met):
                    self._fail(self._lost(why))
                    break
                wait([self._wake_end], min(pause_s, left_s))
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                continue
            with closing(channel):
                self._talk(channel, seal)
            lost_s, pause_s = time.monotonic(), _FIRST_PAUSE_S
            with self._changed:
                self._is_welcome = False
                self._outgoing.clear()
                self._changed.notify_all()
            if not self._may_return():
                self._fail(self._lost("its connection has ended"))
                break
        self._wake_end.close()
        self._wake.close()

    def _lost(self, why: str) -> EvenerError:
        if not self._has_met:
            return self._absent(why)
        return CoordinatorLostError(
            f"{self._role} {self.member} lost the coordinator at {self.address} and waited "
            f"{self.deadlines.patience_s:.0f} s for it (patience_s; {why}): check the network to "
            "its machine; if it has ended, start it again with the same arguments, or the run "
            "again to resume from its checkpoint"
        )

    def _connect(self) -> tuple[Channel, Seal]:
        connection = socket.create_connection((self._host, self._port), _CONNECT_S)
        connection.settimeout(None)  # a Channel waits by other means
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        channel = Channel(connection, MOST_MESSAGE_BYTES)
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
        with self._changed:
            hello = {"role": self._role, "member": self.member, **self._introduction()}
        channel.tell({**seal.close(hello), "nonce": nonce})
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
                    messages.append(self._beat(now_s))
                    self._beat_due_s = now_s + self.deadlines.beat_s
                beat_due_s = self._beat_due_s
            for message in messages:
                channel.tell(seal.close(message))
            left_s = max(0.0, beat_due_s - now_s) if self._has_beats else None
            ready = wait([channel.fileno(), self._wake_end], left_s)
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

    def _beat(self, now_s: float) -> Message:
        return {"type": "beat", "members": list(self._members)}

    def _hear(self, kind: str, fields: Fields) -> None:
        if kind == "formed":
            self._held, self._run_has_ended = read_message(Formation, fields), False
        elif kind == "ended":
            self._run_has_ended = True
        elif kind == "beaten":
            self._workers = frozenset(fields.texts("workers"))
