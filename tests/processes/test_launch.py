"""``evener launch`` on one machine: what ranks see and print, how they fail, stop and end.

What the launcher says of an end, and its exit code, are decided in ``evener.team.verdict``, which
``unit/team`` tests. Ranks here import no torch, but for those of ``SETUP``.
"""

import os
import signal
import sys

import psutil
import pytest

from helpers.launched import SRC, wait_until_gone

LONG_S = 3600.0  # a period of grace that no test waits for


def pids(lines):
    return [int(pid) for line in lines for pid in line.split()[1:]]


# ── what a rank sees ─────────────────────────────────────────────────────────────────────────────


def test_ranks_run_the_script_as_python_would_and_nobody_imports_torch(sandbox):
    sandbox.forbid("torch")
    (sandbox.folder / "neighbour.py").write_text("NAME = 'neighbour'\n")
    script = sandbox.script(
        "import multiprocessing, neighbour\n"
        "def square(x):\n"
        "    return x * x\n"
        "if __name__ == '__main__':\n"
        "    assert __spec__ is None and sys.modules['__main__'].RANK == RANK\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        found = pool.map(square, [3])\n"
        "    print(neighbour.NAME, found, os.environ['WORLD_SIZE'], sys.argv, __file__)\n"
    )
    ended = sandbox.evener("launch", "--nproc", 2, script, "--lr", "1", "--nproc", "x").end()
    seen = f"neighbour [9] 2 ['{script}', '--lr', '1', '--nproc', 'x'] {script}"
    assert sorted(ended.out.splitlines()) == sorted([seen, f"[rank 1] {seen}"])
    assert (ended.code, ended.err) == (0, "")


def test_a_plain_torch_script_can_meet_by_the_same_variables(sandbox):
    script = sandbox.script(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.tensor([RANK + 1.0])\n"
        "dist.all_reduce(total)\n"
        "tell(total.item())\n"
        "dist.destroy_process_group()\n"
    )
    sandbox.environ["OMP_NUM_THREADS"] = "1"
    ended = sandbox.evener("launch", "--nproc", 2, script).end()
    assert ended.code == 0, ended.err
    assert sandbox.mailbox.rest() == ["0 3.0", "1 3.0"]


def test_under_torchrun_the_process_becomes_the_script(sandbox):
    script = sandbox.script("tell(f'{os.getpid()} {sys.argv[1:]}')\nraise ValueError('boom')\n")
    sandbox.environ |= {"RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1"}
    sandbox.environ |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "29500"}
    running = sandbox.evener("launch", script, "x")
    ended = running.end()
    assert sandbox.mailbox.rest() == [f"1 {running.process.pid} ['x']"]
    assert (ended.code, ended.err.count("ValueError: boom")) == (1, 1)


def test_a_module_of_a_package_that_was_started_plainly_is_started_again_as_one(sandbox):
    (sandbox.folder / "package").mkdir()
    (sandbox.folder / "package" / "__init__.py").write_text("NAME = 'package'\n")
    sandbox.script(
        "import torch, evener\n"
        "from . import NAME\n"
        "model = torch.nn.Linear(3, 1)\n"
        "sgd = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "with evener.Ddp.setup(model, sgd, devices=['cpu', 'cpu'], quiet=True) as ddp:\n"
        "    tell([NAME, __name__, __package__, sys.argv[1:], ddp.weighted_mean(ddp.rank)])\n",
        name="package/train.py",
    )
    ended = sandbox.start(sys.executable, "-m", "package.train", "--x").end()
    assert (ended.code, ended.err) == (0, "")
    seen = "['package', '__main__', 'package', ['--x'], 0.5]"
    assert sandbox.mailbox.rest() == [f"0 {seen}", f"1 {seen}"]


# ── output ───────────────────────────────────────────────────────────────────────────────────────


