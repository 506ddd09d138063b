"""Hosts and ports as people write them."""

import pytest

from evener.comm.addresses import parse_address
from evener.errors import ConfigError


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("node7", ("node7", None)),
        ("node_7.cluster-2.example", ("node_7.cluster-2.example", None)),
        ("nöde.example", ("nöde.example", None)),
        (" node7:29500 ", ("node7", 29500)),
        ("10.1.2.3", ("10.1.2.3", None)),
        ("10.1.2.3:1", ("10.1.2.3", 1)),
        ("2001:db8::1", ("2001:db8::1", None)),
        ("fe80::1%eth0", ("fe80::1%eth0", None)),
        ("[2001:db8::1]", ("2001:db8::1", None)),
        ("[2001:db8::1]:65535", ("2001:db8::1", 65535)),
    ],
)
def test_a_host_and_perhaps_a_port(address, expected):
    assert parse_address(address, "addr") == expected


@pytest.mark.parametrize(
    ("address", "said"),
    [
        *(
            (bad, "which is not a host")
            for bad in ("", ":29500", "a b", "http://node7", "a,b", "a\0b", "[::1]x", "node7:1:2")
        ),
        ("2001:db8::1:29500", "stands in brackets"),
        *((bad, "stands for every address") for bad in ("0.0.0.0", "::", "[::]:9", "0", "0.0:9")),
        *((bad, "give a port from 1 to 65535") for bad in ("n:", "n:x", "n:0", "n:-5", "n:65536")),
        *((bad, "as text") for bad in (None, b"node7", 7)),
    ],
)
def test_what_is_no_address_is_named(address, said):
    with pytest.raises(ConfigError) as caught:
        parse_address(address, "addr")
    assert f"addr is {address!r}" in str(caught.value)
    assert said in str(caught.value)
