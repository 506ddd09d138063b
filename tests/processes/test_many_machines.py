"""Teams over several hosts: they form, lose workers, agents and the coordinator, and continue.

Each case runs on network namespaces (root), and on addresses of loopback everywhere.
"""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from evener.team.failures import START_AGAIN
from helpers.launched import Sandbox
from helpers.many_hosts import (
    Hosts,
    LoopbackAliases,
    Namespaces,
    check,
    longest_gap_s,
    wait_for,
    wait_for_more,
)

#: Windows are 20 ms apart; what a busy machine may add to a bound.
SLACK_S = 3.0


@pytest.fixture
def sandbox(tmp_path: Path) -> Iterator[Sandbox]:
    sandbox = Sandbox(tmp_path)
    sandbox.environ["OMP_NUM_THREADS"] = "1"
    yield sandbox
    sandbox.close()


@pytest.fixture(params=["loopback", pytest.param("namespaces", marks=pytest.mark.root)])
def hosts(request: pytest.FixtureRequest, sandbox: Sandbox) -> Iterator[Hosts]:
    kinds = {"loopback": LoopbackAliases, "namespaces": Namespaces}
    hosts = kinds[request.param](sandbox)
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
