"""What the agent of an elastic team does when workers end.

Workers are small programs without torch; a coordinator on a thread serves them.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from evener.protocol.formation import Deadlines
from evener.team import agent
from evener.team.agent import Agent, JoinedTeam
from evener.team.connection import AgentConnection
from evener.team.elastic import CoordinatorLink
from evener.team.signals import SignalQueue
from helpers.coordinators import serving
from helpers.limits import PATIENCE_S

#: Lets a worker tell its launcher where it is.
TELL = """\
import os, signal, sys, time
channel = int(os.environ["EVENER_CHANNEL_FD"])
os.set_inheritable(channel, False)  # exec closes it
def tell(place):
    os.write(channel, b'{"place": "%s"}\\n' % place.encode())
def leave():
    os.write(channel, b'{"finished": false}\\n')
def die(signum):
    signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)
"""


@pytest.fixture(autouse=True)
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the launcher says; a standby would load nothing here."""
    lines: list[str] = []
    monkeypatch.setattr(agent, "say", lambda text, end="": lines.append(text))
    monkeypatch.setattr(Agent, "_warm_up", lambda self: None)
    monkeypatch.setattr(agent, "_FAREWELL_S", 0.0)
    return lines


def launch(
    body: str,
    *,
    nproc: int = 1,
    hosts: bool = False,
    other: str = "",
    when_served: Callable[[CoordinatorLink], object] | None = None,
) -> int:
    """Runs workers until the run is over; returns the exit code of the launcher.

    ``other`` is a worker that another launcher has started, and ``when_served`` what happens when
    the launcher has said that it keeps the coordinator for that, as it then must.
    """
    command = [sys.executable, "-I", "-S", "-c", TELL + body]
    with ExitStack() as stack:
        address = stack.enter_context(serving(1, 3, Deadlines()))
        connection = stack.enter_context(AgentConnection(address, token=None))
        if other:
            options: Any = {"token": None, "facts": {}, "timeout_s": PATIENCE_S}
            link = stack.enter_context(CoordinatorLink(address, member=other, **options))
            while not connection.workers:
                time.sleep(0.005)
            if when_served is not None:
                act = partial(when_served, link)
                stack.enter_context(at_line("its coordinator serves", act))
        signals = stack.enter_context(SignalQueue())
        team = JoinedTeam(
            address=address,
            token_file=None,
            connection=connection,
            nproc=nproc,
            hosts_coordinator=hosts,
        )
        own = Agent(command, team, signals, max_failures=1)
        own.run()
        code, words = own.conclude()
        if words:
            agent.say(words)
        return code


@contextmanager
def at_line(words: str, act: Callable[[], object]) -> Iterator[None]:
    """Acts as soon as the launcher has said something; it must do so in the block."""
    heard: list[str] = []
    say = agent.say

    def hear(text: str, end: str = "") -> None:
        say(text, end=end)
        if words in text:
            heard.append(text)
            act()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agent, "say", hear)
        yield
    assert heard


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("tell('joined')", 0),
        ("sys.exit(7)", 7),
        ("os.kill(os.getpid(), signal.SIGKILL)", 1),
        ("tell('joined'); sys.exit(130)", 130),
        ("tell('joined'); leave(); sys.exit(0)", 0),
        ("tell('joined'); die(signal.SIGTERM)", 143),
        ("tell('joined'); sys.exit(0 if os.environ['RANK'] == '0' else 130)", 0),
    ],
)
def test_the_exit_code_says_how_the_run_ended(body: str, code: int) -> None:
    assert launch(body, nproc=2) == code


def test_workers_are_replaced_after_one_has_left_and_ended_well(
    tmp_path: Path, said: list[str]
) -> None:
    """Scripts may catch the KeyboardInterrupt with which a worker leaves."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    body = (
        "tell('joined')\n"
        "member = os.environ['EVENER_MEMBER']\n"
        "if member.endswith('/0'):\n"
        "    leave()\n"
        "elif member.endswith('/1'):\n"
        f"    open({str(gate)!r}).read()\n"
        "    sys.exit(7)\n"
    )
    with at_line("/0 (pid", lambda: gate.write_text("")):
        assert launch(body, nproc=2) == 0
    assert "has left the team" in said[0]
    assert "another worker takes its place" in said[1]


@pytest.mark.parametrize(("ends", "code"), [("die(number)", 143), ("sys.exit(0)", 0)])
def test_a_launcher_that_is_told_to_stop_ends_by_that_unless_workers_end_well(
    ends: str, code: int
) -> None:
    body = (
        f"def stop(number, frame): {ends}\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "os.kill(os.getppid(), signal.SIGTERM)\n"
        "while True: signal.pause()\n"
    )
    assert launch(body, hosts=True) == code


def test_too_many_failures_of_one_that_has_joined_a_team_end_it_alone(said: list[str]) -> None:
    assert launch("tell('joined'); sys.exit(7)") == 7
    assert "2 workers have failed here, and --max-failures is 1" in said[-1]


def test_who_is_in_the_team_may_not(monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    monkeypatch.setattr(agent, "_UNWIND_S", 0.1)
    assert launch("tell('joined'); os.execvp('sleep', ['sleep', '600'])") == 1
    assert "has become another program (exec)" in said[-1]


@pytest.mark.parametrize(
    "when_served", [CoordinatorLink.leave, lambda _: os.kill(os.getpid(), signal.SIGINT)]
)
def test_the_coordinator_stays_for_workers_of_other_launchers(
    said: list[str], when_served: Callable[[CoordinatorLink], object]
) -> None:
    options: Any = {"other": "far/0", "when_served": when_served}
    assert launch("tell('joined')", hosts=True, **options) == 0
    assert "its coordinator serves far/0 until" in said[-1]


def test_a_standby_loads_what_there_is() -> None:
    names = [name for names in agent.LIBRARIES.values() for name in names]
    assert all(map(find_spec, [*agent.LIBRARIES, *names]))


def test_sigterm_ends_the_coordinator_too(said: list[str]) -> None:
    body = "tell('joined'); os.kill(os.getppid(), signal.SIGTERM); signal.pause()"
    assert launch(body, hosts=True, other="far/0") == 143
    assert not any("serves" in line for line in said)


def test_a_worker_that_has_left_is_not_awaited_while_its_connection_lasts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with ExitStack() as stack:
        address = stack.enter_context(serving(1, 3, Deadlines(beat_s=0.02)))
        supervisor = stack.enter_context(AgentConnection(address, token=None))
        options: Any = {"token": None, "facts": {}, "timeout_s": PATIENCE_S}
        link = stack.enter_context(CoordinatorLink(address, member="a", **options))
        while supervisor.workers != {"a"}:
            time.sleep(0.005)
        link.leave()
        while supervisor.workers:
            time.sleep(0.005)
        beats: list[None] = []
        beat = link._beat
        monkeypatch.setattr(link, "_beat", lambda: (beats.append(None), beat())[1])
        while len(beats) < 5:
            time.sleep(0.005)
        assert not supervisor.workers
