"""Ends at awkward moments: ranks that leave others waiting, signals while all is still starting."""

import os
import random
import signal
import sys
import time

import psutil
import pytest

from helpers.launched import SRC, Sandbox, wait_until_gone
from helpers.ports import free_port
from helpers.pretraining import Lab


@pytest.fixture
def sandbox(tmp_path):
    sandbox = Sandbox(tmp_path)
    sandbox.environ.pop("PYTEST_CURRENT_TEST", None)
    yield sandbox
    sandbox.close()


# ── ranks that leave others waiting ──────────────────────────────────────────────────────────────

SETUP = """\
import torch
from evener import Ddp
model = torch.nn.Linear(3, 1)
def setup():
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Ddp.setup(model, optimizer, devices="cpu", quiet=True)
"""

TRAIN = """\
with setup() as ddp:
    for x in ddp.loader(torch.ones(1_000_000, 3), batch_size=8).epoch(0):
        ddp.backward(model(x).mean())
        ddp.step()
        if RANK == 1:
            os.execvp("sleep", ["sleep", "3600"])
"""

ENDS = {
    "exits before": "if RANK == 1: sys.exit(0)\n" + SETUP + "setup()\n",
    "execs before": "if RANK == 1: os.execvp('sleep', ['sleep', '3600'])\n" + SETUP + "setup()\n",
    "exits inside": SETUP
    + "if RANK == 1: model.train = lambda *_: os._exit(0)\nsetup().weighted_mean(1)\n",
    "execs while training": SETUP + TRAIN,
}

SAID = {
    "exits before": "ended with exit code 0 while rank 0 waited for it in Ddp.setup",
    "execs before": "has become another program (exec), while the other ranks count on it",
    "exits inside": "ended with exit code 0 while others were at work; let every rank go through",
    "execs while training": "has become another program (exec), while the other ranks count on it",
}


def test_a_rank_that_leaves_others_waiting_ends_the_team_and_is_named(sandbox):
    """A rendezvous would wait for five minutes: longer than this test."""
    running = {}
    for way, script in ENDS.items():
        path = sandbox.script(script, name=f"{way.replace(' ', '_')}.py")
        running[way] = sandbox.evener("launch", "--nproc", 2, path)
    for way, each in running.items():
        ended = each.end()
        assert ended.code == 1, way
        assert "rank 1 " in ended.err, way
        assert SAID[way] in ended.err, (way, ended.err)
        assert "Traceback" not in ended.err


LOST = """\
import torch
from evener import Ddp
model = torch.nn.Linear(3, 1)
ddp = Ddp.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), devices="cpu", quiet=True)
def train():
    for batch in ddp.loader(torch.ones(80, 3), batch_size=4).epoch(0):
        if ddp.rank == 1 and ddp.window == 3:
            os._exit(3)
        ddp.backward(model(batch).mean())
        ddp.step()
"""


@pytest.mark.parametrize("end", ["train()", "with ddp: train()"])
def test_without_a_launcher_of_ours_survivors_print_one_message(sandbox, end):
    script = sandbox.script(f"{LOST}{end}\n")
    place = ("WORLD_SIZE=2", "LOCAL_WORLD_SIZE=2", "MASTER_ADDR=127.0.0.1")
    place = (*place, f"MASTER_PORT={free_port()}")
    running = [
        sandbox.start("env", *place, f"RANK={k}", f"LOCAL_RANK={k}", sys.executable, script)
        for k in range(2)
    ]
    survivor, lost = (each.end() for each in running)
    assert (survivor.code, lost.code, lost.err) == (1, 3, "")
    message, where = survivor.err.splitlines()
    assert message.startswith("error: rank 0 lost a peer in ")
    assert where.startswith("evener: raised on rank 0 at ")


# ── scripts that simply end ──────────────────────────────────────────────────────────────────────

LOOP = """\
import torch
from evener import Ddp, Sink
class Lines(Sink):
    def emit(self, event): tell(event["type"] + " " + str(event.get("reason")))
    def close(self): tell("closed")
def train(end, num_workers=0, **options):
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ddp = Ddp.setup(model, optimizer, quiet=True, **options)
    data = torch.utils.data.TensorDataset(torch.ones(160, 3))
    loader = ddp.loader(data, batch_size=8, num_workers=num_workers)
    for epoch in range(2):
        for (x,) in loader.epoch(epoch):
            ddp.backward(model(x).square().mean())
            ddp.step()
            if end is not None and ddp.window == 25:
                end()
    return model, optimizer, ddp, loader
"""

