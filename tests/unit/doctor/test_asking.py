"""Two ends on loopback: right, wrong, silent and hostile ones."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress

import pytest

from evener.doctor import conversation
from evener.doctor.answering import answer_visitors, open_door
from evener.doctor.asking import ask
from evener.doctor.conversation import LIMIT_BYTES, Conversation, challenge
from evener.errors import ConfigError, LaunchError
from evener.version import __version__
from helpers.hosts import HEALTHY
from helpers.limits import PATIENCE_S
from helpers.ports import free_port

TOKEN = b"0123456789abcdef"
OTHER_TOKEN = b"fedcba9876543210"
#: Seconds after which either end gives up, where a test is about silence.
SOON_S = 0.5


@contextmanager
def answering(token: bytes = b"", patience_s: float = PATIENCE_S) -> Iterator[str]:
    """A host that answers; its address."""
    address = f"127.0.0.1:{free_port()}"
    door = open_door(address, token)
    # Ends when the door is closed: nobody waits for idle_s.
    limits = {"idle_s": PATIENCE_S, "patience_s": patience_s}
    thread = threading.Thread(
        target=answer_until_closed, args=(door, token), kwargs=limits, daemon=True
    )
    thread.start()
    try:
        yield address
    finally:
        door.shutdown(socket.SHUT_RDWR)
        door.close()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def answer_until_closed(door: socket.socket, token: bytes, **limits: float) -> None:
    with suppress(OSError, ValueError):  # the door was closed
        answer_visitors(door, HEALTHY, token, **limits)


@contextmanager
def pretending(act: Callable[[socket.socket], None]) -> Iterator[str]:
    """Something else that listens; it acts on one connection, then closes it."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            connection, _ = server.accept()
            with connection:
                act(connection)

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


@pytest.mark.parametrize("token", [b"", TOKEN])
def test_facts_and_link(token: bytes) -> None:
    with answering(token) as address:
        reply = ask(address, token)
    assert reply.failure is None
    assert reply.facts == HEALTHY
    link = reply.link
    assert link is not None
    assert 0 < link.clock_error_s <= link.round_trip_s
    assert abs(link.clock_ahead_s) < PATIENCE_S  # it is the same clock
    assert link.bytes_per_s_there > 0
    assert link.bytes_per_s_here > 0
    assert link.return_failure == ""


