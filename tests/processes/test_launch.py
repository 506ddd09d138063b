import os
import re
import signal
import socket
import sys

import psutil
import pytest

from helpers.launched import PRELUDE, Sandbox, wait_until_gone
from helpers.limits import PATIENCE_S

LONG_S = 3600.0  # a period of grace that no test waits for
STOP_SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]


@pytest.fixture
def sandbox(tmp_path):
    sandbox = Sandbox(tmp_path)
    yield sandbox
    sandbox.close()


def pids(lines):
    return [int(pid) for line in lines for pid in line.split()[1:]]


# ── what a rank sees ─────────────────────────────────────────────────────────────────────────────


def test_ranks_run_the_script_as_python_would(sandbox):
    (sandbox.folder / "neighbour.py").write_text("NAME = 'neighbour'\n")
    script = sandbox.script(
        "import neighbour\n"
        "assert __name__ == '__main__' and __spec__ is None\n"
        "assert sys.modules['__main__'].RANK == RANK\n"
        "print(neighbour.NAME, os.environ['WORLD_SIZE'], sys.argv, __file__)\n"
    )
    ended = sandbox.evener("launch", "--nproc", 2, script, "--lr", "1", "--nproc", "x").end()
    seen = f"neighbour 2 ['{script}', '--lr', '1', '--nproc', 'x'] {script}"
    assert sorted(ended.out.splitlines()) == sorted([seen, f"[rank 1] {seen}"])
    assert (ended.code, ended.err) == (0, "")


def test_multiprocessing_finds_what_the_script_defines(sandbox):
    script = sandbox.script(
        "import multiprocessing\n"
        "def square(x):\n"
        "    return x * x\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print(pool.map(square, [3]))\n"
    )
    ended = sandbox.evener("launch", script).end()
    assert (ended.code, ended.out, ended.err) == (0, "[9]\n", "")


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


def test_ranks_of_a_script_are_slowed_on_purpose_and_absent_ones_refused(sandbox):
    script = sandbox.script(
        "import torch\n"
        "from evener import Ddp\n"
        "model = torch.nn.Linear(2, 1)\n"
        "sgd = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "with Ddp.setup(model, sgd, devices='cpu') as ddp:\n"
        "    tell([member.emulated for member in ddp.members])\n"
    )
    ended = sandbox.evener("launch", "--nproc", 2, "--emulate-slow", "1:3", script).end()
    assert ended.code == 0, ended.err
    assert sandbox.mailbox.rest() == ["0 [1.0, 3.0]", "1 [1.0, 3.0]"]
    assert "emulated 3x slower" in ended.err
    refused = sandbox.evener("launch", "--nproc", 2, "--emulate-slow", "5:2", script).end()
    assert refused.code == 2
    assert "emulate_slow is {5: 2.0}, but the team has 2 ranks" in refused.err
    refused = sandbox.evener("launch", "--emulate-slow", "1:0.5", script).end()
    assert refused.code == 2
    assert "is not RANK:FACTOR with a factor of 1 or more" in refused.err


def test_the_launcher_never_imports_torch(sandbox):
    sandbox.forbid("torch")
    ended = sandbox.evener("launch", "--nproc", 2, sandbox.script("tell('here')")).end()
    assert (ended.code, ended.err) == (0, "")
    assert sandbox.mailbox.rest() == ["0 here", "1 here"]


# ── output ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("nproc", [1, 2])
def test_each_rank_s_lines_come_at_once_and_whole_through_a_pipe(sandbox, nproc, unbuffered):
    sandbox.environ["PYTHONUNBUFFERED"] = unbuffered
    script = sandbox.script(
        "print('here', end=' '); os.write(1, b'before\\n')\n"
        "print(RANK); print('there'); signal.pause()\n"
    )
    running = sandbox.evener("launch", "--nproc", nproc, script)
    lines = [running.process.stdout.readline().decode() for _ in range(3 * nproc)]
    for rank, mark in [(0, ""), (1, "[rank 1] ")][:nproc]:
        own = [line for line in lines if line.startswith("[rank 1] ") is bool(mark)]
        assert own == [f"{mark}before\n", f"{mark}here {rank}\n", f"{mark}there\n"]
    running.process.send_signal(signal.SIGTERM)
    running.end()


