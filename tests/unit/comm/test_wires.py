"""Sockets that torch has opened, among all descriptors of a process."""

import json
import os
import socket
from pathlib import Path

import pytest

from evener.comm import wires
from evener.comm.wires import Wires, list_sockets

linux = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="lists its descriptors")


def open_descriptors() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


@linux
def test_a_number_that_stands_for_another_file_since_it_was_listed_costs_no_descriptor(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As where another thread closes a socket and opens a file meanwhile."""
    with (tmp_path / "file").open("w") as file:
        listings = [{}, {file.fileno(): "socket:[1]"}, {file.fileno(): "socket:[1]"}]
        monkeypatch.setattr(wires, "_sockets", lambda: listings.pop(0))
        before = open_descriptors()
        with Wires.opened() as opened:
            pass
        opened.cut()
        assert open_descriptors() == before
        file.write("it is open")


@linux
def test_connections_are_cut_and_stay_open() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        before = list_sockets()
        mine = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
        with mine, theirs:
            names = (f"{host} {port}" for host, port in (theirs.getsockname(), mine.getsockname()))
            peers = json.dumps([[*names]]).encode()
            opened = Wires.between(lambda own: [own, peers], before=before)
            assert not opened.is_broken
            opened.cut()
            assert theirs.recv(1) == b""
            assert os.fstat(mine.fileno())
