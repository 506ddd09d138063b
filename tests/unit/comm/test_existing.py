"""Groups that the user has made."""

import socket

import pytest

from evener.comm import existing
from evener.comm.addresses import bind
from evener.comm.existing import device_of_group, find_place


@pytest.mark.parametrize(
    ("backend", "kinds", "device"),
    [
        ("gloo", ["cuda"], "cpu"),
        ("cpu:gloo,cuda:nccl", ["cuda"], "cpu"),
        ("nccl", ["cuda"], "cuda"),
        ("cuda:nccl", ["cuda"], "cuda"),
        ("xccl", ["xpu"], "xpu"),
        ("gloo", ["mps"], "cpu"),
        ("mpi", ["cuda"], "cpu"),
        ("hccl", ["npu"], "cpu"),
        ("nccl", [], "cpu"),
    ],
)
def test_tensors_lie_where_the_group_can_exchange_them(backend, kinds, device):
    assert device_of_group(backend, kinds) == device


@pytest.mark.parametrize("address", ["192.0.2.7", "2001:db8::7"])
def test_rank_0_can_listen_on_every_network_that_its_address_may_be_of(monkeypatch, address):
    monkeypatch.setattr(existing.dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(existing.dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(existing, "_gather", lambda group, payload: [payload, b"another host"])
    monkeypatch.setattr(existing, "own_address", lambda *_: address)
    place = find_place(None)
    assert (place["rank"], place["world_size"], place["coordinator_addr"]) == (0, 2, address)
    existing._reserved.pop().close()
    with bind(address, place["coordinator_port"], 1) as listener:
        both = socket.has_dualstack_ipv6()
        assert listener.family == (socket.AF_INET6 if both else socket.AF_INET)
        with socket.create_connection(("127.0.0.1", place["coordinator_port"]), timeout=30):
            pass
