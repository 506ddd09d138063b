"""Ports for tests that must know one before anybody listens on it."""

import random
import socket
from contextlib import suppress

from helpers.limits import PATIENCE_S, wait_until

# Below those that the system hands out to whoever connects or asks for any.
PORTS = range(15_000, 30_000)


def free_port() -> int:
    """A port of this host on which nobody listens now; another one each time."""
    draw = random.SystemRandom()  # not the tests' own seed: other tests run at the same time
    while True:
        port = draw.choice(PORTS)
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue


def connect_soon(port: int) -> socket.socket:
    """Connects as soon as somebody listens."""
    found: list[socket.socket] = []

    def connect() -> bool:
        with suppress(ConnectionRefusedError):
            found.append(socket.create_connection(("127.0.0.1", port), PATIENCE_S))
        return bool(found)

    wait_until(connect)
    return found[0]
