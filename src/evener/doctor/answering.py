"""``evener doctor --listen``: answer another machine that asks for facts."""

import socket
import time
from contextlib import closing
from dataclasses import asdict
from typing import Final

from evener.comm.addresses import LOOPBACK, open_port, parse_address
from evener.doctor.conversation import Conversation, StrangerError, challenge
from evener.doctor.host_facts import HostFacts
from evener.team.nodes import DEFAULT_PORT
from evener.team.terminal import say

#: Most bytes of one transfer.
MOST_BYTES: Final = 64 << 20
#: Seconds without a visitor after which listening ends.
IDLE_S: Final = 600.0
#: Seconds of silence after which a visitor is cut off, because the next one waits.
PATIENCE_S: Final = 5.0

_PAUSE_S: Final = 0.05
_CALL_S: Final = 3.0
_MOST_COMPLAINTS: Final = 8  # are printed; what is printed for each would fill a disk


def open_door(address: str | None, token: bytes) -> socket.socket:
    """Return a socket that listens for other machines.

    Args:
        address: ``HOST`` or ``HOST:PORT``; loopback without it.
        token: What visitors must know; needed on any address but loopback.

    Raises:
        ConfigError: It is not an address, or lacks a token.
        LaunchError: It cannot listen there.
    """
    host, port = parse_address(address or LOOPBACK, "ADDR", may_bind=True)
    return open_port(host, port or DEFAULT_PORT, program="evener doctor", is_guarded=bool(token))


def answer_visitors(
    door: socket.socket,
    facts: HostFacts,
    token: bytes,
    *,
    idle_s: float = IDLE_S,
    patience_s: float = PATIENCE_S,
) -> None:
    """Answer visitors, one after another, until none has come for a while.

    Args:
        door: See ``open_door``.
        facts: What to tell of this host.
        token: What visitors must prove to know.
        idle_s: Seconds without a visitor who knows the token.
        patience_s: Longest silence of a visitor; the next one waits meanwhile.
    """
    host, port = door.getsockname()[:2]
    say(f"evener: doctor listens on {host} port {port}; on the other machine, ask this address")
    deadline = time.monotonic() + idle_s
    complaints = 0
    while (left_s := deadline - time.monotonic()) > 0:
        door.settimeout(left_s)
        try:
            connection, (visitor, *_) = door.accept()
        except TimeoutError:
            return
        except OSError:  # it has gone again, or there are no descriptors left
            time.sleep(_PAUSE_S)
            continue
        try:
            with closing(Conversation(connection, patience_s)) as talk:
                challenge(talk, token)
                _answer(talk, facts)
            say(f"evener: answered {visitor}")
            deadline = time.monotonic() + idle_s
        except (OSError, StrangerError, ValueError) as error:
            complaints += 1
            if complaints <= _MOST_COMPLAINTS:
                told = "sent a message in which " if isinstance(error, ValueError) else ""
                say(f"evener: {visitor} {told}{error}")


def _answer(talk: Conversation, facts: HostFacts) -> None:
    while True:
        message = talk.hear()
        match message.text("want"):
            case "facts":
                talk.say(facts=asdict(facts))
            case "time":
                talk.say(time=time.time())
            case "drain":
                talk.drain(message.whole("bytes", most=MOST_BYTES))
                talk.say(done=True)
            case "pour":
                talk.pour(message.whole("bytes", most=MOST_BYTES))
            case "call":
                port = message.whole("port", most=65_535)
                talk.say(failure=_call(talk.peer_address, port))
            case "end":
                return
            case other:
                raise StrangerError(f"wants {other!r}, which is unknown here")


def _call(address: str, port: int) -> str:
    """Return why a connection to the visitor failed; empty where it succeeded."""
    try:
        socket.create_connection((address, port), _CALL_S).close()
    except TimeoutError:
        return f"no answer within {_CALL_S:.0f} s"
    except OSError as error:
        return error.strerror or str(error)
    return ""