def test_lines_come_at_once_where_torchrun_has_started_the_rank(sandbox):
    sandbox.environ |= {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "LOCAL_RANK": "0"}
    sandbox.environ |= {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "PYTHONUNBUFFERED": ""}
    sandbox.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    script = sandbox.script("print('here'); signal.pause()\n")
    running = sandbox.evener("launch", script)
    assert running.process.stdout.readline() == b"here\n"
    running.process.terminate()
    running.end()


def test_much_output_blocks_nobody_and_arrives_whole(sandbox):
    script = sandbox.script(
        "line = b'\\xff' + b'x' * 999 + b'\\n'\n"
        "for _ in range(10_000):\n"
        "    os.write(1, line)\n"
        "    if RANK:\n"
        "        os.write(2, line[:100])\n"
    )
    running = sandbox.evener("launch", "--nproc", 3, script)
    out, err = running.process.communicate(timeout=PATIENCE_S)
    assert running.process.returncode == 0
    line = b"\xff" + b"x" * 999
    counts = dict.fromkeys((b"", b"[rank 1] ", b"[rank 2] "), 0)
    for got in out.splitlines():
        counts[got.removesuffix(line)] += 1  # no line is torn apart
    assert counts == {b"": 10_000, b"[rank 1] ": 10_000, b"[rank 2] ": 10_000}
    assert err.count(b"\xff") == 20_000


def test_lines_arrive_as_they_are_written(sandbox):
    script = sandbox.script("print('first')\nif RANK: wait_forever()\n")
    running = sandbox.evener("launch", "--nproc", 2, script)
    got = {running.process.stdout.readline(), running.process.stdout.readline()}
    assert got == {b"first\n", b"[rank 1] first\n"}
    running.signal(signal.SIGTERM)
    assert running.end().code == 143


def test_a_reader_that_goes_away_ends_nothing(sandbox):
    script = sandbox.script(
        "if RANK:\n"
        "    for _ in range(2_000):\n"
        "        os.write(1, b'x' * 999 + b'\\n')\n"
        "    tell('done')\n"
    )
    running = sandbox.evener("launch", "--nproc", 2, script)
    running.process.stdout.close()
    assert running.process.wait(PATIENCE_S) == 0
    assert sandbox.mailbox.rest() == ["1 done"]


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


def test_a_rank_that_lost_a_peer_which_lives_on_ends_the_run_too(sandbox):
    script = sandbox.script(
        "from evener.errors import PeerLostError\n"
        "if RANK == 0:\n"
        "    raise PeerLostError('rank 1 went away')\n"
        "wait_forever()\n"
    )
    ended = sandbox.evener("launch", "--nproc", 2, script).end()
    assert ended.code == 1
    assert ended.err.endswith("PeerLostError: rank 1 went away\n")


def test_an_error_that_the_user_can_mend_comes_once_and_without_a_traceback(sandbox):
    script = sandbox.script(
        "from evener.errors import ConfigError\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "tell('ready')\n"
        "pass_gate()\n"
        "raise ConfigError('batch_size is 0; give 1 or more')\n"
    )
    running = sandbox.launch(script, nproc=2, grace_s=LONG_S)
    assert sandbox.mailbox.read(2) == ["0 ready", "1 ready"]
    sandbox.open_gate(2)
    ended = running.end()
    assert (ended.code, ended.err) == (2, "error: batch_size is 0; give 1 or more\n")


def test_a_syntax_error_is_shown_with_its_place(sandbox):
    ended = sandbox.evener("launch", sandbox.script("x = = 1\n")).end()
    assert ended.code == 1
    assert f'script.py", line {PRELUDE.count(chr(10)) + 1}' in ended.err
    assert ended.err.endswith("SyntaxError: invalid syntax\n")


def test_the_exit_code_of_the_first_failing_rank_is_the_launchers(sandbox):
    script = sandbox.script("if RANK == 1: sys.exit(7)\nwait_forever()\n")
    ended = sandbox.evener("launch", "--nproc", 2, script).end()
    assert ended.code == 7
    assert "rank 1 (pid " in ended.err
    assert "ended with exit code 7" in ended.err


