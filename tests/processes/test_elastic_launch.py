"""The launcher of an elastic team: workers are replaced, leave and join (and ``unit/team``)."""

import os
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path

import psutil

from helpers.launched import Running, Sandbox
from helpers.limits import PATIENCE_S, wait_until

# The launcher takes a worker that says this for one that is in the team.
JOINED = """\
from evener.team.child import notify_supervisor
notify_supervisor(place="joining")
notify_supervisor(place="joined")
MEMBER = os.environ["EVENER_MEMBER"].partition("/")[2]
tell(f"{MEMBER} {os.getpid()} {'json.tool' in sys.modules}")
"""


def launch(sandbox: Sandbox, body: str, *, first: str = "") -> Running:
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
    return sandbox.start(sys.executable, "-P", "-c", code, sandbox.script(JOINED + body))


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


def has_process(*words: bytes) -> bool:
    """Whether a process has these words in its command."""
    for folder in Path("/proc").iterdir():
        with suppress(OSError):  # it ended meanwhile
            if set(words) <= {*(folder / "cmdline").read_bytes().split(b"\0")}:
                return True
    return False


def test_workers_die_stop_and_leave_and_the_coordinator_is_silent(sandbox: Sandbox) -> None:
    running = launch(sandbox, "pass_gate()\n")
    join = next_line(running, "evener: elastic team of 1 to 3 workers, 2 of them here; ")
    words = join.split("`")[1].split()
    token = Path(words[4])
    assert token.stat().st_mode & 0o777 == 0o600
    first = workers(sandbox, 2)
    assert {*first} == {"0", "1"}
    assert not any(was_standby for _, was_standby in first.values())

    script = bytes(sandbox.folder / "script.py")
    wait_until(lambda: has_process(b"evener.team.standby", script))
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


def test_a_worker_of_a_background_job_leaves_when_its_launcher_is_told_to(sandbox: Sandbox) -> None:
    script = sandbox.script(JOINED + "pass_gate()\n")
    running = sandbox.evener("launch", "--elastic", "1:2", "--nproc", 1, script)
    words = next_line(running, "evener: elastic team of 1 to 2 workers").split("`")[1].split()
    workers(sandbox, 1)
    # As shells start background jobs of scripts.
    ignoring = ("sh", "-c", "trap '' INT; exec \"$@\"", "sh")
    evener = (sys.executable, "-P", "-m", "evener")
    joining = sandbox.start(*ignoring, *evener, *words[1:5], script)
    workers(sandbox, 1)
    joining.signal(signal.SIGTERM)
    ended = joining.end()
    assert (ended.code, "killed" in ended.err) == (143, False), ended.err
    sandbox.open_gate(1)
    assert running.end().code == 0


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
    next_line(running, "warning: the standby could not be started")
    os.kill(first["1"][0], signal.SIGKILL)
    line = next_line(running, "warning: worker ")
    assert "The others continue; it is started again in " in line
    assert {*workers(sandbox, 1)} == {"1.3"}
    sandbox.open_gate(2)
    assert running.end().code == 0


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
