"""Workers of an elastic managed run, as the thread that looks after them sees them."""

import os
import signal
import sys
from typing import Any

import pytest

from evener.managed.elastic_processes import _ManagedLauncher, _Requests
from evener.protocol.formation import Deadlines
from evener.team.connection import SupervisorConnection
from evener.team.elastic_launch import ElasticRun, LaunchedTeam
from helpers.coordinators import serving

WORKER = """\
import os, time
os.write(int(os.environ["EVENER_CHANNEL_FD"]), b'{"place": "joining"}\\n')
time.sleep(600)
"""


class Abandoned:
    """Stands for a run that is abandoned as soon as a worker says something."""

    def __init__(self, requests: _Requests) -> None:
        self.requests = requests

    def has_begun(self) -> None: ...

    def take_in(self, message: Any) -> None:
        self.requests.put(signal.SIGTERM)
        self.requests.put(signal.SIGINT)


def test_workers_of_an_abandoned_run_are_killed_without_a_word(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with (
        serving(1, 1, Deadlines()) as address,
        SupervisorConnection(address, token=None) as connection,
        _Requests() as requests,
    ):
        team = LaunchedTeam(address, None, (1, 1), 1, os.environ, connection, None)
        owner: Any = Abandoned(requests)
        launcher = _ManagedLauncher(owner, requests, ElasticRun(join=address), team)
        launcher._command = [sys.executable, "-I", "-S", "-c", WORKER]
        launcher.run_workers()
    assert [child.code for child in launcher.children] == [-signal.SIGKILL]
    assert capfd.readouterr().err == ""
