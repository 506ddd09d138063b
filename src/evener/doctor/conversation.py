"""Messages and raw bytes between two machines, each proved to the other by a shared token.

A message is a line of JSON of limited length. Every wait has a deadline for a whole message, not
for a byte of it. So a peer that sends byte by byte is treated like a silent one. Nothing is
encrypted, and what follows the proof is not signed: the token keeps strangers out.
"""

import hashlib
import hmac
import json
import secrets
import socket
import time
from typing import Any, Final, final

from evener.parsing import Fields, parse_json
from evener.team.terminal import printable
from evener.version import __version__

#: Longest message, in bytes.
LIMIT_BYTES: Final = 1 << 18
_PROTOCOL: Final = 1
_CHUNK_BYTES: Final = 1 << 18
OTHER_PORT: Final = "another program seems to use that port: give another (HOST:PORT) on both"
_SAME_TOKEN: Final = "give the same --token-file on both machines, or on neither"


class StrangerError(Exception):
    """The other end is something else, of another version, or does not know the token.

    Args:
        what: What it did, to be read after its address.
        remedy: What helps.

    Attributes:
        remedy: As given.
    """

    def __init__(self, what: str, remedy: str = OTHER_PORT) -> None:
        super().__init__(what)
        self.remedy = remedy


@final
class Conversation:
    """One connection, with deadlines.

    Args:
        end: The socket, which is this object's from now on.
        patience_s: Longest wait for a message, and for bytes to be taken.
    """

    def __init__(self, end: socket.socket, patience_s: float) -> None:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._end = end
        self._patience_s = patience_s
        self._unread = bytearray()

    @property
    def own_address(self) -> str:
        """Return the number of this end."""
        return str(self._end.getsockname()[0])

    @property
    def peer_address(self) -> str:
        """Return the number of the other end."""
        return str(self._end.getpeername()[0])

    def say(self, **message: Any) -> None:
        """Send a message.

        Raises:
            OSError: The other end has gone, or does not read.
        """
        self._end.settimeout(self._patience_s)
        self._end.sendall(json.dumps(message).encode() + b"\n")

    def hear(self) -> Fields:
        """Return the next message.

        Raises:
            OSError: The other end has gone, or was silent for too long.
            StrangerError: What came is not a message.
        """
        deadline = time.monotonic() + self._patience_s
        while b"\n" not in self._unread:
            if len(self._unread) > LIMIT_BYTES:
                raise StrangerError(f"sent more than {LIMIT_BYTES} bytes without an end of line")
            self._unread += self._receive(LIMIT_BYTES, deadline)
        line, _, self._unread = self._unread.partition(b"\n")
        try:
            return Fields(parse_json(bytes(line)))
        except ValueError:
            raise StrangerError("sent something that is not a message of evener") from None

    def pour(self, num_bytes: int) -> None:
        """Send so many bytes.

        Raises:
            OSError: The other end has gone, or does not take them in time.
        """
        deadline = time.monotonic() + self._patience_s
        noise = secrets.token_bytes(_CHUNK_BYTES)  # a tunnel may compress what repeats
        while num_bytes > 0:
            self._end.settimeout(_left(deadline))
            num_bytes -= self._end.send(noise[:num_bytes])

    def drain(self, num_bytes: int) -> None:
        """Receive so many bytes, and forget them.

        Raises:
            OSError: The other end has gone, or they do not come in time.
        """
        deadline = time.monotonic() + self._patience_s
        early = min(num_bytes, len(self._unread))
        del self._unread[:early]
        num_bytes -= early
        while num_bytes > 0:
            num_bytes -= len(self._receive(min(num_bytes, _CHUNK_BYTES), deadline))

    def close(self) -> None:
        """Close this end."""
        self._end.close()

    def _receive(self, most: int, deadline: float) -> bytes:
        self._end.settimeout(_left(deadline))
        data = self._end.recv(most)
        if not data:
            raise ConnectionResetError("closed the connection")
        return data


def challenge(talk: Conversation, token: bytes) -> None:
    """Let a visitor prove that it knows the token, and prove the same to it.

    Raises:
        OSError: It has gone, or was silent for too long.
        StrangerError: It is something else, or has another token.
        ValueError: Its message lacks something.
    """
    nonce = secrets.token_hex(16)
    talk.say(evener_doctor=_PROTOCOL, evener=__version__, nonce=nonce)
    answer = talk.hear()
    theirs = answer.text("nonce")
    if not _is_proved(answer, _proof(token, "asks", nonce, theirs)):
        talk.say(error="wrong token")
        raise StrangerError("has another token", _SAME_TOKEN)
    talk.say(proof=_proof(token, "answers", nonce, theirs))


def introduce(talk: Conversation, token: bytes) -> None:
    """Prove to the machine that was called that this one knows the token, and check that it does.

    Raises:
        OSError: It has gone, or was silent for too long.
        StrangerError: It is something else, of another version, or has another token.
        ValueError: Its message lacks something.
    """
    greeting = talk.hear()
    if greeting.values.get("evener_doctor") != _PROTOCOL:
        version = greeting.values.get("evener")
        if isinstance(version, str):
            what = f"runs evener {printable(version)[:64]}, and this is {__version__}"
            raise StrangerError(what, "install the same version of evener on both")
        raise StrangerError("sent something that is not a message of evener doctor")
    nonce, own = greeting.text("nonce"), secrets.token_hex(16)
    talk.say(nonce=own, proof=_proof(token, "asks", nonce, own))
    answer = talk.hear()
    if "proof" not in answer:
        raise StrangerError("has another token", _SAME_TOKEN)
    if not _is_proved(answer, _proof(token, "answers", nonce, own)):
        raise StrangerError("does not know the token", _SAME_TOKEN)


def _is_proved(answer: Fields, proof: str) -> bool:
    # compare_digest takes bytes of any kind, but no text beyond ASCII.
    given = answer.text("proof").encode(errors="replace")
    return hmac.compare_digest(given, proof.encode())


def _proof(token: bytes, role: str, challenge_nonce: str, answer_nonce: str) -> str:
    text = f"evener doctor {role} {challenge_nonce} {answer_nonce}"
    return hmac.new(token, text.encode(errors="replace"), hashlib.sha256).hexdigest()


def _left(deadline: float) -> float:
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("was silent for too long")
    return left_s
