"""Names and numbers of hosts: what stands for this host alone, and where sockets listen."""

import socket
from contextlib import closing
from typing import Any

import pytest

from evener.comm.addresses import (
    bind,
    end_when_unreachable,
    is_loopback,
    listens_everywhere,
    numbers_of,
    open_port,
)
from evener.comm.network import own_address
from evener.errors import ConfigError


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Names as this host resolves them; numbers resolve to themselves."""
    known: dict[str, list[str]] = {}
    ask = socket.getaddrinfo

    def resolve(host: Any, *args: Any, **kwargs: Any) -> list[Any]:
        numbers = known.get(host, [host])
        return [entry for number in numbers for entry in ask(number, *args, **kwargs)]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    return known


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.8.0.1", "::1", "[::1]"])
def test_what_stands_for_this_host_alone(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["node7", "10.0.0.1", "2001:db8::1", "127.0.0.1.example.org"])
def test_what_stands_for_other_hosts(host: str) -> None:
    assert not is_loopback(host)


def test_ipv4_comes_first(names: dict[str, list[str]]) -> None:
    names["node7"] = ["2001:db8::1", "192.0.2.7"]
    assert numbers_of("node7") == ["192.0.2.7", "2001:db8::1"]
    assert numbers_of("fe80::1%lo") == ["fe80::1%lo"]  # the scope is kept


@pytest.mark.parametrize(
    ("numbers", "bound"), [(["::1"], "::1"), (["::1", "127.0.0.1"], "127.0.0.1")]
)
def test_localhost_is_what_the_host_says(
    names: dict[str, list[str]], numbers: list[str], bound: str
) -> None:
    names["localhost"] = numbers
    with bind("localhost", 0) as server:
        assert server.getsockname()[0] == bound


def test_an_address_of_this_host_is_listened_on_alone() -> None:
    own = own_address("192.0.2.1", 1)
    if is_loopback(own):
        pytest.skip("this host has no network")
    with bind(own, 0, 1) as server:
        assert server.getsockname()[0] == own


@pytest.mark.parametrize(
    "numbers",
    [
        ["192.0.2.77"],  # set aside for documentation: forwarded to this host, perhaps
        ["127.0.1.1"],  # what many distributions map a host's own name to
    ],
)
def test_what_others_could_not_reach_is_listened_on_everywhere(
    names: dict[str, list[str]], numbers: list[str]
) -> None:
    names["node7"] = numbers
    with closing(bind("node7", 0)) as server:
        assert listens_everywhere(server)


def test_a_port_is_open_to_other_hosts_only_with_a_token(names: dict[str, list[str]]) -> None:
    names["localhost"] = []  # unknown here, so the socket listens on all addresses
    for host in ("localhost", "0.0.0.0", "node7"):
        with pytest.raises(ConfigError, match=f"box on {host} would answer .* --token-file"):
            open_port(host, 0, program="box", is_guarded=False)
    with open_port("localhost", 0, program="box", is_guarded=True) as server:
        assert listens_everywhere(server)


def test_a_connection_on_which_nothing_is_sent_ends_with_its_machine() -> None:
    with socket.socket() as connection:
        end_when_unreachable(connection, 8.0)
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
