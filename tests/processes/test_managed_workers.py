"""Managed runs on several devices: real worker processes, their failures and their ends."""

import atexit
import errno
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from evener.errors import LaunchError, UsageError, WorkerError
from evener.managed.epoch_metrics import EpochMetrics
from evener.managed.workers import ManagedAgent
from evener.team.worker_processes import Child
from helpers.launched import Sandbox, wait_until_gone
from helpers.limits import PATIENCE_S
from helpers.managed import (
    SAMPLES,
    assert_same,
    describe_job,
    make_model,
    train_plainly,
    train_step,
)

TWO = {"devices": ["cpu", "cpu"], "partition_ratios": [1.0, 0.3]}


def test_workers_train_what_a_plain_loop_trains_and_metrics_land_on_the_way(capfd):
    told: list[tuple[int, str]] = []

    def publish(metrics: EpochMetrics) -> None:
        told.append((metrics.epoch, threading.current_thread().name))
        with pytest.raises(UsageError, match="metrics_fn waits for the run that it is called by"):
            handle.join()
        landed.set()

    landed = threading.Event()
    captured = {"calls": 0}

    def train(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        captured["calls"] += 1
        if captured["calls"] == 1:
            print("hello from", os.environ["RANK"])
            atexit.register(print, "farewell from", os.environ["RANK"])
        return train_step(model, batch)

    handle = describe_job(
        devices=3,
        partition_ratios=[1.0, 0.2, 0.5],
        train_fn=train,
        metrics_fn=publish,
        eval_fn=lambda model: float(model[0].weight.sum()),
        quiet=False,
    ).run()
    assert landed.wait(PATIENCE_S)
    state = handle.join()
    model, losses = train_plainly(6)
    assert_same(state.state_dict(), model)
    make_model(torch.device("cpu")).load_state_dict(state.state_dict())
    assert told == [(0, "evener-workers"), (1, "evener-workers")]
    metrics = handle.poll_metrics()
    assert [(m.epoch, m.complete, m.samples) for m in metrics] == [(0, True, 46), (1, True, 46)]
    expected = sum(n * x for n, x in zip([16, 16, 14], losses, strict=False)) / SAMPLES
    assert metrics[0].avg_loss == pytest.approx(expected, rel=1e-12)
    assert metrics[1].eval["eval"] == pytest.approx(float(model[0].weight.detach().sum()))
    assert metrics[0].devices == ("cpu", "cpu", "cpu")
    assert handle.done
    assert captured["calls"] == 0, "workers have copies"
    out, err = capfd.readouterr()
    assert "hello from 0" in out
    assert "[rank 1] hello from 1" in out
    assert "[rank 2] farewell from 2" in out
    assert "team of 3" in err


def test_an_exception_on_one_rank_surfaces_and_the_others_keep_the_model():
    def spill(count: int) -> None:
        raise ValueError(f"spilled {count}")

    def train(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        calls.append(None)
        if os.environ["RANK"] == "1" and len(calls) == 3:
            spill(len(calls))
        return train_step(model, batch)

    calls: list[None] = []
    handle = describe_job(**TWO, train_fn=train, num_epochs=1000).run()
    pids = handle._run.pids
    with pytest.raises(WorkerError, match=r"rank 1 \(cpu, pid \d+\) failed: ValueError: spilled 3"):
        list(handle.metrics())
    with pytest.raises(WorkerError) as caught:
        handle.join()
    error = caught.value
    assert (error.rank, error.kind) == (1, "ValueError")
    assert "in spill" in str(error.__cause__)
    assert str(Path(__file__).name) in str(error.__cause__)
    assert error.state is handle.state
    assert "handle.state holds the model after step 2" in str(error)
    assert_same(handle.state.state_dict(), train_plainly(2)[0])
    assert all(wait_until_gone(pid) for pid in pids)


def test_an_exception_before_the_team_has_formed_ends_it_soon():
    def model(device: torch.device) -> nn.Module:
        if os.environ["RANK"] == "1":
            raise MemoryError("too large")
        return make_model(device)

    handle = describe_job(**TWO, model_fn=model).run()
    with pytest.raises(WorkerError, match="MemoryError: too large") as caught:
        handle.join()
    assert caught.value.state is None
    assert handle.state is None
    # The other one, which would wait for it for minutes, was ended.
    assert signal.SIGKILL in handle._run._agent.workers[0].signals


def test_a_killed_worker_is_named_and_the_others_keep_the_model():
    handle = describe_job(**TWO, num_epochs=10**6).run()
    assert next(handle.metrics()).epoch == 0
    pids = handle._run.pids
    os.kill(pids[0], signal.SIGKILL)
    with pytest.raises(WorkerError, match=rf"rank 0 \(pid {pids[0]}\) was killed by SIGKILL"):
        handle.join()
    assert handle.state.progress.steps >= 3
    assert all(torch.isfinite(p).all() for p in handle.state.params.values())
    assert all(wait_until_gone(pid) for pid in pids)


@pytest.mark.long  # the next one has all of it but the end of the worker that hangs
def test_a_worker_that_hangs_is_named_and_the_others_keep_the_model(monkeypatch):
    monkeypatch.setattr("evener.managed.workers.SURVIVORS_S", 0.5)
    handle = describe_job(**TWO, num_epochs=10**6, timeout_s=4.0).run()
    assert next(handle.metrics()).epoch == 0
    pids = handle._run.pids
    os.kill(pids[1], signal.SIGSTOP)
    with pytest.raises(WorkerError, match=r"rank 0 .* failed: CollectiveTimeoutError: .*rank 1"):
        handle.join()
    assert handle.state.progress.steps >= 3
    assert all(wait_until_gone(pid) for pid in pids)


def test_a_worker_that_no_signal_ends_is_not_waited_for(monkeypatch, capfd):
    """As one that hangs inside the kernel: here it is stopped, and never really killed."""

    def note(child: Child) -> None:
        child.signals.add(signal.SIGKILL)

    monkeypatch.setattr(Child, "kill", note)
    monkeypatch.setattr("evener.managed.workers.SURVIVORS_S", 0.5)
    monkeypatch.setattr("evener.managed.workers._EXIT_S", 0.5)
    monkeypatch.setattr("evener.team.agent.DEATH_S", 0.5)
    handle = describe_job(**TWO, num_epochs=10**6, timeout_s=4.0).run()
    assert next(handle.metrics()).epoch == 0
    pids = handle._run.pids
    os.kill(pids[1], signal.SIGSTOP)
    try:
        named = r"rank 0 .* failed: CollectiveTimeoutError: .*rank 1"
        with pytest.raises(WorkerError, match=named):
            handle.join(timeout_s=PATIENCE_S)
        assert handle.state.progress.steps >= 3
        assert f"rank 1 (pid {pids[1]}) does not end even when killed" in capfd.readouterr().err
    finally:
        os.kill(pids[1], signal.SIGKILL)
        for (
            child
        ) in handle._run._agent.workers:  # on a busy machine the other one may need longer, too
            child.process.wait(PATIENCE_S)


def test_ctrl_c_ends_a_run_within_seconds_and_keeps_the_model(monkeypatch):
    def interrupt(timeout_s: float | None) -> bool:
        monkeypatch.undo()
        signal.raise_signal(signal.SIGINT)
        raise AssertionError

    def leave() -> None:
        with handle:
            next(handle.metrics())
            with pytest.raises(TimeoutError, match="has not ended within"):
                handle.join(timeout_s=0.01)
            # A Ctrl-C while it waits.
            monkeypatch.setattr(handle._run, "finish", interrupt)
            handle.join()

    handle = describe_job(**TWO, num_epochs=10**6).run()
    pids = handle._run.pids
    with pytest.raises(KeyboardInterrupt):
        leave()
    assert handle.done
    assert handle.state.progress.steps >= 3
    assert handle.join() is handle.state
    assert all(wait_until_gone(pid) for pid in pids)


def test_workers_of_a_handle_that_goes_away_end(capfd):
    handle = describe_job(**TWO).run()
    pids = handle._run.pids
    del handle
    gc.collect()
    assert all(wait_until_gone(pid) for pid in pids)
    assert "a managed run was not joined" in capfd.readouterr().err


def test_a_worker_that_leaves_without_a_report_is_an_error_and_its_last_words_are_shown(capfd):
    def train(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        if os.environ["RANK"] == "1":
            print("last words", flush=True)
            os._exit(0)
        return train_step(model, batch)

    with pytest.raises(WorkerError, match=r"rank 1 \(pid \d+\) ended with exit code 0"):
        describe_job(**TWO, train_fn=train).run().join()
    assert "[rank 1] last words" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("leave", "said"),
    [
        (lambda: sys.exit(0), r"rank 1 \(cpu, pid \d+\) failed: SystemExit: 0; also ended: rank 0"),
        (lambda: os.execvp("sleep", ["sleep", "3600"]), "rank 1 .* has become another program"),
    ],
)
def test_a_worker_that_leaves_is_named_and_not_those_that_lost_it(leave, said):
    def train(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        if os.environ["RANK"] == "1":
            leave()
        return train_step(model, batch)

    with pytest.raises(WorkerError, match=said) as caught:
        describe_job(**TWO, train_fn=train).run().join()
    assert caught.value.rank == 1


def test_a_worker_that_becomes_another_program_while_the_run_fails_is_not_waited_for(
    tmp_path, monkeypatch
):
    known = tmp_path / "the failure is known"
    order = ManagedAgent._order

    def note_and_order(team: ManagedAgent, what: str, children: Sequence[Child]) -> None:
        known.touch()
        order(team, what, children)

    def train(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        if os.environ["RANK"] == "0":
            raise ValueError("bad sample")
        while not known.exists():
            time.sleep(0.01)
        os.execvp("sleep", ["sleep", "3600"])

    monkeypatch.setattr(ManagedAgent, "_order", note_and_order)
    monkeypatch.setattr("evener.managed.workers.SURVIVORS_S", 10 * PATIENCE_S)
    with pytest.raises(WorkerError, match=r"rank 0 .* failed: ValueError: bad sample"):
        describe_job(**TWO, train_fn=train).run().join(timeout_s=PATIENCE_S)


def test_a_worker_that_crashes_on_its_way_out_has_done_its_work():
    def model(device: torch.device) -> nn.Module:
        if os.environ.get("RANK") == "1":
            atexit.register(os._exit, 3)
        return make_model(device)

    state = describe_job(**TWO, model_fn=model).run().join()
    assert_same(state.state_dict(), train_plainly(6)[0])


def test_nothing_stays_open_when_a_worker_cannot_be_started(monkeypatch):
    class Failing(subprocess.Popen):
        def __init__(self, command, **options):
            if options.get("env", {}).get("RANK") == "1":
                raise OSError(errno.ENOMEM, "Cannot allocate memory")
            super().__init__(command, **options)

    def start() -> tuple[LaunchError, int]:
        with pytest.raises(LaunchError, match="rank 1 could not be started") as caught:
            describe_job(**TWO).run()
        return caught.value, len(list(Path("/proc/self/fd").iterdir()))

    monkeypatch.setattr(subprocess, "Popen", Failing)
    first, second = start(), start()  # errors are kept, and with them the teams
    assert first[1] == second[1]


# ── scripts, as users write them ─────────────────────────────────────────────────────────────────

SCRIPT = """
import os, psutil, sys, torch
from torch import nn
from evener import Ddp, record_scalar
tell("script runs")
class Squares(torch.utils.data.Dataset):
    def __len__(self): return 32
    def __getitem__(self, i): return torch.tensor([i / 32.0]), torch.tensor([i * i / 1024.0])
rate = 0.1
def collate(samples):
    return tuple(torch.stack(part) for part in zip(*samples))
def train(model, batch):
    x, y = batch
    record_scalar("x", x.mean())
    return (model(x) - y).square().mean()
def optimizer(params):
    return torch.optim.SGD(params, lr=rate)
handle = Ddp.builder(lambda device: nn.Linear(1, 1), optimizer, train, devices=["cpu", "cpu"],
    dataset=Squares(), batch_size=8, collate_fn=collate, num_epochs=10**6, num_workers=1,
    quiet=True).run()
tell(f"x {next(handle.metrics()).scalars['x']}")
mine = psutil.Process()
workers = [child for child in mine.children() if child.pid in handle._run.pids]
loaders = [loader for worker in workers for (loader,) in [worker.children()]]  # one each
tell("pids " + " ".join(str(p.pid) for p in [*workers, *loaders]))
wait_forever()
"""


@pytest.fixture
def sandbox(tmp_path):
    box = Sandbox(tmp_path)
    yield box
    box.close()


def test_an_unguarded_script_runs_once_and_takes_all_its_processes_with_it(sandbox):
    script = sandbox.script(SCRIPT)
    killed = sandbox.start(sys.executable, script)
    pids_line, runs, scalar = sandbox.mailbox.read(3)
    assert runs == "0 script runs"
    # The mean over the epoch is of float32 means, weighted by shares that are measured.
    assert float(scalar.removeprefix("0 x ")) == pytest.approx(0.484375, rel=1e-6)
    pids = [int(word) for word in pids_line.split()[2:]]
    assert len(pids) == 4, "two workers, and a process of each that loads data"
    os.kill(killed.process.pid, signal.SIGKILL)
    assert all(wait_until_gone(pid) for pid in pids)
    assert sandbox.mailbox.rest() == []
