"""Messages between the processes of a team: lines of JSON, authenticated if there is a token.

A ``Channel`` connects a rank to its agent, and workers and agents to the coordinator. The token is
never sent there. Both ends derive a key from it and from two nonces, one of each end. Each message
has an HMAC under that key, of its direction, its number and its text. So without the token, no one
can connect, impersonate the coordinator, or replay a message. Messages are not encrypted. Nothing
is unpickled.
"""

import hashlib
import hmac
import json
import os
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from stat import S_IMODE
from typing import Any, Final

from evener.comm.forks import NotInherited, close_in_children
from evener.errors import ConfigError
from evener.files import open_for_reading
from evener.parsing import Fields, parse_json
from evener.team.environment import TOKEN_FILE

#: Set by the supervisor of a rank: the descriptor of the rank's end.
CHANNEL_FD: Final = "EVENER_CHANNEL_FD"

#: The progress of a rank, for its supervisor.
JOINING: Final = "joining"
"""It waits for the other ranks of the team."""
JOINED: Final = "joined"
LEFT: Final = "left"
"""It has closed its connections to them."""
READY: Final = "ready"
"""A worker of a managed run begins to train."""
DONE: Final = "done"
"""A worker of a managed run has trained to the end."""

Message = dict[str, Any]

#: Longest message in either direction; model fingerprints and formations are much shorter.
MOST_MESSAGE_BYTES: Final = 256 * 1024
TO_COORDINATOR: Final = "to coordinator"
FROM_COORDINATOR: Final = "from coordinator"

_SHORTEST_TOKEN: Final = 16
_LONGEST_TOKEN: Final = 4096
_CHUNK_BYTES = 1 << 20
_LOOK_S = 0.5


class Channel(NotInherited):
    """One end of a connection. Any thread may send; one thread receives. Nothing is unpickled.

    It ends with this process, and with ``exec``; a forked child closes its copy, which would hide
    that. Between processes of one host it is a socket pair, which needs no file.

    Args:
        end: The socket, which this object owns from now on.
        limit_bytes: Longest message; a longer one ends the connection. It is for connections that
            any process may open; ``None`` for those between a launcher and its processes.
        send_s: Longest time for which the other end may not read while a message is sent; then the
            connection ends. ``None`` waits while the other process lives.

    Attributes:
        has_ended: Whether the other end, or this one, is closed.
    """

    def __init__(
        self, end: socket.socket, limit_bytes: int | None = None, send_s: float | None = None
    ) -> None:
        end.set_inheritable(False)
        self.has_ended = False
        self._end = end
        self._send_s = send_s
        self._limit_bytes = limit_bytes
        self._sending = threading.Lock()
        self._unread = bytearray()
        self._waiting: list[Message] = []
        close_in_children(self)

    def fileno(self) -> int:
        """Return the descriptor, to wait on."""
        return self._end.fileno()

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message; it is dropped if the other end has ended."""
        line = json.dumps(message).encode() + b"\n"
        with self._sending, suppress(OSError, ValueError):  # closed by another thread
            self._send_all(memoryview(line))

    def _send_all(self, part: memoryview) -> None:
        """Send all of it, whatever the socket's timeout: half a message would damage the next."""
        taken_s = time.monotonic()
        while part:
            try:
                part = part[self._end.send(part, socket.MSG_DONTWAIT) :]
                taken_s = time.monotonic()
            except BlockingIOError:
                late_s = time.monotonic() - taken_s
                if self._send_s is not None and late_s >= self._send_s:
                    self.close()
                    raise
                with selectors.DefaultSelector() as selector:
                    selector.register(self._end, selectors.EVENT_WRITE)
                    selector.select(_LOOK_S)  # another thread may close this end meanwhile

    def receive(self) -> list[Message]:
        """Return the complete messages that have come; one that is not a JSON object is empty.

        It does not wait. ``has_ended`` is true from the last message on.
        """
        messages, self._waiting = self._waiting, []
        while not self.has_ended:
            try:
                chunk = self._end.recv(_CHUNK_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except OSError:
                chunk = b""
            *lines, self._unread = (self._unread + chunk).split(b"\n")
            messages += map(_parse, lines)
            is_too_long = self._limit_bytes is not None and len(self._unread) > self._limit_bytes
            if is_too_long:
                messages.append({})
            if is_too_long or not chunk:
                self.close()
        return messages

    def next(self, deadline: float) -> Message | None:
        """Wait for the next message.

        Args:
            deadline: On the monotonic clock.

        Returns:
            The message; ``None`` when the connection has ended.

        Raises:
            TimeoutError: No message has come.
        """
        while not self._waiting:
            self._waiting = self.receive()
            if self._waiting or self.has_ended:
                break
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            wait([self.fileno()], left_s)
        return self._waiting.pop(0) if self._waiting else None

    def close_in_child(self) -> None:
        """Close a forked child's copy; see ``NotInherited``."""
        self.close()

    def close(self) -> None:
        """Close this end; idempotent."""
        self.has_ended = True
        self._end.close()


def _parse(line: bytes | bytearray) -> Message:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):  # deeply nested lists exhaust the parser's stack
        return {}
    return message if isinstance(message, dict) else {}