def test_lines_come_at_once_and_whole_with_the_rank_before_them(sandbox):
    sandbox.environ["PYTHONUNBUFFERED"] = ""
    script = sandbox.script(
        "print('here', end=' '); os.write(1, b'before\\n')\n"
        "print(RANK); print('there'); signal.pause()\n"
    )
    running = sandbox.evener("launch", "--nproc", 2, script)
    lines = [running.process.stdout.readline().decode() for _ in range(6)]
    for rank, mark in enumerate(("", "[rank 1] ")):
        own = [line for line in lines if line.startswith("[rank 1] ") is bool(mark)]
        assert own == [f"{mark}before\n", f"{mark}here {rank}\n", f"{mark}there\n"]
    running.signal(signal.SIGTERM)
    assert running.end().code == 143


# ── failures ─────────────────────────────────────────────────────────────────────────────────────


def test_the_first_failure_is_shown_and_what_follows_from_it_is_one_line(sandbox):
    # Rank 0 notices the loss, and has ended, before rank 1 has finished failing.
    script = sandbox.script(
        "from evener.errors import PeerLostError\n"
        "tell(os.getpid())\n"
        "if RANK == 0:\n"
        "    raise PeerLostError('rank 1 went away')\n"
        "if RANK == 1:\n"
        "    pass_gate()\n"
        "    raise ValueError('the real reason')\n"
        "wait_forever()\n"
    )
    running = sandbox.launch(script, nproc=3, grace_s=LONG_S, settle_s=LONG_S)
    first, second, _ = pids(sandbox.mailbox.read(3))
    assert wait_until_gone(first)
    sandbox.open_gate(1)
    ended = running.end()
    assert ended.code == 1
    assert ended.err.splitlines()[0] == f"rank 1 (pid {second}) failed:"
    assert ended.err.endswith("ValueError: the real reason\nalso ended: rank 0 (PeerLostError)\n")
    assert ended.err.count("Traceback") == 1
    assert "/evener/" not in ended.err  # the user's frames only


@pytest.mark.parametrize(
    ("end", "code", "words"),
    [
        ("sys.exit(7)", 7, "ended with exit code 7"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 1, "was killed by SIGKILL"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 1, "[rank 1] Fatal"),
    ],
)
def test_a_rank_that_ends_badly_is_named_and_ends_the_others(sandbox, end, code, words):
    ended = sandbox.evener(
        "launch", "--nproc", 2, sandbox.script(f"if RANK == 1: {end}\nwait_forever()\n")
    ).end()
    assert ended.code == code
    assert "rank 1 (pid " in ended.err
    assert words in ended.err


def test_ranks_that_do_not_stop_after_a_failure_are_killed(sandbox):
    """Whether they ignore it, or hang on their way out."""
    script = sandbox.script(
        "if RANK == 0:\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "    tell('ready')\n"
        "    wait_forever()\n"
        "pass_gate()\n"
        "threading.Thread(target=threading.Event().wait).start()\n"  # joined at exit
        "raise ValueError('boom')\n"
    )
    running = sandbox.launch(script, nproc=2, grace_s=0.3)
    assert sandbox.mailbox.read(1) == ["0 ready"]
    sandbox.open_gate(1)
    ended = running.end()
    assert ended.code == 1
    assert "had not ended 0.3 s after being asked to: killed rank 0 (pid " in ended.err
    assert "ValueError: boom" in ended.err


# ── ranks that leave others waiting ──────────────────────────────────────────────────────────────

SETUP = """\
import torch
from evener import Ddp, DdpConfig
model = torch.nn.Linear(3, 1)
def setup(**options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Ddp.setup(model, optimizer, devices="cpu", quiet=True, **options)
def train(at_window_3):
    for x in ddp.loader(torch.ones(1_000_000, 3), batch_size=8).epoch(0):
        ddp.backward(model(x).mean())
        ddp.step()
        if ddp.rank == 1 and ddp.window >= 3:
            at_window_3()
"""


