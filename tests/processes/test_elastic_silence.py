"""A machine of an elastic team that falls silent: nothing ends its connections."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from evener.protocol.formation import Deadlines
from evener.team.failures import START_AGAIN
from helpers.coordinators import serving
from helpers.launched import Running, Sandbox
from helpers.limits import PATIENCE_S
from helpers.machines import ADDRESSES, Machines

NUM_SAMPLES = 64

#: Trains until there is a file ``stop``; each worker notes the windows that it sees committed.
SCRIPT = f"""
import json, os, torch
from pathlib import Path
from evener import Ddp
here = Path(__file__).parent
log = (here / os.environ["WHO"]).open("w", buffering=1)
print(os.getpid(), file=log)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with Ddp.setup(model, optimizer, devices="cpu", policy=os.environ["POLICY"]) as ddp:
    @ddp.on_commit
    def note(result):
        ranges = result.ranges or [result.committed]
        print(json.dumps([result.window, result.epoch, ranges]), file=log)
        if (here / "stop").exists():
            ddp.stop()
    loader = ddp.loader([(torch.ones(1) * i, i) for i in range({NUM_SAMPLES})], batch_size=4)
    for epoch in ddp.epochs(1_000_000):
        for x, ids in loader.epoch(epoch):
            ddp.backward(model(x).square().mean() / 1e4)
            ddp.step()
"""


@pytest.fixture
def sandbox(tmp_path: Path) -> Iterator[Sandbox]:
    sandbox = Sandbox(tmp_path)
    sandbox.environ["OMP_NUM_THREADS"] = "1"
    yield sandbox
    sandbox.close()


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


class Log:
    """What a worker has noted."""

    def __init__(self, sandbox: Sandbox, who: str) -> None:
        self.path = sandbox.folder / who

    def lines(self) -> list[list[object]]:
        text = self.path.read_text() if self.path.exists() else ""
        return [json.loads(f"[{line}]") for line in text.split("\n")[:-1]]

    @property
    def pid(self) -> int:
        ((pid,),) = self.lines()[:1]
        assert isinstance(pid, int)
        return pid

    def windows(self) -> dict[int, tuple[int, list[list[int]]]]:
        return {window: (epoch, ranges) for ((window, epoch, ranges),) in self.lines()[1:]}  # type: ignore[misc]

    def wait_for_more(self, count: int) -> None:
        before = len(self.windows())
        wait_for(lambda: len(self.windows()) >= before + count)


def check(one: Log, other: Log) -> None:
    """Two that were apart never committed unlike windows, and each sample counts once."""
    windows = one.windows()
    assert [*windows] == [*range(len(windows))]
    assert all(windows[number] == content for number, content in other.windows().items())
    epochs: dict[int, list[int]] = {}
    for epoch, ranges in windows.values():
        epochs.setdefault(epoch, []).extend(i for start, stop in ranges for i in range(start, stop))
    last = epochs.pop(max(epochs))
    assert len(set(last)) == len(last)
    assert epochs
    assert all(sorted(ids) == [*range(NUM_SAMPLES)] for ids in epochs.values())


def test_a_launcher_that_is_stopped_with_its_workers_holds_nobody_up(sandbox: Sandbox) -> None:
    script, logs = sandbox.script(SCRIPT), [Log(sandbox, who) for who in "ab"]
    sandbox.environ["POLICY"] = "async"
    with serving(1, 2, Deadlines(host_lease_s=4.0)) as address:
        running = []
        for log in logs:
            sandbox.environ["WHO"] = log.path.name
            running.append(sandbox.evener("join", address, script))
            wait_for(log.windows)  # so that the first has seen all windows
        stays, stops = logs
        stopped = [running[1].process.pid, stops.pid]
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        stays.wait_for_more(100)
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
        stops.wait_for_more(10)
        (sandbox.folder / "stop").touch()
        assert [each.end().code for each in running] == [0, 0]
    check(stays, stops)


@pytest.mark.root
def test_a_machine_whose_link_goes_down_is_left_behind_and_stops(sandbox: Sandbox) -> None:
    script, logs = sandbox.script(SCRIPT), [Log(sandbox, who) for who in "ab"]
    sandbox.environ["POLICY"] = "sync"
    (token := sandbox.folder / "token").write_text("0" * 32)
    token.chmod(0o600)
    with Machines() as machines:
        serve = ("coordinator", "1:2", "--bind", f"{ADDRESSES[0]}:29600", "--patience-s", 5)
        command = (sys.executable, "-P", "-m", "evener", *serve, "--token-file", token)
        coordinator = sandbox.start(*machines.command(0, *command))
        running = []
        join = (sys.executable, "-P", "-m", "evener", "join", f"{ADDRESSES[0]}:29600", script)
        for node, log in enumerate(logs):
            sandbox.environ["WHO"] = log.path.name
            command = machines.command(node, *join, "--token-file", token)
            running.append(sandbox.start(*command))
            wait_for(log.windows)
        machines.run(1, "ip", "link", "set", "eth0", "down")
        logs[0].wait_for_more(100)
        lost = running[1].end()
        (sandbox.folder / "stop").touch()
        assert running[0].end().code == 0
        coordinator.signal(signal.SIGTERM)
        assert "is lost: neither it nor its launcher has been heard of" in coordinator.end().err
    assert lost.code == START_AGAIN
    assert f"the coordinator at {ADDRESSES[0]}:29600 has not answered since " in lost.err
    assert "waited 5 s for it (patience_s; Network is unreachable)" in lost.err
    check(*logs)


@pytest.mark.root
def test_a_joiner_that_reaches_the_coordinator_alone_is_refused_and_the_team_continues(
    sandbox: Sandbox,
) -> None:
    """Both machines reach the coordinator; neither reaches the address of the other's worker."""
    script, log = sandbox.script(SCRIPT), Log(sandbox, "a")
    sandbox.environ["POLICY"] = "sync"
    (token := sandbox.folder / "token").write_text("0" * 32)
    token.chmod(0o600)
    serve = (
        "from evener.protocol.formation import Deadlines\n"
        "from evener.team.coordinator import coordinate\n"
        "from evener.team.coordinator_thread import CoordinatorOptions\n"
        "coordinate(CoordinatorOptions(\n"
        f"    host={ADDRESSES[0]!r}, port=29600, most=3, token={token.read_bytes()!r},\n"
        "    deadlines=Deadlines(connect_s=3.0)))\n"
    )
    own = ("10.78.0.1", "10.78.0.2")
    with Machines() as machines:
        for node, address in enumerate(own):
            machines.run(node, "ip", "address", "add", f"{address}/32", "dev", "eth0")
            machines.run(node, "ip", "route", "add", "blackhole", own[1 - node])
        coordinator = sandbox.start(*machines.command(0, sys.executable, "-P", "-c", serve))
        join = (sys.executable, "-P", "-m", "evener", "join", f"{ADDRESSES[0]}:29600")
        join += ("--nproc", 1, "--token-file", token, script)

        def start(node: int) -> Running:
            sandbox.environ |= {"WHO": "ab"[node], "EVENER_ADDRESS": own[node]}
            return sandbox.start(*machines.command(node, *join))

        stays = start(0)
        wait_for(log.windows)
        refused = start(1).end()
        log.wait_for_more(100)
        (sandbox.folder / "stop").touch()
        assert stays.end().code == 0
        coordinator.signal(signal.SIGTERM)
        told = coordinator.end().err
    assert refused.code == 1
    for text in (refused.err, told):
        assert "(at 10.78.0.2) reaches the coordinator, but not the other workers: " in text
        assert "give the address that the others reach (--address)" in text
    check(log, log)
