"""Teams over several hosts: they form, lose workers, agents and the coordinator, and continue.

Each case runs on network namespaces (root), and on addresses of loopback everywhere.
"""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from evener.team.failures import START_AGAIN
from helpers.launched import Sandbox
from helpers.limits import wait_until
from helpers.lineage import check_exactly_once
from helpers.many_hosts import (
    Hosts,
    LoopbackAliases,
    Namespaces,
    check,
    longest_gap_s,
    wait_for_more,
)
from helpers.pretraining import NUM_SAMPLES, Lab, RunFolder

#: Windows are 20 ms apart; what a busy machine may add to a bound.
SLACK_S = 3.0
LEASE_S = 4.0


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


def test_a_fixed_team_on_two_hosts(hosts: Hosts) -> None:
    second = hosts.launch(1, "--nnodes", 2, "--node-rank", 1, EPOCHS="4")
    first = hosts.launch(0, "--nnodes", 2, "--node-rank", 0, "--nproc", 2, EPOCHS="4")
    for ended in (first.end(), second.end()):
        assert ended.code == 0, ended.err
    assert len(hosts.journals) == 3
    check(hosts.journals, whole_epochs=4)


def test_a_worker_an_agent_and_the_coordinator_are_killed(hosts: Hosts) -> None:
    ledger = ("1:4", "--host-lease-s", LEASE_S, "--ledger", hosts.sandbox.folder / "ledger")
    coordinator = hosts.coordinate(*ledger)
    agents = [hosts.join(host) for host in range(3)]
    stays, dies, goes = [hosts.journal_of(agent) for agent in agents]
    wait_for_more(stays, size=3)

    os.kill(dies.pid, signal.SIGKILL)
    wait_until(lambda: hosts.journal_of(agents[1]).pid != dies.pid)
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


@pytest.mark.long
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
    check(hosts.journals)


@pytest.mark.parametrize("away_s", [0.0, pytest.param(60.0, marks=pytest.mark.long)])
def test_a_host_that_is_cut_off_for_longer_than_the_lease_joins_again(
    hosts: Hosts, away_s: float
) -> None:
    """The host of the main process. Mended, it commits nothing of its own."""
    coordinator = hosts.coordinate("1:3", "--host-lease-s", LEASE_S)
    agents = [hosts.join(1)]
    main = hosts.journal_of(agents[0])
    agents += [hosts.join(host) for host in (0, 2)]
    stays, _ = [hosts.journal_of(agent) for agent in agents[1:]]
    wait_for_more(stays, size=3)
    assert main.windows[-1]["main"]
    began_s = time.time()
    hosts.cut(1)
    wait_for_more(stays, size=2)
    assert longest_gap_s(stays, began_s, time.time()) <= LEASE_S + 2.0 + SLACK_S
    seen = len(main.windows)
    time.sleep(max(0.0, began_s + away_s - time.time()))
    assert len(main.windows) == seen
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
    hosts = Namespaces(sandbox)
    try:
        coordinator = hosts.coordinate("1:4", "--host-lease-s", LEASE_S, "--patience-s", 6)
        away = hosts.join(1, "--nproc", 2)
        hosts.journal_of(away)
        agents = [hosts.join(host) for host in (0, 2)]
        stays, _ = [hosts.journal_of(agent) for agent in agents]
        wait_for_more(stays, size=4)
        hosts.cut(1)
        wait_for_more(stays, size=2)
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


@pytest.mark.long
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
        coordinator = hosts.coordinate("1:2", "--host-lease-s", LEASE_S)
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


def wait_for_events(run: RunFolder, kind: str, count: int = 1) -> None:
    """Wait for so many further events, and parse none: a run writes thousands of them."""

    def count_all() -> int:
        file = run.path / "events.jsonl"
        return file.read_text().count(f'"type":"{kind}"') if file.exists() else 0

    before = count_all()
    wait_until(lambda: count_all() >= before + count)
