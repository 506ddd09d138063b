"""Teams over several hosts: they form, lose workers, agents and the coordinator, and continue."""

import os
import signal

import pytest

from helpers.launched import Sandbox
from helpers.limits import wait_until
from helpers.many_hosts import Hosts, check, wait_for_more

LEASE_S = 4.0


@pytest.fixture
def hosts(sandbox: Sandbox) -> Hosts:
    sandbox.environ["OMP_NUM_THREADS"] = "1"
    return Hosts(sandbox)


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


@pytest.mark.long
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
def test_a_host_that_is_cut_off_for_longer_than_the_lease_joins_again(hosts: Hosts) -> None:
    """The host of the main process. Mended, it commits nothing of its own."""
    coordinator = hosts.coordinate("1:3", "--host-lease-s", LEASE_S)
    agents = [hosts.join(1)]
    main = hosts.journal_of(agents[0])
    agents += [hosts.join(host) for host in (0, 2)]
    stays, _ = [hosts.journal_of(agent) for agent in agents[1:]]
    wait_for_more(stays, size=3)
    assert main.windows[-1]["main"]
    hosts.cut(1)
    wait_for_more(stays, size=2)
    hosts.mend(1)
    wait_for_more(stays, size=3)
    hosts.stop()
    for ended in [agent.end() for agent in agents]:
        assert ended.code == 0, ended.err
    coordinator.signal(signal.SIGTERM)
    assert "is lost: neither it nor its launcher has sent a heartbeat" in coordinator.end().err
    check(hosts.journals)
