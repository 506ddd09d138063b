"""Teams over several hosts: they form, lose workers, agents and the coordinator, and continue.

Each case runs on network namespaces (root), and on addresses of loopback everywhere.
"""

import json
import os
import random
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import pytest

from evener.team.failures import START_AGAIN
from evener.team.wire import TO_COORDINATOR, Seal
from helpers.launched import Sandbox
from helpers.lineage import check_exactly_once
from helpers.many_hosts import (
    Hosts,
    Journal,
    LoopbackAliases,
    Namespaces,
    check,
    longest_gap_s,
    wait_for,
    wait_for_more,
)
from helpers.pretraining import NUM_SAMPLES, Lab, RunFolder

#: Windows are 20 ms apart; what a busy machine may add to a bound.
SLACK_S = 3.0


@pytest.fixture
def sandbox(tmp_path: Path) -> Iterator[Sandbox]:
    sandbox = Sandbox(tmp_path)
    sandbox.environ["OMP_NUM_THREADS"] = "1"
    yield sandbox
    sandbox.close()


@pytest.fixture(
    params=[LoopbackAliases, pytest.param(Namespaces, marks=pytest.mark.root)],
    ids=["loopback", "namespaces"],
)
def kind(request: pytest.FixtureRequest) -> type[Hosts]:
    found: type[Hosts] = request.param
    return found


@pytest.fixture
def hosts(kind: type[Hosts], sandbox: Sandbox) -> Iterator[Hosts]:
    hosts = kind(sandbox)
    yield hosts
    sandbox.end_all()
    hosts.close()


# ── teams form ───────────────────────────────────────────────────────────────────────────────────


def test_a_fixed_team_on_two_hosts(hosts: Hosts) -> None:
    second = hosts.launch(1, "--nnodes", 2, "--node-rank", 1, EPOCHS="4")
    first = hosts.launch(0, "--nnodes", 2, "--node-rank", 0, "--nproc", 2, EPOCHS="4")
    for ended in (first.end(), second.end()):
        assert ended.code == 0, ended.err
    assert len(hosts.journals) == 3
    assert max(len(journal.windows) for journal in hosts.journals) == 4 * 12
    check(hosts.journals, whole_epochs=4)


def test_an_elastic_team_begins_on_any_number_of_hosts(hosts: Hosts) -> None:
    first = hosts.launch(0, "--nnodes", "1:3")
    alone = hosts.journal_of(first)
    others = [hosts.launch(host, "--nnodes", "1:3") for host in (1, 2)]
    for other in others:
        hosts.journal_of(other)
    wait_for_more(alone, size=3)
    hosts.stop()
    for ended in [running.end() for running in (first, *others)]:
        assert ended.code == 0, ended.err
    check(hosts.journals)


def test_a_coordinator_alone_and_agents_that_join_it(hosts: Hosts) -> None:
    coordinator = hosts.coordinate("1:4")
    agents = [hosts.join(host) for host in (0, 1)]
    first, _ = [hosts.journal_of(agent) for agent in agents]
    agents.append(hosts.join(2, "--nproc", 2))
    wait_for_more(first, size=4)
    hosts.stop()
    for ended in [agent.end() for agent in agents]:
        assert ended.code == 0, ended.err
    coordinator.signal(signal.SIGTERM)
    assert coordinator.end().code == 0
    assert len(hosts.journals) == 4
    check(hosts.journals)


# ── processes are killed ─────────────────────────────────────────────────────────────────────────


def test_a_worker_an_agent_and_the_coordinator_are_killed(hosts: Hosts) -> None:
    ledger = ("1:4", "--ledger", hosts.sandbox.folder / "ledger")
    coordinator = hosts.coordinate(*ledger)
    agents = [hosts.join(host) for host in range(3)]
    stays, dies, goes = [hosts.journal_of(agent) for agent in agents]
    wait_for_more(stays, size=3)

    os.kill(dies.pid, signal.SIGKILL)
    wait_for(lambda: hosts.journal_of(agents[1]).pid != dies.pid)
    wait_for_more(stays, size=3)

    agents[2].signal(signal.SIGKILL)
    agents[2].end()
    wait_for_more(stays, size=2)
    assert goes.pid not in [process.pid for process in hosts.processes_of(2)]

    coordinator.signal(signal.SIGKILL)
    coordinator.end()
    coordinator = hosts.coordinate(*ledger)
    wait_for_more(stays, size=2)
    agents[2] = hosts.join(2)
    hosts.journal_of(agents[2])
    wait_for_more(stays, size=3)

    hosts.stop()
    for ended in [agent.end() for agent in agents]:
        assert ended.code == 0, ended.err
    coordinator.signal(signal.SIGTERM)
    assert coordinator.end().code == 0
    assert len(hosts.journals) == 5
    check(hosts.journals)


