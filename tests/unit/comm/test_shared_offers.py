"""Which ranks can share memory, and who is let in."""

import os
import socket
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from evener.comm.shared_links import LinkListener
from evener.comm.shared_offers import Spot, find_obstacle
from helpers.limits import PATIENCE_S

HERE = Spot(0, "alpha", "boot-1", 7, 1000, (0, 1), "door", "token")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"cores": (2,), "listener": "x", "token": "y"}, ""),
        ({"host": "beta", "kernel": "boot-2"}, "rank 0 runs on host alpha and rank 1 on beta"),
        ({"network": 8}, "rank 0 runs in one network namespace and rank 1 in another"),
        ({"user": 0}, "rank 0 runs as user 1000 and rank 1 as user 0"),
        ({"obstacle": "no memory"}, "rank 1 cannot share memory (no memory)"),
    ],
)
def test_ranks_share_memory_on_one_system_as_one_user(changes, words):
    found = find_obstacle([HERE, replace(HERE, rank=1, **changes)])
    assert found.startswith(words)
    assert bool(found) == bool(words)


def test_a_process_without_the_token_is_refused():
    first, second = LinkListener(), LinkListener()
    listeners = [(first.name, first.token), (second.name, second.token)]
    stranger = socket.socket(socket.AF_UNIX)
    stranger.connect(f"\0evener-{first.name}")
    stranger.sendall(b"no token" + bytes(16))
    arrived = {}

    def connect(rank, listener, descriptor):
        arrived[rank] = listener.connect_all(rank, listeners, [descriptor], 20.0)

    with Path(os.devnull).open() as nothing:
        threads = [
            threading.Thread(target=connect, args=(rank, listener, nothing.fileno()))
            for rank, listener in enumerate((first, second))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
    assert {rank: list(others) for rank, others in arrived.items()} == {0: [1], 1: [0]}
    assert stranger.recv(1) == b""
    for others in arrived.values():
        for connection, descriptors in others.values():
            connection.close()
            assert len(descriptors) == 1
            os.close(descriptors[0])
    for each in (stranger, first, second):
        each.close()


def test_a_rank_that_does_not_come_is_not_waited_for_for_ever():
    first, second = LinkListener(), LinkListener()
    with pytest.raises(TimeoutError):
        first.connect_all(0, [(first.name, first.token), (second.name, second.token)], [], 0.2)
    second.close()
    third = LinkListener()
    with pytest.raises(ConnectionRefusedError):
        third.connect_all(1, [(first.name, first.token), (third.name, third.token)], [], 0.2)
