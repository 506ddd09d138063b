"""Launchers that meet under attack, beside launchers of other runs, and on ``::1`` alone."""

import os
import re
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from evener.version import __version__
from helpers.launched import Ended, Running, Sandbox
from helpers.limits import PATIENCE_S
from helpers.machines import ADDRESSES, NOBODY, Machines
from helpers.ports import free_port

TELL_PLACE = "print(os.environ['RANK'], os.environ['WORLD_SIZE'], flush=True)\n"

FROM_ANOTHER_VERSION = """
import sys
from evener import version
version.__version__ = "0.0.1"
from evener.cli import main
sys.exit(main(sys.argv[1:]))
"""

#: A host whose ``localhost`` is ``::1``: Python alone resolves names there, C++ is given numbers.
IPV6_ALONE = """
import socket
def resolve(host, *args, ask=socket.getaddrinfo, **kwargs):
    return ask("::1" if host == "localhost" else host, *args, **kwargs)
socket.getaddrinfo = resolve
"""

TRAIN = """
import torch
from evener import Ddp
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with Ddp.setup(model, optimizer, devices="cpu", quiet=True) as ddp:
    data = [(torch.ones(2), torch.ones(1))] * 8
    for epoch in range(1):
        for x, y in ddp.loader(data, batch_size=4, micro_batch_size=2).epoch(epoch):
            ddp.backward(torch.nn.functional.mse_loss(model(x), y))
            ddp.step()
    port = int(os.environ["EVENER_COORDINATOR"].rpartition(":")[2])
    listening = [
        line.split()[1].partition(":")[0]
        for name in ("tcp", "tcp6")
        for line in open(f"/proc/net/{name}").readlines()[1:]
        if line.split()[3] == "0A" and line.split()[1].endswith(f":{port:04X}")
    ]
    ddp.weighted_mean(0.0)  # until all have looked
    print(ddp.rank, ddp.world_size, *listening, flush=True)
"""


MEET_TWICE = """
import torch
from evener import Ddp
model = torch.nn.Linear(2, 1)
with Ddp.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), devices="cpu") as ddp:
    ddp.weighted_mean(0.0)
    tell("in")
    pass_gate()
    ddp.weighted_mean(0.0)
"""


@pytest.fixture
def sandboxes(tmp_path: Path) -> Iterator[list[Sandbox]]:
    with ExitStack() as stack:
        made = []
        for number in range(2):
            folder = tmp_path / f"machine-{number}"
            folder.mkdir()
            made.append(Sandbox(folder))
            token_file = made[-1].token_file("a token that both machines know")
            made[-1].environ["EVENER_TOKEN_FILE"] = str(token_file)
            stack.callback(made[-1].close)
        yield made


def command(node: int, address: str, *script: object) -> list[object]:
    nodes = ("--nnodes", 2, "--node-rank", node, "--master-addr", address, "--nproc", 1)
    return ["launch", *nodes, *script]