def test_the_agent_that_has_the_coordinator_is_killed(hosts: Hosts) -> None:
    """Its worker ends with it. The others wait for a coordinator at the same address."""
    first = hosts.launch(0, "--nnodes", "1:2")
    hosts.journal_of(first)
    second = hosts.launch(1, "--nnodes", "1:2")
    wait_for_more(hosts.journal_of(second), size=2)
    first.signal(signal.SIGKILL)
    first.end()
    # Within its patience it finds the coordinator that is started there again.
    first = hosts.launch(0, "--nnodes", "1:2")
    wait_for_more(hosts.journal_of(second), size=2)
    hosts.stop()
    for ended in (first.end(), second.end()):
        assert ended.code == 0, ended.err
    check(hosts.journals)


# ── links are cut ────────────────────────────────────────────────────────────────────────────────


def test_a_host_that_is_cut_off_for_less_than_the_lease_stays_a_member(hosts: Hosts) -> None:
    coordinator = hosts.coordinate("1:2")
    agents = [hosts.join(host) for host in (0, 1)]
    stays, away = [hosts.journal_of(agent) for agent in agents]
    wait_for_more(stays, size=2)
    began_s = time.time()
    hosts.cut(1)
    time.sleep(5.0)
    hosts.mend(1)
    mended_s = time.time()
    wait_for_more(stays, size=2)
    wait_for_more(away, size=2)
    assert longest_gap_s(stays, began_s, mended_s) <= mended_s - began_s + 2.0 + SLACK_S
    hosts.stop()
    for ended in [agent.end() for agent in agents]:
        assert ended.code == 0, ended.err
    coordinator.signal(signal.SIGTERM)
    assert "is lost" not in coordinator.end().err
    assert len(hosts.journals) == 2
    check(hosts.journals)


@pytest.mark.parametrize("away_s", [10.0, pytest.param(60.0, marks=pytest.mark.long)])
def test_a_host_that_is_cut_off_for_longer_than_the_lease_joins_again(
    hosts: Hosts, away_s: float
) -> None:
    lease_s = 4.0
    coordinator = hosts.coordinate("1:3", "--host-lease-s", lease_s)
    agents = [hosts.join(1)]
    main = hosts.journal_of(agents[0])
    agents += [hosts.join(host) for host in (0, 2)]
    stays, _ = [hosts.journal_of(agent) for agent in agents[1:]]
    wait_for_more(stays, size=3)
    assert main.windows[-1]["main"]
    began_s = time.time()
    hosts.cut(1)
    wait_for_more(stays, size=2)
    resumed_s = time.time()
    assert longest_gap_s(stays, began_s, resumed_s) <= lease_s + 2.0 + SLACK_S
    seen = len(main.windows)
    time.sleep(max(0.0, began_s + away_s - time.time()))
    assert len(main.windows) == seen  # it commits nothing
    hosts.mend(1)
    wait_for_more(stays, size=3)
    hosts.stop()
    for ended in [agent.end() for agent in agents]:
        assert ended.code == 0, ended.err
    coordinator.signal(signal.SIGTERM)
    assert "is lost: neither it nor its launcher has been heard of" in coordinator.end().err
    check(hosts.journals)


@pytest.mark.root
def test_half_of_the_team_is_cut_off_for_good_and_starts_again_later(sandbox: Sandbox) -> None:
    """With the main process. The coordinator is on the other side, which continues."""
    hosts, lease_s = Namespaces(sandbox), 4.0
    try:
        coordinator = hosts.coordinate("1:4", "--host-lease-s", lease_s, "--patience-s", 6)
        away = hosts.join(1, "--nproc", 2)
        hosts.journal_of(away)
        agents = [hosts.join(host) for host in (0, 2)]
        stays, _ = [hosts.journal_of(agent) for agent in agents]
        wait_for_more(stays, size=4)
        assert not any(hosts.journal_of(agent).windows[-1]["main"] for agent in agents)
        began_s = time.time()
        hosts.cut(1)
        wait_for_more(stays, size=2)
        assert longest_gap_s(stays, began_s, time.time()) <= lease_s + 2.0 + SLACK_S
        lost = away.end()
        assert lost.code == START_AGAIN
        assert f"lost the coordinator at {hosts.address} and waited 6 s for it" in lost.err
        wait_for_more(stays, size=2)
        hosts.mend(1)
        again = hosts.join(1, "--nproc", 2)
        wait_for_more(stays, size=4)
        hosts.stop()
        for ended in [agent.end() for agent in (*agents, again)]:
            assert ended.code == 0, ended.err
        coordinator.signal(signal.SIGTERM)
        coordinator.end()
        check(hosts.journals)
    finally:
        sandbox.end_all()
        hosts.close()