@pytest.mark.parametrize(("theirs", "mine"), [(TOKEN, OTHER_TOKEN), (TOKEN, b""), (b"", TOKEN)])
def test_another_token_is_refused_and_the_next_visitor_is_answered(
    theirs: bytes, mine: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    with answering(theirs) as address:
        refused = ask(address, mine)
        assert ask(address, theirs).failure is None
    assert (refused.facts, refused.link) == (None, None)
    assert refused.failure is not None
    assert "has another token" in refused.failure.what
    assert "--token-file" in refused.failure.remedy
    assert "127.0.0.1 has another token" in capsys.readouterr().err


def greet(connection: socket.socket, **greeting: object) -> None:
    connection.sendall(json.dumps(greeting).encode() + b"\n")
    connection.recv(1)


def test_a_host_that_does_not_prove_its_token_is_not_believed() -> None:
    def lie(connection: socket.socket) -> None:
        connection.sendall(b'{"evener_doctor": 1, "nonce": "00"}\n{"proof": "00"}\n')
        connection.recv(LIMIT_BYTES)

    with pretending(lie) as address:
        failure = ask(address, TOKEN).failure
    assert failure is not None
    assert "does not know the token" in failure.what


def test_another_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pretending(lambda c: greet(c, evener_doctor=2, evener="9.9\x1b[2J")) as address:
        failure = ask(address, b"").failure
    assert failure is not None
    assert f"runs evener 9.9?[2J, and this is {__version__}" in failure.what
    assert "same version" in failure.remedy


def test_facts_in_another_form_are_not_believed() -> None:
    def tell(facts: object) -> Callable[[socket.socket], None]:
        def act(connection: socket.socket) -> None:
            with closing(Conversation(connection, PATIENCE_S)) as talk:
                challenge(talk, b"")
                talk.hear()
                talk.say(facts=facts)

        return act

    shape = json.loads(
        json.dumps(HEALTHY, default=lambda o: {n: getattr(o, n) for n in o.__slots__})
    )
    huge = shape | {"devices_shown": 10**400}
    for facts in (None, {}, [], shape | {"host": 7}, huge, shape | {"devices": [{}]}):
        with pretending(tell(facts)) as address:
            failure = ask(address, b"").failure
        assert failure is not None
        assert "in a form that is unknown here" in failure.what


def test_nothing_listens() -> None:
    failure = ask(f"127.0.0.1:{free_port()}", b"").failure
    assert failure is not None
    assert "nothing listens on 127.0.0.1 port" in failure.what
    assert "evener doctor --listen" in failure.remedy


def test_a_name_that_nobody_has() -> None:
    failure = ask("no-such-host.invalid", b"").failure
    assert failure is not None
    assert failure.remedy


def test_what_listens_is_silent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        failure = ask(f"127.0.0.1:{server.getsockname()[1]}", b"", SOON_S).failure
    assert failure is not None
    assert "silent for too long" in failure.what


@pytest.mark.parametrize(
    "noise",
    [b"HTTP/1.1 400 Bad Request\r\n\r\n", bytes(range(256)) + b"\n", b"[]\n", b"{}\n", b"1"],
)
def test_what_listens_is_something_else(noise: bytes) -> None:
    with pretending(lambda connection: connection.sendall(noise)) as address:
        failure = ask(address, b"").failure
    assert failure is not None
    assert failure.where == "between"
    assert "port" in failure.remedy


VISITORS = {
    "random bytes": bytes(range(256)) * 16 + b"\n",
    "no end": b"{" * (LIMIT_BYTES + 2),
    "depth": b"[" * 5000 + b"\n",
    "a list": b"[]\n",
    "no proof": b'{"nonce": "00"}\n',
    "a number": b'{"nonce": 1, "proof": 2}\n',
    "letters": '{"nonce": "\\ud800", "proof": "ä\\ud800"}\n'.encode(),
    "nothing": b"",
}


def test_visitors_that_make_no_sense_leave_and_the_next_is_answered(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with answering(TOKEN, SOON_S) as address:
        host, _, port = address.partition(":")
        for noise in VISITORS.values():
            # Either end may close while the other speaks.
            with (
                socket.create_connection((host, int(port)), PATIENCE_S) as visitor,
                suppress(OSError),
            ):
                visitor.sendall(noise)
                visitor.shutdown(socket.SHUT_WR)
                while visitor.recv(LIMIT_BYTES):
                    pass
        assert ask(address, TOKEN).failure is None
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert said.count("evener: 127.0.0.1 ") == len(VISITORS)


def test_a_silent_visitor_does_not_keep_others_out() -> None:
    with answering(b"", SOON_S) as address:
        host, _, port = address.partition(":")
        with socket.create_connection((host, int(port)), PATIENCE_S):
            assert ask(address, b"").failure is None


@pytest.mark.parametrize(
    "wish",
    [
        {"want": "pour", "bytes": 1 << 40},
        {"want": "drain", "bytes": -1},
        {"want": "call", "port": 10**6},
        {"want": "everything"},
        {},
    ],
)
def test_impossible_wishes_end_the_conversation(wish: dict[str, object]) -> None:
    with answering(TOKEN) as address:
        host, _, port = address.partition(":")
        connection = socket.create_connection((host, int(port)), PATIENCE_S)
        with closing(Conversation(connection, PATIENCE_S)) as talk:
            conversation.introduce(talk, TOKEN)
            talk.say(**wish)
            with pytest.raises(OSError):  # noqa: PT011  # reset or closed
                talk.hear()


def test_other_addresses_than_loopback_need_a_token() -> None:
    for address in ("0.0.0.0", "192.0.2.1:29510", "[::]"):
        with pytest.raises(ConfigError, match="--token-file"):
            open_door(address, b"")
    with pytest.raises(ConfigError, match="ADDR is 'a b'"):
        open_door("a b", TOKEN)


def test_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(LaunchError, match=f"port {port} .*give another port"):
            open_door(f"127.0.0.1:{port}", b"")


def test_a_door_that_nobody_uses_closes() -> None:
    with closing(open_door(f"127.0.0.1:{free_port()}", b"")) as door:
        answer_visitors(door, HEALTHY, b"", idle_s=0.01)