def visit(port: int, text: bytes = b"") -> socket.socket:
    """Connects as soon as node 0 listens."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            connection = socket.create_connection(("127.0.0.1", port), PATIENCE_S)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            continue
        connection.sendall(text)
        return connection


def read_until(running: Running, words: str) -> str:
    """Reads what a command writes to standard error until it has said that."""
    assert running.process.stderr is not None
    said = ""
    deadline = time.monotonic() + PATIENCE_S
    while words not in said:
        left_s = max(0.0, deadline - time.monotonic())
        ready, _, _ = select.select([running.process.stderr], [], [], left_s)
        assert ready, f"{words!r} not in {said!r}"
        chunk = os.read(running.process.stderr.fileno(), 65_536)
        assert chunk, f"it has ended: {said}"
        said += chunk.decode()
    return said


def test_no_visitor_ends_or_stalls_the_meeting(sandboxes: list[Sandbox]) -> None:
    first, second = sandboxes
    silent = socket.create_server(("127.0.0.1", 0))  # something that is no coordinator
    port = free_port()
    script = first.script(TELL_PLACE)
    with silent, ExitStack() as visitors:
        silent_port = silent.getsockname()[1]
        waiting = second.evener(*command(1, f"127.0.0.1:{silent_port}", script))
        host = first.evener(*command(0, f"127.0.0.1:{port}", script))
        for _ in range(10):
            visitors.enter_context(visit(port))
        for junk in (b"[" * 4000 + b"\n", b'{"a":' * 800 + b"\n", b"GET / HTTP/1.1\r\n\r\n"):
            visitors.enter_context(visit(port, junk))
        other = second.start(
            sys.executable, "-c", FROM_ANOTHER_VERSION, *command(1, f"127.0.0.1:{port}", script)
        ).end()
        refusal = f"runs evener {__version__}"
        assert (other.code, refusal in other.err) == (1, True), other.err
        assert "runs 0.0.1; install the same version" in other.err
        right = second.evener(*command(1, f"127.0.0.1:{port}", script)).end()
        ended = host.end()
        assert (right.code, right.out, right.err) == (0, "1 2\n", "")
        assert (ended.code, ended.out) == (0, "0 2\n"), ended.err
        assert "\x1b" not in ended.err
        said = read_until(waiting, "waits for the coordinator")
        assert f"waits for the coordinator at 127.0.0.1:{silent_port}" in said


def ends_of(running: list[Running]) -> list[Ended]:
    ended = [each.end() for each in running]
    for each in ended:
        assert each.code == 0, each.err
    return ended


def test_who_comes_after_the_meeting_is_refused_and_who_goes_is_named(
    sandboxes: list[Sandbox],
) -> None:
    address = f"127.0.0.1:{free_port()}"
    words = [
        command(node, address, sandbox.script(MEET_TWICE)) for node, sandbox in enumerate(sandboxes)
    ]
    first, second = [sandbox.evener(*each) for sandbox, each in zip(sandboxes, words, strict=True)]
    for node, sandbox in enumerate(sandboxes):
        assert sandbox.mailbox.read(1) == [f"{node} in"]
    late = sandboxes[1].evener(*words[1]).end()
    refusal = "two machines were started with --node-rank 1"
    assert (late.code, late.out) == (1, "")
    assert late.err.startswith(f"error: {refusal}")
    second.process.kill()  # as where the machine loses its power
    sandboxes[0].open_gate(1)
    ended = first.end()
    assert ended.code == 1
    assert re.search(f"refused a launcher: {refusal}.*; the run continues without it", ended.err)
    assert "\nerror: the connection to node 1 (127.0.0.1) broke off at " in ended.err
    assert re.search(r"rank 0 \(pid \d+\): rank 0 lost ", ended.err)
    assert "Traceback" not in ended.err


def test_localhost_may_be_the_ipv6_loopback_address(sandboxes: list[Sandbox]) -> None:
    port = free_port()
    running = []
    for node, sandbox in enumerate(sandboxes):
        site = sandbox.folder / "site"
        site.mkdir()
        (site / "sitecustomize.py").write_text(IPV6_ALONE)
        sandbox.environ["PYTHONPATH"] = f"{site}{os.pathsep}{sandbox.environ['PYTHONPATH']}"
        script = sandbox.script(TRAIN)
        running.append(sandbox.evener(*command(node, f"localhost:{port}", script)))
    first, second = ends_of(running)
    loopback = "00000000000000000000000001000000"
    assert first.out == f"0 2 {loopback}\n"
    assert second.out == f"1 2 {loopback}\n"


#: What a service does: it forwards one port of its address to machine 0.
FORWARD = """
import socket, sys, threading
def carry(source, target):
    while data := source.recv(65536):
        target.sendall(data)
    target.shutdown(socket.SHUT_WR)
service, machine = sys.argv[1:]
server = socket.create_server((service, 29500))
print("listens", flush=True)
while True:
    visitor, _ = server.accept()
    try:
        forwarded = socket.create_connection((machine, 29500))
    except OSError:  # machine 0 does not listen yet
        visitor.close()
        continue
    for pair in ((visitor, forwarded), (forwarded, visitor)):
        threading.Thread(target=carry, args=pair, daemon=True).start()
"""


@pytest.mark.root
def test_a_service_that_forwards_one_port_is_enough(sandboxes: list[Sandbox]) -> None:
    with Machines() as machines:
        machines.run(1, "ip", "address", "add", f"{NOBODY}/32", "dev", "eth0")
        forward = machines.command(1, sys.executable, "-c", FORWARD, NOBODY, ADDRESSES[0])
        with subprocess.Popen(forward, stdout=subprocess.PIPE) as service:
            assert service.stdout is not None
            assert service.stdout.readline() == b"listens\n"
            running = []
            for node, sandbox in enumerate(sandboxes):
                words = command(node, NOBODY, sandbox.script(TRAIN))
                evener = (sys.executable, "-P", "-m", "evener", *words)
                running.append(sandbox.start(*machines.command(node, *evener)))
            first, second = ends_of(running)
            service.kill()
    assert first.out.startswith("0 2 ")
    assert second.out == "1 2\n"


@pytest.mark.root
def test_the_coordinator_listens_at_the_address_given_alone(sandboxes: list[Sandbox]) -> None:
    with Machines() as machines:
        running = []
        for node, sandbox in enumerate(sandboxes):
            words = command(node, ADDRESSES[0], sandbox.script(TRAIN))
            evener = (sys.executable, "-P", "-m", "evener", *words)
            running.append(sandbox.start(*machines.command(node, *evener)))
        first, second = ends_of(running)
    number = bytes(reversed(socket.inet_aton(ADDRESSES[0]))).hex().upper()
    assert first.out == f"0 2 {number}\n"
    assert second.out == "1 2\n"  # its machine serves nothing