# ── authenticated messages ───────────────────────────────────────────────────────────────────────


def new_nonce() -> str:
    """Return a nonce, in hexadecimal."""
    return secrets.token_hex(16)


class Seal:
    """The key of one connection, and the numbers of messages sent and received.

    Args:
        token: The team's token; ``None`` without one, and then messages are not changed.
        nonces: Of the coordinator and of the other end.
        outgoing: ``TO_COORDINATOR`` or ``FROM_COORDINATOR``.
    """

    def __init__(self, token: bytes | None, nonces: tuple[str, str], outgoing: str) -> None:
        text = "evener connection|" + "|".join(nonces)
        self._key = None if token is None else hmac.digest(token, text.encode(), hashlib.sha256)
        incoming = {TO_COORDINATOR: FROM_COORDINATOR, FROM_COORDINATOR: TO_COORDINATOR}
        self._outgoing, self._incoming = outgoing, incoming[outgoing]
        self._num_sent = self._num_received = 0

    def close(self, message: dict[str, Any]) -> Message:
        """Return a message with its HMAC."""
        if self._key is None:
            return message
        body = json.dumps(message)
        mac = self._mac(self._outgoing, self._num_sent, body)
        self._num_sent += 1
        return {"body": body, "mac": mac}

    def open(self, message: Message) -> Fields:
        """Check a message and return its content.

        Raises:
            ValueError: It was not sent by the other end, or not as the next message, or is damaged.
        """
        if self._key is None:
            return Fields(message)
        fields = Fields(message)
        body = fields.text("body")
        mac = self._mac(self._incoming, self._num_received, body)
        if not hmac.compare_digest(mac.encode(), fields.text("mac").encode()):
            raise ValueError("its HMAC is not that of the token")
        self._num_received += 1
        return Fields(parse_json(body))

    def _mac(self, direction: str, number: int, body: str) -> str:
        assert self._key is not None
        text = f"{direction}|{number}|{body}".encode()
        return hmac.digest(self._key, text, hashlib.sha256).hex()


# ── the token ────────────────────────────────────────────────────────────────────────────────────


def read_token(path: Path | None) -> bytes:
    """Return the token of a file, without white space around it; empty without a file.

    Raises:
        ConfigError: It cannot be read, other users can read or change it, or its length is wrong.
    """
    if path is None:
        return b""
    try:
        with open_for_reading(path) as stream:
            status = os.fstat(stream.fileno())
            token = stream.read(_LONGEST_TOKEN + 1).strip()
    except OSError as error:
        raise ConfigError(
            f"the token file {path} cannot be read ({error.strerror}); name a file with the token"
        ) from None
    if sys.platform != "win32":
        _require_private(path, status)
    if not _SHORTEST_TOKEN <= len(token) <= _LONGEST_TOKEN:
        raise ConfigError(
            f"the token in {path} has {len(token)} bytes; give {_SHORTEST_TOKEN} to "
            f"{_LONGEST_TOKEN} random ones, such as by "
            f"`(umask 077; openssl rand -hex 32 > {path})`"
        )
    return token


def _require_private(path: Path, status: os.stat_result) -> None:
    mode = S_IMODE(status.st_mode)
    if status.st_uid not in (os.geteuid(), 0):
        raise ConfigError(
            f"the token file {path} belongs to another user (uid {status.st_uid}), who can read "
            f"and change it; use your own file with mode 0600, or `chown {os.geteuid()} "
            f"{path}`"
        )
    # Kubernetes gives a Secret to the group of a pod that does not run as root.
    permitted = 0o040 if status.st_uid == 0 and os.geteuid() != 0 else 0
    if mode & 0o077 & ~permitted:
        raise ConfigError(
            f"the token file {path} is open to other users (mode {mode:04o}); run `chmod 600 "
            f"{path}`, and make another token if others may have read it"
        )


def read_team_token(environ: Mapping[str, str]) -> bytes | None:
    """Return the team's token, from the user's or the launcher's file; ``None`` without one."""
    token_file = environ.get(TOKEN_FILE)
    return read_token(Path(token_file)) if token_file else None
