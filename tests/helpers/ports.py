"""Ports for tests that must know one before anybody listens on it."""

import random
import socket

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
