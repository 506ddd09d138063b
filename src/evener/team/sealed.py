"""What the coordinator and those who connect to it say first, and how messages prove their origin.

The token never travels. Both ends derive a key from it and from two numbers, one of each end, that
are used once. Each message carries an HMAC under that key, of its direction, its place in the order
and its text. So nobody without the token can connect, speak for the coordinator, or send a message
again. Messages are not encrypted.
"""

import hashlib
import hmac
import json
import secrets
from typing import Any, Final

from evener.parsing import Fields, parse_json
from evener.team.channel import Message

#: Longest message in either direction; model fingerprints and formations are far below.
MOST_MESSAGE_BYTES: Final = 256 * 1024
TO_COORDINATOR: Final = "to coordinator"
FROM_COORDINATOR: Final = "from coordinator"


def new_nonce() -> str:
    """Return a number that is used once, in hexadecimal."""
    return secrets.token_hex(16)


class Seal:
    """The key of one connection, and how many messages have gone and come.

    Args:
        token: The team's; ``None`` where it has none, and messages travel as they are.
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
        """Return a message as it travels."""
        if self._key is None:
            return message
        body = json.dumps(message)
        mac = self._mac(self._outgoing, self._num_sent, body)
        self._num_sent += 1
        return {"body": body, "mac": mac}

    def open(self, message: Message) -> Fields:
        """Return what a message says.

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