def test_a_rank_that_leaves_others_waiting_ends_the_team_and_is_named(sandbox):
    """A rendezvous would wait for five minutes: longer than this test."""
    ways = {
        "exits": "if RANK == 1: sys.exit(0)\n" + SETUP + "setup()\n",
        "execs": SETUP
        + "with setup() as ddp: train(lambda: os.execvp('sleep', ['sleep', '3600']))\n",
        "exits in its loop": SETUP
        + "with setup(config=DdpConfig(partition_ratios=(0, 1))) as ddp: train(sys.exit)\n",
    }
    said = {
        "exits": "ended with exit code 0 while rank 0 waited for it in Ddp.setup",
        "execs": "has become another program (exec), while the other ranks wait for it",
        "exits in its loop": "`break` does not reach a rank without a share of the window",
    }
    scripts = {way: sandbox.script(text, name=f"{way}.py") for way, text in ways.items()}
    running = {way: sandbox.evener("launch", "--nproc", 2, path) for way, path in scripts.items()}
    for way, each in running.items():
        ended = each.end()
        assert (ended.code, "Traceback" in ended.err) == (1, False), (way, ended.err)
        assert "rank 1 " in ended.err
        assert said[way] in ended.err


def test_a_stopped_rank_is_named_at_once_and_nothing_ends(sandbox):
    script = sandbox.script("tell(os.getpid())\nif RANK == 1: pass_gate()\n")
    running = sandbox.evener("launch", "--nproc", 2, script)
    _, pid = pids(sandbox.mailbox.read(2))
    os.kill(pid, signal.SIGSTOP)
    said = running.process.stderr.readline().decode()
    assert said.startswith(f"evener: rank 1 (pid {pid}) is stopped since ")
    assert f"`kill -CONT {pid}`" in said
    os.kill(pid, signal.SIGCONT)
    assert running.process.stderr.readline() == f"evener: rank 1 (pid {pid}) runs again\n".encode()
    sandbox.open_gate(1)
    assert running.end().code == 0


# ── stopping ─────────────────────────────────────────────────────────────────────────────────────

STOPS_CLEANLY = """
from evener.team.signals import StopSignals
with StopSignals() as signals:
    tell("ready")
    while signals.requested is None:
        signal.pause()
tell("saved")
sys.exit(signals.exit_code(stopped=True))
"""


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_reaches_every_rank_and_all_stop(sandbox, signum):
    # The last rank to be ready is the last to be told, so none can miss it.
    running = sandbox.launch(sandbox.script(STOPS_CLEANLY), nproc=2, grace_s=LONG_S)
    assert sandbox.mailbox.read(2) == ["0 ready", "1 ready"]
    running.signal(signum)
    ended = running.end()
    assert (ended.code, "Traceback" in ended.err) == (128 + signum, False)
    assert sandbox.mailbox.rest() == ["0 saved", "1 saved"]
    assert "asked the ranks to stop" in ended.err


def test_a_rank_that_a_signal_stops_stops_the_run_with_that_exit_code(sandbox):
    running = sandbox.launch(
        sandbox.script("tell(os.getpid())\nwait_forever()\n"), nproc=2, grace_s=LONG_S
    )
    os.kill(pids(sandbox.mailbox.read(2))[1], signal.SIGTERM)
    ended = running.end()
    assert (ended.code, ended.out) == (143, "")
    assert "has stopped (SIGTERM): asked the rank to stop" in ended.err


#: Counts the Ctrl-C that it hears, and ends only if the test wants it.
COUNTS = """
count = 0
def note(signum, frame):
    global count
    count += 1
    tell(f"heard {count}")
for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(signum, note)
tell("ready")
"""