def test_a_main_process_that_was_cut_off_never_writes_into_the_run(
    kind: type[Hosts], tmp_path: Path
) -> None:
    """All hosts share the files of the run, which is where two main processes would meet."""
    lab = Lab(tmp_path)
    hosts, run = kind(lab.sandbox), lab.path_of()
    checkpoint = {"every": 20, "keep_last": 3}
    lab.configure(epochs=9999, checkpoint=checkpoint, eval={"every": 0})
    hosts.script = Path("run.yaml")
    try:
        coordinator = hosts.coordinate("1:2", "--host-lease-s", 4)
        away = hosts.join(1)
        wait_for_events(run, "window")
        stays = hosts.join(0)
        wait_for_events(run, "worker_joined")
        hosts.cut(1)
        wait_for_events(run, "worker_lost")
        wait_for_events(run, "checkpoint", 3)
        hosts.mend(1)
        wait_for_events(run, "worker_joined")
        wait_for_events(run, "checkpoint", 3)
        for child in psutil.Process(stays.process.pid).children():
            words = child.cmdline()
            if "run.yaml" in words and "evener.team.standby" not in words:
                child.terminate()  # the worker, which stops the team
        for ended in (stays.end(), away.end()):
            assert ended.code in (0, 128 + signal.SIGTERM), ended.err
        coordinator.signal(signal.SIGTERM)
        coordinator.end()
    finally:
        lab.close()
        hosts.close()
    assert check_exactly_once(run.events, NUM_SAMPLES) == []
    steps = [event["window"] for event in run.of_type("checkpoint")]
    assert steps == sorted(set(steps))
    generations = [event["generation"] for event in run.of_type("window")]
    assert generations == sorted(generations)
    assert [path.name for path in run.path.parent.iterdir() if path.name[0] != "."] == ["run"]


def wait_for_events(run: RunFolder, kind: str, count: int = 1) -> None:
    """Wait for so many further events, and parse none: a run writes thousands of them."""

    def count_all() -> int:
        file = run.path / "events.jsonl"
        return file.read_text().count(f'"type":"{kind}"') if file.exists() else 0

    before = count_all()
    wait_for(lambda: count_all() >= before + count)


# ── who does not belong ──────────────────────────────────────────────────────────────────────────


def test_loopback_mixed_with_other_addresses_is_refused_with_the_remedy(hosts: Hosts) -> None:
    coordinator, first = hosts.coordinate("1:3"), hosts.join(0)
    stays = hosts.journal_of(first)
    other = "127.0.0.1" if isinstance(hosts, Namespaces) else "192.0.2.7"
    own = ("--address", other, "--token-file", hosts.token)
    refused = hosts.evener(1, "join", hosts.address, *own, hosts.script).end()
    wait_for_more(stays, size=1)
    hosts.stop()
    assert first.end().code == 0
    coordinator.signal(signal.SIGTERM)
    assert refused.code == 1
    for said in (refused.err, coordinator.end().err):
        assert "where only its own machine connects" in said
        assert other in said
        assert "(--address)" in said
    check(hosts.journals)


NUM_STRANGERS = 3_000