@pytest.mark.parametrize(
    ("signum", "words"),
    [
        (signal.SIGKILL, ["SIGKILL", "the kernel has ended nothing here for memory"]),
        (signal.SIGSEGV, ["SIGSEGV", "[rank 1] Fatal"]),
    ],
)
def test_a_killed_rank_is_named_with_the_likely_cause(sandbox, signum, words):
    script = sandbox.script(
        f"if RANK == 1:\n    tell(os.getpid())\n    os.kill(os.getpid(), {int(signum)})\n"
        "wait_forever()\n"
    )
    ended = sandbox.evener("launch", "--nproc", 2, script).end()
    (line,) = sandbox.mailbox.rest()
    assert ended.code == 1
    assert f"error: rank 1 (pid {line.split()[1]}) was killed by" in ended.err
    for word in words:
        assert word in ended.err


def test_ranks_that_do_not_stop_after_a_failure_are_killed(sandbox):
    script = sandbox.script(
        "if RANK == 0:\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "    tell('ready')\n"
        "    wait_forever()\n"
        "pass_gate()\n"
        "raise ValueError('boom')\n"
    )
    running = sandbox.launch(script, nproc=2, grace_s=0.3)
    assert sandbox.mailbox.read(1) == ["0 ready"]
    sandbox.open_gate(1)
    ended = running.end()
    assert ended.code == 1
    assert "had not ended 0.3 s after being asked to: killed rank 0 (pid " in ended.err
    assert "ValueError: boom" in ended.err


def test_a_rank_that_failed_but_hangs_on_its_way_out_still_ends_the_run(sandbox):
    script = sandbox.script(
        "if RANK == 1:\n"
        "    threading.Thread(target=threading.Event().wait).start()\n"  # joined at exit
        "    raise ValueError('boom')\n"
        "wait_forever()\n"
    )
    ended = sandbox.launch(script, nproc=2, grace_s=0.3).end()
    assert ended.code == 1
    assert re.search(r"killed (rank 0 \(pid \d+\), )?rank 1 \(pid ", ended.err)
    assert "ValueError: boom" in ended.err


def test_descriptors_that_are_used_up_are_an_error_with_limit_and_remedy(sandbox):
    """In the launcher at every moment of its start, and in a rank."""
    script = sandbox.script("kept = [open(os.devnull) for _ in range(10**6)]\n")
    limits = (*range(8, 21, 2), 300)
    launch = f"exec {sys.executable} -P -m evener launch --nproc 2 {script}"
    running = {limit: sandbox.start("sh", "-c", f"ulimit -n {limit}; {launch}") for limit in limits}
    for limit, each in running.items():
        ended = each.end()
        assert ended.code == 1, limit
        assert "Traceback" not in ended.err, (limit, ended.err)
        assert f"{limit} files and connections open (`ulimit -n`)" in ended.err, (limit, ended.err)
    assert "evener: raised at " in ended.err
    assert script.name in ended.err


def test_a_program_that_is_not_there(sandbox):
    code = (
        "import sys; from evener.team.launch import LaunchPlan, launch; "
        "from evener.team.child import run_child; "
        "sys.exit(run_child(lambda: launch(['/no/such/program'], LaunchPlan(nproc=2))))"
    )
    ended = sandbox.start(sys.executable, "-P", "-c", code).end()
    assert ended.code == 1
    assert ended.err.startswith("error: rank 0 could not be started (/no/such/program: No such")


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


@pytest.mark.parametrize("signum", STOP_SIGNALS)
def test_a_signal_reaches_every_rank_once_and_all_stop(sandbox, signum):
    # The last rank to be ready is the last to be told, so none can miss it.
    running = sandbox.launch(sandbox.script(STOPS_CLEANLY), nproc=2, grace_s=LONG_S)
    assert sandbox.mailbox.read(2) == ["0 ready", "1 ready"]
    running.signal(signum)
    ended = running.end()
    assert ended.code == 128 + signum
    assert sandbox.mailbox.rest() == ["0 saved", "1 saved"]
    assert "Traceback" not in ended.err
    assert f"evener: {signal.Signals(signum).name}: asked the ranks to stop" in ended.err