#: How a script ends, its ranks, and the exit code of the launcher.
SIMPLE_ENDS = {
    "falls off": (3, "model, optimizer, ddp, loader = train(None, sinks=[Lines])", 0),
    "sys.exit": (2, "kept = train(None, 2, policy='cadence')\nsys.exit(0)", 0),
    "sys.exit in the loop": (2, "train(lambda: sys.exit(0), 2, policy='async')", 0),
    "quit": (2, "def main(): return train(None)\nmain()\ntwo = main()\nquit()", 0),
    "os._exit": (2, "kept = train(None)\nos._exit(0)", 0),
    "sys.exit(3)": (2, "kept = train(None)\nsys.exit(3)", 3),
    "raises": (2, "kept = train(None)\nraise ValueError('boom')", 1),
    "plainly": (0, "kept = train(None, devices=['cpu', 'cpu'])", 0),
}


def test_the_end_of_a_script_is_no_failure_however_it_comes(sandbox):
    """A newcomer's script has neither ``with`` nor ``close``; what it says stays quiet, too."""
    running = {}
    for way, (nproc, body, _) in SIMPLE_ENDS.items():
        script = sandbox.script(LOOP + body, name=f"{way.replace(' ', '_')}.py")
        starts = ("launch", "--nproc", nproc, script) if nproc else None
        running[way] = sandbox.evener(*starts) if starts else sandbox.start(sys.executable, script)
    for way, (_, _, code) in SIMPLE_ENDS.items():
        ended = running[way].end()
        assert ended.code == code, (way, ended.err)
        assert ended.err.count("Traceback") == (way == "raises"), (way, ended.err)
        assert ("error:" in ended.err) == (way == "sys.exit(3)"), (way, ended.err)
    told = [line.partition(" ")[2] for line in sandbox.mailbox.rest()]
    assert told.count("run_finished completed") == 1
    assert "closed" in told


BY_NEXT = (
    SETUP
    + """\
from torch.utils.data import DataLoader, RandomSampler, TensorDataset
data = TensorDataset(torch.ones(64, 3))
endless = DataLoader(data, 8, sampler=RandomSampler(data, True, 10**10))
ddp = setup()
batches = iter(ddp.loader(endless))
while ddp.window < 3:
    ddp.backward(model(next(batches)[0]).mean())
    ddp.step()
print(ddp.progress.samples, "samples")
"""
)


def test_a_script_that_takes_batches_from_an_endless_sampler_by_next_ends_in_silence(sandbox):
    ended = sandbox.evener("launch", "--nproc", 1, sandbox.script(BY_NEXT)).end()
    assert (ended.code, ended.out, ended.err) == (0, "24 samples\n", "")


def test_a_program_that_follows_training_is_no_failure(sandbox):
    script = sandbox.script(
        SETUP + "with setup() as ddp:\n    ddp.weighted_mean(1.0)\nos.execvp('true', ['true'])\n"
    )
    ended = sandbox.evener("launch", "--nproc", 2, script).end()
    assert (ended.code, ended.err) == (0, "")


# ── several machines ─────────────────────────────────────────────────────────────────────────────


def on_two_machines(sandbox, script):
    port = free_port()
    nodes = ("--nnodes", 2, "--master-addr", "127.0.0.1", "--port", port)
    return [
        sandbox.evener("launch", "--nproc", 1, *nodes, "--node-rank", node, script)
        for node in range(2)
    ]


@pytest.mark.parametrize("node", [0, 1])
def test_ctrl_c_on_one_machine_reaches_all_of_them(sandbox, node):
    script = (
        "signal.signal(signal.SIGINT, signal.default_int_handler)\ntell('on')\nwait_forever()\n"
    )
    running = on_two_machines(sandbox, sandbox.script(script))
    assert sandbox.mailbox.read(2) == ["0 on", "1 on"]
    running[node].press_ctrl_c()
    for number, each in enumerate(running):
        ended = each.end()
        assert ended.code == 130
        assert "Traceback" not in ended.err
        assert ("SIGINT on another machine" in ended.err) == (number != node)


