"""Workers of an elastic managed run, as the thread that looks after them sees them."""

import signal
import sys
from contextlib import closing
from typing import Any

import pytest

from evener.managed.workers import ManagedAgent
from evener.protocol.formation import Deadlines
from evener.team.agent import JoinedTeam
from evener.team.connection import AgentConnection
from evener.team.signals import Requests
from helpers.coordinators import serving

WORKER = """\
import os, time
os.write(int(os.environ["EVENER_CHANNEL_FD"]), b'{"place": "joining"}\\n')
time.sleep(600)
"""


def test_workers_of_an_abandoned_run_are_killed_without_a_word(
    capfd: pytest.CaptureFixture[str],
) -> None:
    requests = Requests()

    def abandon(_: Any) -> None:
        requests.put(signal.SIGTERM)
        requests.put(signal.SIGINT)

    with (
        closing(requests),
        serving(1, 1, Deadlines()) as address,
        AgentConnection(address, token=None) as connection,
    ):
        team = JoinedTeam(address=address, token_file=None, connection=connection, nproc=1)
        command = [sys.executable, "-I", "-S", "-c", WORKER]
        agent = ManagedAgent(command, team, requests, on_message=abandon)
        agent.run()
    assert [child.code for child in agent.workers] == [-signal.SIGKILL]
    assert capfd.readouterr().err == ""
