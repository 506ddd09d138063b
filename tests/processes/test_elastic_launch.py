"""The launcher of an elastic team: workers are replaced, leave and join."""

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from evener.protocol.formation import Deadlines
from evener.team import agent
from evener.team.environment import TOKEN_FILE
from evener.team.failures import START_AGAIN
from evener.team.launch import LaunchPlan, open_team
from helpers.coordinators import serving
from helpers.launched import Running, Sandbox
from helpers.limits import PATIENCE_S

# The launcher takes a worker that says this for one that is in the team.
JOINED = """\
from evener.team.child import tell as tell_launcher
tell_launcher(place="joining")
tell_launcher(place="joined")
MEMBER = os.environ["EVENER_MEMBER"].partition("/")[2]
tell(f"{MEMBER} {os.getpid()} {'json.tool' in sys.modules}")
"""


@pytest.fixture
def sandbox(tmp_path: Path) -> Any:
    sandbox = Sandbox(tmp_path)
    yield sandbox
    sandbox.close()


def launch(sandbox: Sandbox, body: str, *options: object, first: str = "") -> Running:
    """Two workers; a standby loads a small library; the launcher runs ``first`` before all."""
    code = (
        f"{first}\nimport sys; "
        "from evener.team.agent import LIBRARIES; "
        "from evener.team.launch import LaunchPlan, launch; "
        "from evener.team.child import run_child; "
        "LIBRARIES['evener.team.script'] = ('json.tool',); "
        "plan = LaunchPlan(elastic='1:3', nproc=2, max_failures=3); "
        "rank = [sys.executable, '-B', '-P', '-m', 'evener.team.script', *sys.argv[1:]]; "
        "sys.exit(run_child(lambda: launch(rank, plan)))"
    )
    return sandbox.start(sys.executable, "-P", "-c", code, sandbox.script(JOINED + body), *options)


def workers(sandbox: Sandbox, count: int) -> dict[str, tuple[int, bool]]:
    """Process of each of the next workers that join, and whether it had been a standby."""
    lines = [line.split() for line in sandbox.mailbox.read(count)]
    return {member: (int(pid), warm == "True") for _, member, pid, warm in lines}


def next_line(running: Running, start: str) -> str:
    """The next line of the launcher that begins so; a launcher that prints none is killed."""
    assert running.process.stderr is not None
    late = threading.Timer(PATIENCE_S, running.process.kill)
    late.start()
    try:
        while line := running.process.stderr.readline().decode():
            if line.startswith(start):
                return line
    finally:
        late.cancel()
    raise AssertionError(f"no line within {PATIENCE_S:g} s begins with {start!r}")


def test_workers_die_stop_and_leave_and_the_coordinator_is_silent(
    sandbox: Sandbox,
) -> None:
    running = launch(sandbox, "pass_gate()\n")
    join = next_line(running, "evener: elastic team of 1 to 3 workers, 2 of them here; ")
    words = join.split("`")[1].split()
    token = Path(words[4])
    assert token.stat().st_mode & 0o777 == 0o600
    first = workers(sandbox, 2)
    assert {*first} == {"0", "1"}

    assert not any(was_standby for _, was_standby in first.values())

    find_process(b"evener.team.standby", bytes(sandbox.folder / "script.py"))
    os.kill(first["1"][0], signal.SIGKILL)
    assert "was killed by SIGKILL" in next_line(running, "evener: worker ")
    ((member, (pid, was_standby)),) = workers(sandbox, 1).items()
    assert (member, was_standby) == ("1.2", True)

    os.kill(pid, signal.SIGSTOP)
    assert "the team continues without it" in next_line(running, "evener: worker ")
    os.kill(pid, signal.SIGCONT)
    assert "runs again" in next_line(running, "evener: worker ")

    # What it prints for people works as it stands.
    joining = sandbox.evener(*words[1:5], sandbox.folder / "script.py", "--lr", 1)
    ((member, (pid, _)),) = workers(sandbox, 1).items()
    assert member.endswith("/0")

    os.kill(running.process.pid, signal.SIGSTOP)  # and the coordinator, a thread of the launcher
    said = next_line(joining, "evener: the coordinator at ")
    assert " has not answered since " in said
    assert "the workers of this launcher wait for it up to 60 s" in said
    os.kill(running.process.pid, signal.SIGCONT)
    assert "answers again" in next_line(joining, "evener: the coordinator at ")

    os.kill(pid, signal.SIGINT)  # it alone leaves, and is not replaced
    ended = joining.end()
    assert (ended.code, "has left the team" in ended.err) == (130, True)

    sandbox.open_gate(2)
    assert running.end().code == 0
    assert not token.exists()


def test_who_joins_as_the_run_ends_is_told_so_and_has_not_failed(sandbox: Sandbox) -> None:
    script = sandbox.script(
        "import torch\n"
        "from evener import Ddp\n"
        "if os.environ['EVENER_MEMBER'].count('/') > 1:\n"
        "    tell('joins')\n"
        "    wait_forever()  # as where libraries take long to load\n"
        "model = torch.nn.Linear(2, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "with Ddp.setup(model, optimizer, devices='cpu', quiet=True) as ddp:\n"
        "    tell('in')\n"
        "    pass_gate()\n"
    )
    running = sandbox.evener("launch", "--elastic", "1:2", "--nproc", 1, script)
    words = next_line(running, "evener: elastic team of 1 to 2 workers").split("`")[1].split()
    assert sandbox.mailbox.read(1) == ["0 in"]
    joining = sandbox.evener(*words[1:5], script)
    assert [line.partition(" ")[2] for line in sandbox.mailbox.read(1)] == ["joins"]
    sandbox.open_gate(1)
    assert running.end().code == 0
    said = f"evener: the run of the team at {words[2]} has ended; no worker can join it any more\n"
    for late in (joining, sandbox.evener(*words[1:5], script)):
        ended = late.end()
        assert (ended.code, ended.out, ended.err) == (0, "", said)