@pytest.mark.parametrize(("end", "code"), [("wait_forever()", 143), ("sys.exit(130)", 130)])
def test_a_rank_that_a_signal_stops_stops_the_run_with_that_exit_code(sandbox, end, code):
    """Whether it dies of the signal, or heeds it as a job does."""
    body = "if RANK == 1:\n    tell(os.getpid())\n    pass_gate()\n    {}\nwait_forever()\n"
    running = sandbox.launch(sandbox.script(body.format(end)), nproc=2, grace_s=LONG_S)
    (line,) = sandbox.mailbox.read(1)
    if code == 143:
        os.kill(int(line.split()[1]), signal.SIGTERM)
    sandbox.open_gate(1)
    ended = running.end()
    assert (ended.code, ended.out) == (code, "")
    assert re.fullmatch(
        r"evener: rank 1 \(.+\) has stopped \((SIGTERM|SIGINT)\): asked the ranks? to stop.*\n",
        ended.err,
    )


def test_a_terminals_ctrl_c_arrives_once(sandbox):
    script = sandbox.script(
        "count = 0\n"
        "def note(signum, frame):\n"
        "    global count\n"
        "    count += 1\n"
        "signal.signal(signal.SIGINT, note)\n"
        "tell('ready')\n"
        "while not count:\n"
        "    signal.pause()\n"
        "tell('first')\n"
        "pass_gate()\n"
        "tell(count)\n"
    )
    running = sandbox.launch(script, nproc=2, grace_s=LONG_S)
    assert sandbox.mailbox.read(2) == ["0 ready", "1 ready"]
    running.press_ctrl_c()
    assert sandbox.mailbox.read(2) == ["0 first", "1 first"]
    sandbox.open_gate(2)
    ended = running.end()
    assert sandbox.mailbox.rest() == ["0 1", "1 1"]
    assert ended.code == 0  # the script chose to end normally


def test_a_script_that_knows_no_signals_stops_at_ctrl_c(sandbox):
    script = sandbox.script("tell('ready')\nwait_forever()\n")
    running = sandbox.launch(script, nproc=2, grace_s=LONG_S)
    sandbox.mailbox.read(2)
    running.press_ctrl_c()
    ended = running.end()
    assert ended.code == 130
    assert "Traceback" not in ended.err


def test_a_closed_terminal_asks_the_ranks_to_stop(sandbox):
    running = sandbox.launch(sandbox.script(STOPS_CLEANLY), nproc=2, grace_s=LONG_S)
    sandbox.mailbox.read(2)
    running.signal(signal.SIGHUP)
    assert running.end().code == 129
    assert sandbox.mailbox.rest() == ["0 saved", "1 saved"]


IGNORES_EVERYTHING = """
for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(signum, lambda *_: tell("heard"))
tell("ready")
wait_forever()
"""


def test_ranks_that_do_not_stop_in_time_are_killed_and_that_is_said(sandbox):
    running = sandbox.launch(sandbox.script(IGNORES_EVERYTHING), nproc=2, grace_s=0.5)
    assert sandbox.mailbox.read(2) == ["0 ready", "1 ready"]
    running.signal(signal.SIGTERM)
    ended = running.end()
    assert ended.code == 143
    assert "had not ended 0.5 s after being asked to: killed rank 0 (pid " in ended.err
    # That they hear of it is another test: on a busy machine they may be killed before.
    assert set(sandbox.mailbox.rest()) <= {"0 heard", "1 heard"}


def test_a_second_ctrl_c_kills_at_once(sandbox):
    running = sandbox.launch(sandbox.script(IGNORES_EVERYTHING), nproc=2, grace_s=LONG_S)
    assert sandbox.mailbox.read(2) == ["0 ready", "1 ready"]
    running.press_ctrl_c()
    assert sandbox.mailbox.read(2) == ["0 heard", "1 heard"]
    running.press_ctrl_c()
    ended = running.end()
    assert ended.code == 130
    assert "interrupted again: killed rank 0 (pid " in ended.err
    assert sandbox.mailbox.rest() == []


# ── nothing is left behind ───────────────────────────────────────────────────────────────────────

WITH_GRANDCHILD = """
import subprocess
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
tell(f"{os.getpid()} {child.pid}")
"""


