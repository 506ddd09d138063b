"""What ends a pretraining run early: a signal to the launcher, or the failure of one rank."""

import os
import re
import signal

import psutil
import pytest

from evener.team.agent import GRACE_S
from helpers.elastic_ranks import wait_until
from helpers.lineage import check_exactly_once
from helpers.pretraining import RUN_TIMEOUT_S, Lab

# Ranks that are slowed on purpose sleep after each micro-batch and each update. Here they do not,
# until the second update: the test knows when they are in the middle of the third window.
FAILPOINT = """
import os, sys
if "RANK" in os.environ:
    from evener.engine.emulate import Slowdown
    updates = 0
    def after(slowdown, start):
        global updates
        if sys._getframe(2).f_globals["__name__"] == "evener.engine.sync":  # by Stopwatch.stop
            updates += 1
            at_update(updates)
        elif updates >= 2:
            in_third_window(slowdown)
        return 0.0
    Slowdown.after = after
else:  # the launcher: on a busy machine ranks may need longer to save and to end
    from evener.team import agent
    agent.GRACE_S = agent._SETTLE_S = 1800.0
def at_update(number):
    pass
def in_third_window(slowdown):
    pass
"""

# The first micro-batch of the third window would take an hour, longer than they get to end.
SLOW_WINDOW = (
    FAILPOINT
    + """
def in_third_window(slowdown):
    with open(os.environ["TEST_MAILBOX"], "w") as mailbox:
        mailbox.write(f"rank {os.environ['RANK']}\\n")
    slowdown._sleep(3600.0)
"""
)

ONE_FAILS = (
    FAILPOINT
    + """
def at_update(number):
    if number == 3 and os.environ["RANK"] == "1":
        raise ValueError("the failpoint of rank 1")
"""
)

BOTH_SLOW = ("--emulate-slow", "0:2", "--emulate-slow", "1:2")


@pytest.fixture
def lab(tmp_path):
    lab = Lab(tmp_path)
    # 120 samples make windows of 24; each sample is a micro-batch.
    data = {"path": "corpus", "seq_len": 16, "heldout_fraction": 0.2}
    lab.configure(data=data, batch_size=24, micro_batch_size=1, eval={"every": 0})
    yield lab
    lab.close()


@pytest.mark.parametrize(
    ("signum", "nproc"),
    [
        (signal.SIGINT, 2),
        pytest.param(signal.SIGTERM, 2, marks=pytest.mark.long),  # as the others
        (signal.SIGUSR1, 1),
    ],
)
def test_a_signal_stops_all_ranks_at_once_and_the_run_can_go_on(lab, signum, nproc):
    lab.install(SLOW_WINDOW)
    run = lab.path_of("run")
    running = lab.command("run.yaml", "--nproc", nproc, *BOTH_SLOW[: 2 * nproc])
    lab.sandbox.mailbox.read(nproc, RUN_TIMEOUT_S)
    pids = [event["pid"] for event in run.of_type("worker_started")]
    assert all(psutil.pid_exists(pid) for pid in pids)
    running.signal(signum)
    ended = running.end(RUN_TIMEOUT_S)
    assert ended.code == 128 + signum
    assert f"evener: {signum.name}: asked the rank" in ended.err
    assert "killed" not in ended.err
    assert GRACE_S == 5.0, "what the command line gives them"
    assert "Traceback" not in ended.err
    assert len(pids) == nproc
    assert not any(psutil.pid_exists(pid) for pid in pids)

    # The third window, which was under way, is dropped; the two before it are committed.
    done = 2
    assert [event["window"] for event in run.of_type("window")] == [0, 1]
    last = run.events[-1]
    assert (last["type"], last["reason"], last["window"]) == ("run_finished", "stopped", done)
    assert run.checkpoints[-1].name == f"step-{done}"
    assert "--resume" in ended.err
    assert ended.err.splitlines()[-1] == f"run folder: {run.path}"
    assert run.summary["heldout_loss"] is None
    assert run.summary["steps"] == done

    lab.run("run.yaml", "--resume", nproc=2)
    num_samples = run.of_type("run_started")[0]["num_samples"]
    assert check_exactly_once(run.events, num_samples, whole_epochs=2) == []
    assert [event["window"] for event in run.of_type("run_resumed")] == [done]
    assert run.events[-1]["reason"] == "completed"
    assert run.summary["heldout_loss"] > 0


def test_a_signal_to_one_rank_ends_every_rank_with_its_exit_code(lab):
    """Or a scheduler takes the unfinished run for done: the others are not told by the signal."""
    lab.configure(epochs=9999, eval={"every": 0})
    with lab.team("run.yaml", "--quiet", nproc=2) as team:
        run = lab.path_of("run")
        wait_until(lambda: (run.path / "events.jsonl").exists() and run.of_type("window"))
        os.kill(run.of_type("worker_started")[1]["pid"], signal.SIGTERM)
        outcomes = team.wait(RUN_TIMEOUT_S)
    assert [outcome.value for outcome in outcomes] == [143, 143]
    assert run.events[-1]["reason"] == "stopped"


def test_a_reader_that_goes_away_ends_nothing(lab):
    running = lab.command("run.yaml", "--nproc", 1)
    while b"backend" not in (line := running.process.stderr.readline()):
        assert line  # the team comes first
    running.process.stderr.close()
    assert running.process.wait(RUN_TIMEOUT_S) == 0
    assert lab.path_of("run").events[-1]["reason"] == "completed"


def test_the_failure_of_one_rank_ends_the_run_with_its_traceback_first(lab):
    lab.install(ONE_FAILS)
    running = lab.command("run.yaml", "--nproc", 2, *BOTH_SLOW)
    ended = running.end(RUN_TIMEOUT_S)
    assert ended.code == 1
    run = lab.path_of("run")
    pids = [event["pid"] for event in run.of_type("worker_started")]
    lines = ended.err.splitlines()
    start = lines.index(f"rank 1 (pid {pids[1]}) failed:")
    assert lines[start + 1] == "Traceback (most recent call last):"
    assert ended.err.count("Traceback") == 1
    assert "ValueError: the failpoint of rank 1" in lines
    assert not [line for line in lines[:start] if re.search("failed|error|lost", line, re.I)]
    assert not any(psutil.pid_exists(pid) for pid in pids)
    last = run.events[-1]
    assert (last["type"], last["reason"]) == ("run_finished", "failed")
    assert last["message"].startswith("PeerLostError: rank 0 lost a peer")
    # What was saved before is whole, and the run goes on from there.
    lab.run("run.yaml", "--resume", nproc=1)
    num_samples = run.of_type("run_started")[0]["num_samples"]
    assert check_exactly_once(run.events, num_samples, whole_epochs=2) == []