def test_a_script_that_has_become_the_launcher_tells_how_to_add_a_worker(
    sandbox: Sandbox,
) -> None:
    """What ``Ddp.setup(elastic=...)`` executes where the script was started plainly."""
    script = sandbox.script("tell(os.environ['EVENER_ELASTIC'])\n")
    rank = [sys.executable, "-P", "-m", "evener.team.script", script, "--lr", "1"]
    launcher = [sys.executable, "-P", "-m", "evener.team.launch", "1:1"]
    ended = sandbox.start(*launcher, *rank).end()
    assert (ended.code, sandbox.mailbox.rest()) == (0, ["0 1:1"])
    assert "evener: elastic team of 1 to 1 workers, 1 of them here; `evener join " in ended.err
    assert f" -- {script} --lr 1` adds one\n" in ended.err


#: A machine that has no room for a standby, and none for the third worker at first.
REFUSING = """
import errno, os, subprocess
class Popen(subprocess.Popen):
    workers = 0
    def __init__(self, command, *arguments, **options):
        if "evener.team.standby" in command:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        Popen.workers += "evener.team.script" in command
        if Popen.workers == 3:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        super().__init__(command, *arguments, **options)
subprocess.Popen = Popen
"""


def test_processes_that_cannot_be_started_end_no_team_that_can_do_without(sandbox: Sandbox) -> None:
    running = launch(sandbox, "pass_gate()\n", first=REFUSING)
    first = workers(sandbox, 2)
    line = next_line(running, "warning: the standby could not be started")
    assert "files and connections open (`ulimit -n`)" in line
    os.kill(first["1"][0], signal.SIGKILL)
    line = next_line(running, "warning: worker ")
    assert "processes and threads (`ulimit -u`)" in line
    assert "The others continue; it is tried again in " in line
    assert {*workers(sandbox, 1)} == {"1.3"}
    sandbox.open_gate(2)
    assert running.end().code == 0


def find_process(*words: bytes) -> int:
    """Wait for a process that has these words in its command."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        for folder in Path("/proc").iterdir():
            with suppress(OSError):  # it ended meanwhile
                if set(words) <= {*(folder / "cmdline").read_bytes().split(b"\0")}:
                    return int(folder.name)
        time.sleep(0.05)
    raise AssertionError(f"no process has {words} in its command")


def test_a_launcher_that_is_killed_leaves_no_token_behind(sandbox: Sandbox) -> None:
    running = launch(sandbox, "wait_forever()\n")
    words = next_line(running, "evener: elastic team of 1 to 3 workers").split("`")[1].split()
    workers(sandbox, 2)
    token = Path(words[4])
    assert token.exists()
    children = psutil.Process(running.process.pid).children()
    running.process.kill()
    _, alive = psutil.wait_procs(children, PATIENCE_S)
    assert not alive
    assert not token.exists()


def test_too_many_failures_end_the_run_with_the_last_one(sandbox: Sandbox) -> None:
    ended = launch(sandbox, "if MEMBER != '0': raise ValueError('boom')\nwait_forever()\n").end()
    assert ended.code == 1
    assert ended.err.count("ValueError: boom") == 4
    assert ended.err.endswith(
        "error: 4 workers have failed here, and --max-failures is 3; end what makes them fail, or "
        "raise it\n"
    )


def test_a_first_failure_before_anybody_has_joined_ends_the_run(sandbox: Sandbox) -> None:
    script = sandbox.script("sys.exit(7)\n")
    ended = sandbox.evener("launch", "--elastic", "1:2", script).end()
    assert ended.code == 7
    assert "another worker takes its place" not in ended.err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--elastic", "3:2"], "--elastic is '3:2'; give the fewest and the most as"),
        (["--elastic", "1:2", "--nproc", 0], "'--nproc': Input should be greater"),
        (["--elastic", "1:2", "--max-failures", -1], "'--max-failures': Input should be greater"),
        (["--max-failures", 3], "--max-failures is 3, but the team is not elastic"),
        (["--elastic", "1:2", "--nnodes", 2], "--nnodes is 2, but --master-addr is missing"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    sandbox: Sandbox, options: list[object], says: str
) -> None:
    ended = sandbox.evener("launch", *options, sandbox.script("")).end()
    assert ended.code == 2
    assert says in ended.err


def test_a_worker_that_has_lost_the_coordinator_is_not_replaced(sandbox: Sandbox) -> None:
    body = "from evener.errors import CoordinatorLostError\nraise CoordinatorLostError('gone')\n"
    ended = launch(sandbox, body).end()
    assert ended.code == START_AGAIN
    assert "CoordinatorLostError: gone" in ended.err
    assert "another worker takes its place" not in ended.err


def test_a_team_whose_coordinator_has_no_token_is_joined_without_one() -> None:
    with serving(1, 2, Deadlines()) as address, open_team(LaunchPlan(join=address)) as team:
        assert team.connection.limits == (1, 2)
        assert team.environment({}, 0, "m")[TOKEN_FILE] == ""


def test_pauses_grow_where_workers_fail_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(agent.time, "monotonic", lambda: now_s)
    slot = agent._Slot(0)
    pauses = []
    for _ in range(4):
        assert slot.begin("host", 0) not in pauses
        pauses.append(slot.fail())
    assert pauses == [0.0, 1.0, 2.0, 4.0]
    slot.begin("host", 0)
    now_s += 60.0
    assert slot.fail() == 0.0
