"""Ways to exchange, tried on this host."""

import errno
import os
import socket
import sys

import psutil
import pytest
import torch

from evener.doctor.trials import (
    try_gloo,
    try_loopback,
    try_nccl,
    try_port,
    try_shared_memory,
)
from helpers.limits import PATIENCE_S
from helpers.ports import free_port


def test_what_works_here() -> None:
    assert try_gloo() == ""
    assert try_loopback() == ""
    assert try_port(free_port()) == ""


def test_a_port_in_use_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert try_port(server.getsockname()[1]) == os.strerror(errno.EADDRINUSE)


def test_an_interface_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none0")
    assert "GLOO_SOCKET_IFNAME is 'none0'" in try_gloo()


@pytest.mark.skipif(sys.platform != "linux", reason="memory without a name is Linux's")
def test_a_sandbox_that_forbids_shared_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert try_shared_memory() == ""

    def refuse(name: str, flags: int) -> int:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)
    assert "Operation not permitted" in try_shared_memory()


def test_nccl_is_tried_in_processes_and_what_fails_there_is_told() -> None:
    before = psutil.Process().children()
    failure = try_nccl([torch.device("cpu")] * 2, timeout_s=PATIENCE_S)
    assert failure.startswith("on rank 0: ")  # it finds no GPU
    assert psutil.Process().children() == before


def test_processes_that_do_not_answer_are_ended() -> None:
    before = psutil.Process().children()
    # They take longer to load torch.
    failure = try_nccl([torch.device("cpu")] * 2, timeout_s=0.05)
    assert failure == "NCCL has not answered within 0.05 s"
    assert psutil.Process().children() == before