def test_strangers_and_damaged_messages_disturb_nobody(sandbox: Sandbox) -> None:
    """13,000 connections and messages at the one port of evener's; Gloo has ports of its own."""
    hosts = LoopbackAliases(sandbox)
    coordinator = hosts.coordinate("1:3")
    agents = [hosts.join(host, WORK_S="0.1") for host in (0, 1)]
    stays, _ = [hosts.journal_of(agent) for agent in agents]
    wait_for_more(stays, 6, size=2)
    usual_s = median(gaps_s(stays)[-5:])
    process = psutil.Process(coordinator.process.pid)
    assert ports_of(process) == [hosts.port]
    assert [ports_of(psutil.Process(agent.process.pid)) for agent in agents] == [[], []]
    before_bytes = process.memory_info().rss
    began_s, num_sent = time.time(), 0
    draw = random.Random(7)
    for _ in range(NUM_STRANGERS):
        num_sent += 1 + visit(hosts, draw)
    ended_s = time.time()
    grown_bytes = process.memory_info().rss - before_bytes
    wait_for_more(stays, 3, size=2)
    assert num_sent >= 10_000
    assert longest_gap_s(stays, began_s, ended_s) <= 2 * usual_s  # a stall of one window at most
    assert {row["size"] for row in stays.windows if row["t"] > began_s} == {2}
    assert grown_bytes < 50_000_000
    hosts.stop()
    for ended in [agent.end() for agent in agents]:
        assert ended.code == 0, ended.err
    coordinator.signal(signal.SIGTERM)
    told = coordinator.end()
    assert (told.code, "Traceback" in told.err, "is lost" in told.err) == (0, False, False)
    assert len(hosts.journals) == 2
    check(hosts.journals)


def gaps_s(journal: Journal) -> list[float]:
    times = [row["t"] for row in journal.windows]
    return [b - a for a, b in pairwise(times)]


def ports_of(process: psutil.Process) -> list[int]:
    listening = [c for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    return sorted({connection.laddr.port for connection in listening})


def visit(hosts: Hosts, draw: random.Random) -> int:
    """Connect, and send some messages that nobody should send; return how many."""
    num_sent = 0
    with (
        suppress(OSError),
        socket.create_connection((hosts.addresses[0], hosts.port), 20.0) as stranger,
    ):
        for message in draw.choice(VISITS)(hosts, draw, stranger):
            num_sent += 1
            stranger.sendall(message)
    return num_sent


def noise(_: Hosts, draw: random.Random, __: socket.socket) -> Iterator[bytes]:
    for _ in range(draw.randrange(1, 6)):
        yield draw.randbytes(draw.choice([0, 1, 50, 5000])) + b"\n"


def damaged_hellos(_: Hosts, draw: random.Random, __: socket.socket) -> Iterator[bytes]:
    for _ in range(draw.randrange(1, 6)):
        yield json.dumps(random_value(draw)).encode() + b"\n"
    yield b'{"body": ' + b"[" * draw.randrange(4000)


def wrong_token(_: Hosts, draw: random.Random, __: socket.socket) -> Iterator[bytes]:
    seal = Seal(b"another token, which is wrong", ("0" * 32, "1" * 32), TO_COORDINATOR)
    for _ in range(draw.randrange(1, 6)):
        hello = {"role": "worker", "member": "stranger"}
        yield json.dumps({**seal.close(hello), "nonce": "1" * 32}).encode() + b"\n"


def damaged_messages(hosts: Hosts, draw: random.Random, to: socket.socket) -> Iterator[bytes]:
    """Whoever sends these has the token."""
    with to.makefile("rb") as answers:
        challenge = json.loads(answers.readline())
    seal = Seal(hosts.token.read_bytes(), (challenge["nonce"], "2" * 32), TO_COORDINATOR)
    role = draw.choice(["agent", "worker"])
    hello = {"role": role, "member": f"stranger {draw.randrange(9)}"}
    yield json.dumps({**seal.close(hello), "nonce": "2" * 32}).encode() + b"\n"
    if role == "agent":
        yield json.dumps(seal.close({"held": None})).encode() + b"\n"
    for _ in range(draw.randrange(1, 6)):
        kind = draw.choice(["beat", "node", "relay", "store", "process", "report", "no such"])
        message = {"type": kind, "member": random_value(draw), "state": random_value(draw)}
        yield json.dumps(seal.close(message)).encode() + b"\n"


def random_value(draw: random.Random, depth: int = 3) -> Any:
    kinds = [None, True, -1, 2**70, 1e308, "", "\u0000\ud800", "x" * 300]
    if not depth or draw.random() < 0.5:
        return draw.choice(kinds)
    values = [random_value(draw, depth - 1) for _ in range(draw.randrange(4))]
    return values if draw.random() < 0.5 else {f"key {k}": v for k, v in enumerate(values)}


VISITS = (noise, damaged_hellos, wrong_token, damaged_messages)