def test_a_failure_on_one_machine_ends_the_others_at_once(sandbox):
    """Those that wait in setup would do so for five minutes."""
    body = "if RANK == 1: {}\n" + SETUP + "tell('in setup')\nsetup()\n"
    exits = sandbox.script(body.format("sys.exit(0)"), name="exits.py")
    fails = sandbox.script(body.format("pass_gate(); raise ValueError('boom')"), name="fails.py")
    first, second = on_two_machines(sandbox, exits)
    other_first, other_second = on_two_machines(sandbox, fails)
    assert sandbox.mailbox.read(2) == ["0 in setup"] * 2
    sandbox.open_gate(1)
    ended = first.end()
    assert (ended.code, second.end().code) == (1, 0)
    assert "rank 1 on another machine ended with exit code 0 while rank 0 waited" in ended.err
    ended = other_first.end()
    assert (ended.code, other_second.end().code) == (1, 1)
    assert "the run failed on another machine, which has rank 1" in ended.err


# ── signals while all is still starting ──────────────────────────────────────────────────────────


def test_a_signal_takes_effect_while_ranks_import_their_libraries(tmp_path):
    lab = Lab(tmp_path)
    try:
        lab.install("")
        (lab.folder / "site" / "transformers.py").write_text(
            "import os, signal\n"
            "with open(os.environ['TEST_MAILBOX'], 'w') as mailbox:\n"
            "    mailbox.write(f'{os.getpid()}\\n')\n"
            "while True:\n    signal.pause()\n"
        )
        running = lab.command("run.yaml", "--nproc", 2)
        pids = [int(line) for line in lab.sandbox.mailbox.read(2)]
        running.signal(signal.SIGTERM)
        assert all(wait_until_gone(pid) for pid in pids)
        ended = running.end()
        assert ended.code == 143
        assert "killed" not in ended.err, "their period of grace was over"
        assert "Traceback" not in ended.err
    finally:
        lab.close()


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


PLAIN = """\
if "RANK" not in os.environ:
    from evener.team.starting import start_all_ranks
    start_all_ranks(["cpu", "cpu"], optional=False, quiet=False)
import argparse, ctypes, decimal, email, http.client, unittest
with open(os.environ["TEST_MAILBOX"], "w") as mailbox:
    time.sleep(0.2)
"""

MOMENTS = 25
AT_ONCE = 5


def test_ctrl_c_at_any_moment_prints_no_traceback(sandbox):
    """From evener's first line on, through two ranks' start, work and end."""
    draw = random.Random(9)
    script = sandbox.script(PLAIN)
    pressed = 0
    for _ in range(MOMENTS // AT_ONCE):
        running = [sandbox.start(sys.executable, script) for _ in range(AT_ONCE)]
        begun = []
        for each in running:
            assert b"was started plainly" in each.process.stderr.readline()
            # One of each five in the moment in which the line is read.
            moment_s = draw.uniform(0.0, 1.2) if begun else 0.0
            begun.append((time.monotonic() + moment_s, each))
        for moment_s, each in sorted(begun, key=lambda pair: pair[0]):
            time.sleep(max(0.0, moment_s - time.monotonic()))
            if each.process.poll() is None:
                pressed += 1
                each.press_ctrl_c()
        for each in running:
            ended = each.end()
            assert ended.code in (130, -signal.SIGINT, 0), ended.err
            assert "Traceback" not in ended.err
            assert "KeyboardInterrupt" not in ended.err
    assert pressed


# ── nothing is left behind ───────────────────────────────────────────────────────────────────────


def test_a_launcher_that_is_killed_leaves_no_file(sandbox, tmp_path):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    sandbox.environ["TMPDIR"] = str(temporary)
    running = sandbox.evener("launch", "--nproc", 2, sandbox.script("tell('on')\nwait_forever()\n"))
    sandbox.mailbox.read(2)
    family = [child.pid for child in psutil.Process(running.process.pid).children()]
    assert len(family) == 3
    running.signal(signal.SIGKILL)
    assert all(wait_until_gone(pid) for pid in family)
    assert list(temporary.iterdir()) == []