def test_a_terminals_ctrl_c_arrives_once_and_the_second_one_kills(sandbox):
    polite = sandbox.script(COUNTS + "pass_gate()\ntell(count)\n", name="polite.py")
    running = sandbox.launch(polite, nproc=2, grace_s=LONG_S)
    assert sandbox.mailbox.read(2) == ["0 ready", "1 ready"]
    running.press_ctrl_c()
    assert sandbox.mailbox.read(2) == ["0 heard 1", "1 heard 1"]
    sandbox.open_gate(2)
    assert running.end().code == 0  # the script chose to end normally
    assert sandbox.mailbox.rest() == ["0 1", "1 1"]

    running = sandbox.launch(sandbox.script(COUNTS + "wait_forever()\n"), nproc=2, grace_s=LONG_S)
    assert sandbox.mailbox.read(2) == ["0 ready", "1 ready"]
    running.press_ctrl_c()
    assert sandbox.mailbox.read(2) == ["0 heard 1", "1 heard 1"]
    running.press_ctrl_c()
    ended = running.end()
    assert ended.code == 130
    assert "interrupted again: killed rank 0 (pid " in ended.err
    assert sandbox.mailbox.rest() == []


#: As the interpreter is interrupted while it imports evener's command line.
INTERRUPTING = """\
import os, signal, sys
os.kill(os.getpid(), signal.SIGINT)
sys.path.remove(os.path.dirname(__file__))
del sys.modules["typer"]
import typer
"""


def test_ctrl_c_while_the_command_line_is_imported_prints_nothing(sandbox):
    folder = sandbox.folder / "interrupting"
    folder.mkdir()
    (folder / "typer.py").write_text(INTERRUPTING)
    sandbox.environ["PYTHONPATH"] = f"{folder}{os.pathsep}{SRC}"
    ended = sandbox.evener("launch", "--nproc", 2, sandbox.script("wait_forever()\n")).end()
    assert (ended.code, ended.out, ended.err) == (130, "", "")


# ── nothing is left behind ───────────────────────────────────────────────────────────────────────

WITH_GRANDCHILD = """
import subprocess
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
tell(f"{os.getpid()} {child.pid}")
"""


def test_a_launcher_that_is_killed_leaves_no_process_and_no_file(sandbox):
    temporary = sandbox.folder / "temporary"
    temporary.mkdir()
    sandbox.environ["TMPDIR"] = str(temporary)
    script = sandbox.script(COUNTS + WITH_GRANDCHILD + "wait_forever()\n")
    running = sandbox.launch(script, nproc=2, grace_s=LONG_S)
    lines = [line for line in sandbox.mailbox.read(4) if not line.endswith("ready")]
    family = pids(lines)
    assert len(family) == 4
    running.signal(signal.SIGTERM)  # which they ignore
    sandbox.mailbox.read(2)
    running.signal(signal.SIGKILL)
    assert all(wait_until_gone(pid) for pid in family)
    assert list(temporary.iterdir()) == []


def test_ranks_die_with_their_launcher_even_without_the_lifeline(sandbox):
    script = sandbox.script("tell(os.getpid())\nwait_forever()\n")
    running = sandbox.evener("launch", "--nproc", 2, script)
    ranks = pids(sandbox.mailbox.read(2))
    children = psutil.Process(running.process.pid).children()
    (lifeline,) = [child for child in children if child.pid not in ranks]
    assert "lifeline.py" in " ".join(lifeline.cmdline())
    lifeline.kill()
    running.signal(signal.SIGKILL)
    assert all(wait_until_gone(pid) for pid in ranks)


def test_what_a_rank_has_started_ends_with_the_run(sandbox):
    ended = sandbox.evener("launch", "--nproc", 2, sandbox.script(WITH_GRANDCHILD)).end()
    assert ended.code == 0
    assert all(wait_until_gone(pid) for pid in pids(sandbox.mailbox.rest()))


def test_a_rank_whose_launcher_has_gone_before_it_began_does_not_start(sandbox):
    script = sandbox.script("tell('ran')\n")
    sandbox.environ |= {"EVENER_LAUNCHED": "1", "EVENER_PARENT_PID": "1", "RANK": "0"}
    ended = sandbox.start(sys.executable, "-P", "-m", "evener.team.script", script).end()
    assert (ended.code, sandbox.mailbox.rest()) == (1, [])