@pytest.mark.parametrize("while_stopping", [False, True])
def test_a_launcher_killed_without_a_word_leaves_no_orphan(sandbox, while_stopping):
    ignore = "".join(f"signal.signal({int(s)}, lambda *_: tell('heard'))\n" for s in STOP_SIGNALS)
    script = sandbox.script(ignore + WITH_GRANDCHILD + "wait_forever()\n")
    running = sandbox.launch(script, nproc=2, grace_s=LONG_S)
    family = pids(sandbox.mailbox.read(2))
    assert len(family) == 4
    if while_stopping:
        running.signal(signal.SIGTERM)
        sandbox.mailbox.read(2)
    running.signal(signal.SIGKILL)
    for pid in family:
        assert wait_until_gone(pid), pid


def test_ranks_die_with_their_launcher_even_without_the_lifeline(sandbox):
    script = sandbox.script("tell(os.getpid())\nwait_forever()\n")
    running = sandbox.evener("launch", "--nproc", 2, script)
    ranks = pids(sandbox.mailbox.read(2))
    children = psutil.Process(running.process.pid).children()
    (lifeline,) = [child for child in children if child.pid not in ranks]
    assert "lifeline.py" in " ".join(lifeline.cmdline())
    lifeline.kill()
    running.signal(signal.SIGKILL)
    for pid in ranks:
        assert wait_until_gone(pid), pid


@pytest.mark.parametrize("last", ["pass", "sys.exit(3)"])
def test_what_a_rank_has_started_ends_with_the_run(sandbox, last):
    ended = sandbox.evener("launch", "--nproc", 2, sandbox.script(WITH_GRANDCHILD + last)).end()
    assert ended.code == (3 if "exit" in last else 0)
    for pid in pids(sandbox.mailbox.rest()):
        assert wait_until_gone(pid), pid


def test_a_rank_whose_launcher_has_gone_before_it_began_does_not_start(sandbox):
    script = sandbox.script("tell('ran')\n")
    sandbox.environ |= {"EVENER_LAUNCHED": "1", "EVENER_PARENT_PID": "1", "RANK": "0"}
    ended = sandbox.start(sys.executable, "-P", "-m", "evener.team.script", script).end()
    assert ended.code == 1
    assert sandbox.mailbox.rest() == []


# ── the command line ─────────────────────────────────────────────────────────────────────────────


def test_bad_input_is_said_once_before_any_rank_starts(sandbox):
    sandbox.forbid("torch")
    (sandbox.folder / "broken.yaml").write_text("batch_size: 4\noptimizer: {lr: 1\nseed: 1\n")
    ended = sandbox.evener("pretrain", "--nproc", 2, "broken.yaml").end()
    assert ended.code == 2
    assert ended.err.startswith("error: broken.yaml:3:5: ")
    assert ended.err.count("\n") == 1


def test_a_port_in_use_is_named(sandbox):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = sandbox.evener("launch", "--port", port, sandbox.script("tell('started')")).end()
    assert ended.code == 1
    assert f"error: port {port} cannot be opened" in ended.err
    assert "--port" in ended.err
    assert sandbox.mailbox.rest() == []


TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


def test_under_torchrun_the_process_becomes_the_script(sandbox):
    script = sandbox.script("tell(f'{os.getpid()} {sys.argv[1:]}')\nraise ValueError('boom')\n")
    sandbox.environ |= TORCHRUN
    running = sandbox.evener("launch", script, "x")
    ended = running.end()
    assert sandbox.mailbox.rest() == [f"1 {running.process.pid} ['x']"]
    assert ended.code == 1
    assert ended.err.count("ValueError: boom") == 1


def test_half_a_rank_is_refused(sandbox):
    sandbox.environ |= {"WORLD_SIZE": "2"}
    sandbox.forbid("torch")
    ended = sandbox.evener("pretrain").end()
    assert ended.code == 2
    assert "WORLD_SIZE=2 set" in ended.err


def test_help_and_version_need_no_torch(sandbox):
    sandbox.forbid("torch")
    for arguments in (["--help"], ["--version"]):
        ended = sandbox.evener(*arguments).end()
        assert (ended.code, ended.err) == (0, "")
        assert ended.out
