"""What ends a pretraining run early: a signal, or a disk that is full. It can go on afterwards."""

import resource
import signal

import psutil

from helpers.forking import Zygote
from helpers.launched import wait_until_gone
from helpers.lineage import check_exactly_once
from helpers.pretraining import (
    NEEDED,
    NUM_SAMPLES,
    NUM_WINDOWS,
    RUN_TIMEOUT_S,
    be_evener,
)
from helpers.ranks import Rank, RankTeam

# Ranks that are slowed on purpose sleep after each micro-batch and each update. Here they do not,
# until the second update: then a micro-batch would take an hour, longer than they get to end.
SLOW_THIRD_WINDOW = """
import os, sys
if "RANK" in os.environ:
    from evener.engine.emulate import Slowdown
    updates = 0
    def after(slowdown, start):
        global updates
        if sys._getframe(2).f_globals["__name__"] == "evener.engine.sync":  # by Stopwatch.stop
            updates += 1
        elif updates >= 2:
            with open(os.environ["TEST_MAILBOX"], "w") as mailbox:
                mailbox.write(f"rank {os.environ['RANK']}\\n")
            slowdown._sleep(3600.0)
        return 0.0
    Slowdown.after = after
else:  # the launcher: on a busy machine ranks may need longer to save and to end
    from evener.team import agent
    agent.GRACE_S = agent._SETTLE_S = 1800.0
"""


def test_a_signal_stops_all_ranks_in_mid_window_and_the_run_can_be_resumed(lab):
    # 120 samples make windows of 24; each sample is a micro-batch.
    data = {"path": "corpus", "seq_len": 16, "heldout_fraction": 0.2}
    lab.configure(data=data, batch_size=24, micro_batch_size=1, eval={"every": 0})
    lab.sandbox.install(SLOW_THIRD_WINDOW)
    run = lab.path_of()
    slow = ("--emulate-slow", "0:2", "--emulate-slow", "1:2")
    running = lab.command("run.yaml", "--nproc", 2, *slow)
    lab.sandbox.mailbox.read(2, RUN_TIMEOUT_S)
    pids = [event["pid"] for event in run.of_type("worker_started")]
    running.signal(signal.SIGINT)
    ended = running.end(RUN_TIMEOUT_S)
    assert ended.code == 128 + signal.SIGINT
    assert "evener: SIGINT: asked the ranks" in ended.err
    assert "Traceback" not in ended.err
    assert "--resume" in ended.err
    assert ended.err.splitlines()[-1] == f"run folder: {run.path}"
    assert not any(psutil.pid_exists(pid) for pid in pids)

    # The third window, which was under way, is dropped; the two before it are committed.
    assert [event["window"] for event in run.of_type("window")] == [0, 1]
    last = run.events[-1]
    assert (last["type"], last["reason"], last["window"]) == ("run_finished", "stopped", 2)
    assert run.checkpoints[-1].name == "step-2"
    lab.run("run.yaml", "--resume", nproc=2)
    num_samples = run.of_type("run_started")[0]["num_samples"]
    assert check_exactly_once(run.events, num_samples, whole_epochs=2) == []
    assert run.events[-1]["reason"] == "completed"


def test_a_signal_takes_effect_while_ranks_import_their_libraries(lab):
    (lab.sandbox.install("") / "transformers.py").write_text(
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


def be_evener_on_a_full_disk(rank: Rank, folder: str, command: list[str]) -> int:
    """Files cannot grow beyond a size: events fit, and an optimizer's state does not."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, hard))
    return be_evener(rank, folder, command)


def test_a_full_disk_is_an_error_on_every_rank_at_the_end_and_harms_nothing(lab):
    run = lab.path_of()
    lab.run("run.yaml", "--set", "max_steps=4")
    kept = [path.name for path in run.checkpoints]  # a slow disk may have skipped one
    assert kept[-1] == "step-4"
    Zygote.get().preload(*NEEDED)
    command = ["pretrain", "run.yaml", "--resume", "--set", "checkpoint.retry_s=0.2"]
    with RankTeam(be_evener_on_a_full_disk, 2, str(lab.folder), command) as team:
        outcomes = team.wait(RUN_TIMEOUT_S)
    assert [outcome.value for outcome in outcomes] == [1, 1], outcomes[0].story()
    said = "".join(outcome.output for outcome in outcomes)
    assert f"step-{NUM_WINDOWS} could not be written" in said
    assert "File too large" in said
    assert "earlier checkpoints are untouched" in said
    assert [path.name for path in run.checkpoints] == kept
    lab.run("run.yaml", "--resume")
    assert check_exactly_once(run.events, NUM_SAMPLES, whole_epochs=2) == []
