"""``python train.py`` with several devices: every rank runs it; they live and die as one."""

import sys

import pytest

from helpers.launched import Sandbox, wait_until_gone

SETUP = """\
import torch, evener
model = torch.nn.Linear(3, 1)
def setup(**options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return evener.Ddp.setup(model, optimizer, devices=["cpu", "cpu"], **options)
"""


@pytest.fixture
def sandbox(tmp_path):
    sandbox = Sandbox(tmp_path)
    yield sandbox
    sandbox.close()


def test_an_unguarded_script_trains_on_all_its_devices(sandbox):
    """Arguments and interpreter options are those of the plain start."""
    script = sandbox.script(
        SETUP + "os.makedirs('elsewhere', exist_ok=True); os.chdir('elsewhere')\n"
        "with setup() as ddp:\n"
        "    loader = ddp.loader(torch.arange(24.).view(8, 3), batch_size=4)\n"
        "    for batch in loader.epoch(0):\n"
        "        ddp.backward(model(batch).mean())\n"
        "        ddp.step()\n"
        "    total = ddp.weighted_mean(ddp.rank + 1.0)\n"
        "    tell([sys.argv[1:], os.path.basename(os.getcwd()), sys.flags.quiet, ddp.devices,\n"
        "          ddp.window, total, __name__])\n"
    )
    ended = sandbox.start(sys.executable, "-q", script.name, "--lr", "1").end()
    assert ended.code == 0, ended.err
    seen = "[['--lr', '1'], 'elsewhere', 1, ('cpu', 'cpu'), 2, 1.5, '__main__']"
    assert sandbox.mailbox.rest() == [f"0 {seen}", f"1 {seen}"]
    assert "script.py was started plainly: running it once for each of cpu, cpu" in ended.err
    assert ended.err.count("team of 2:") == 1


def test_a_module_of_a_package_is_started_again_as_a_module(sandbox):
    package = sandbox.folder / "package"
    package.mkdir()
    (package / "__init__.py").write_text("NAME = 'package'\n")
    sandbox.script(
        SETUP + "from . import NAME\n"
        "with setup(quiet=True) as ddp:\n"
        "    tell([NAME, __name__, __package__, sys.argv[1:], ddp.weighted_mean(ddp.rank)])\n",
        name="package/train.py",
    )
    ended = sandbox.start(sys.executable, "-m", "package.train", "--x").end()
    assert (ended.code, ended.err) == (0, "")
    seen = "['package', '__main__', 'package', ['--x'], 0.5]"
    assert sandbox.mailbox.rest() == [f"0 {seen}", f"1 {seen}"]


def test_the_first_traceback_is_the_one_of_the_rank_that_failed(sandbox):
    script = sandbox.script(
        SETUP + "ddp = setup(quiet=True)\n"
        "loader = ddp.loader(torch.arange(24.).view(8, 3), batch_size=4)\n"
        "for batch in loader.epoch(0):\n"
        "    if RANK == 1 and ddp.window == 1:\n"
        "        raise ZeroDivisionError('in the loop of rank 1')\n"
        "    ddp.backward(model(batch).mean())\n"
        "    ddp.step()\n"
    )
    ended = sandbox.start(sys.executable, script).end()
    assert ended.code == 1
    first = ended.err.index("ZeroDivisionError: in the loop of rank 1")
    assert "rank 1" in ended.err[:first]
    assert "Traceback" in ended.err[:first]
    assert "PeerLostError" not in ended.err[:first]


def test_ctrl_c_ends_all_ranks(sandbox):
    script = sandbox.script(SETUP + "ddp = setup(quiet=True)\ntell(os.getpid())\nwait_forever()\n")
    running = sandbox.start(sys.executable, script)
    pids = [int(line.split()[1]) for line in sandbox.mailbox.read(2)]
    running.press_ctrl_c()
    ended = running.end()
    assert ended.code == 130
    assert all(wait_until_gone(pid) for pid in pids)
