"""``evener doctor ADDR``: ask another machine, and measure the link to it."""

import json
import socket
import statistics
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final

from pydantic import TypeAdapter

from evener.comm.addresses import is_unknown_name, parse_address
from evener.doctor.answering import MOST_BYTES
from evener.doctor.conversation import OTHER_PORT, Conversation, StrangerError, introduce
from evener.doctor.host_facts import HostFacts, MeasuredLink
from evener.doctor.judgement import Problem
from evener.parsing import MOST_WHOLE
from evener.team.nodes import DEFAULT_PORT
from evener.team.terminal import printable

#: Seconds to wait for an answer.
PATIENCE_S: Final = 15.0

_CONNECT_S: Final = 5.0
_NUM_PINGS: Final = 15
_FIRST_BYTES: Final = 1 << 18
_LONG_ENOUGH_S: Final = 0.2
_FACTS: Final = TypeAdapter(HostFacts)


@dataclass(frozen=True, slots=True)
class Reply:
    """The outcome of asking.

    Attributes:
        facts: Of the other host; ``None`` if it did not tell.
        link: To it.
        failure: Why it did not tell.
    """

    facts: HostFacts | None = None
    link: MeasuredLink | None = None
    failure: Problem | None = None


def ask(address: str, token: bytes, patience_s: float = PATIENCE_S) -> Reply:
    """Ask another machine for its facts, and measure the link.

    Args:
        address: ``HOST`` or ``HOST:PORT``, where ``evener doctor --listen`` runs.
        token: What both must know; empty for none.
        patience_s: Longest wait for an answer; the other machine may be answering somebody else.

    Raises:
        ConfigError: It is not an address.
    """
    host, port = parse_address(address, "ADDR")
    where = f"{host} port {port or DEFAULT_PORT}"
    try:
        connection = socket.create_connection((host, port or DEFAULT_PORT), _CONNECT_S)
    except (OSError, UnicodeError) as error:
        return Reply(failure=_explain_no_connection(where, host, error))
    try:
        with closing(Conversation(connection, patience_s)) as talk:
            introduce(talk, token)
            facts = _ask_facts(talk)
            link = _measure(talk)
            talk.say(want="end")
            return Reply(facts, link)
    except StrangerError as error:
        return Reply(failure=Problem("between", f"{where} {error}", error.remedy))
    except ValueError as error:
        told = f"{where} sent a message in which {error}"
        return Reply(failure=Problem("between", told, OTHER_PORT))
    except OSError as error:
        why = "was silent for too long" if isinstance(error, TimeoutError) else str(error)
        return Reply(
            failure=Problem(
                "between",
                f"{where} took the connection, and then: {printable(why)}",
                "look at the output of evener doctor --listen there; another program may use that "
                "port, or it may be answering another machine: ask again",
            )
        )


def _explain_no_connection(where: str, host: str, error: OSError | UnicodeError) -> Problem:
    if is_unknown_name(error):
        return Problem(
            "between",
            f"the name {host!r} is unknown here",
            "give an IP address of the other machine (`ip address` there lists them)",
        )
    if isinstance(error, ConnectionRefusedError):
        return Problem(
            "between",
            f"nothing listens on {where}",
            "start `evener doctor --listen ADDR --token-file FILE` there first, with an address "
            "that this machine can reach; by default it listens on loopback alone",
        )
    if isinstance(error, TimeoutError):
        return Problem(
            "between",
            f"no answer from {where} within {_CONNECT_S:.0f} s",
            "check the address, and the firewalls on the way: they drop what they do not allow",
        )
    why = getattr(error, "strerror", None) or str(error)
    return Problem("between", f"{where} cannot be reached ({why})", "check address and network")


def _ask_facts(talk: Conversation) -> HostFacts:
    talk.say(want="facts")
    told = talk.hear().values.get("facts")
    try:
        _check_numbers(told)
        return _FACTS.validate_json(json.dumps(told), strict=True)
    except ValueError:  # pydantic's, too
        raise StrangerError(
            "told its facts in a form that is unknown here",
            "install the same version of evener on both",
        ) from None


def _check_numbers(value: Any) -> None:
    """Raise ValueError for numbers that no host has, with which nothing can be computed."""
    if isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            _check_numbers(one)
    elif isinstance(value, int | float) and not abs(value) <= MOST_WHOLE:
        raise ValueError


def _measure(talk: Conversation) -> MeasuredLink:
    trips, aheads = [], []
    for _ in range(_NUM_PINGS):
        asked, started = time.time(), time.monotonic()
        talk.say(want="time")
        theirs = talk.hear().number("time")
        trips.append(time.monotonic() - started)
        aheads.append(theirs - asked - trips[-1] / 2)
    shortest_s = min(trips)

    def pour(num_bytes: int) -> None:
        talk.say(want="drain", bytes=num_bytes)
        talk.pour(num_bytes)
        talk.hear()

    def drain(num_bytes: int) -> None:
        talk.say(want="pour", bytes=num_bytes)
        talk.drain(num_bytes)

    return MeasuredLink(
        round_trip_s=statistics.median(trips),
        bytes_per_s_there=_speed(pour, shortest_s),
        bytes_per_s_here=_speed(drain, shortest_s),
        clock_ahead_s=aheads[trips.index(shortest_s)],
        clock_error_s=shortest_s / 2,
        return_failure=_ask_for_call(talk),
    )


def _speed(transfer: Callable[[int], None], round_trip_s: float) -> float:
    """Return bytes per second, of the first transfer that takes long enough to tell."""
    num_bytes = _FIRST_BYTES
    while True:
        started = time.monotonic()
        transfer(num_bytes)
        took_s = max(1e-6, time.monotonic() - started - round_trip_s)
        if took_s >= _LONG_ENOUGH_S or num_bytes >= MOST_BYTES:
            return num_bytes / took_s
        num_bytes = min(MOST_BYTES, 4 * num_bytes)


def _ask_for_call(talk: Conversation) -> str:
    """Return why a connection from there to here failed; empty where it succeeded."""
    own = talk.own_address
    family = socket.AF_INET6 if ":" in own else socket.AF_INET
    # No process needs to accept it: the kernel answers for a socket that listens.
    with socket.create_server((own, 0), family=family) as door:
        talk.say(want="call", port=door.getsockname()[1])
        return printable(talk.hear().text("failure"))[:200]
