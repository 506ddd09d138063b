"""Managed runs on several devices: real worker processes, their failures, resumes and ends."""

import atexit
import errno
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evener.errors import CheckpointError, ConfigError, LaunchError, UsageError, WorkerError
from evener.managed.epoch_metrics import EpochMetrics
from evener.observe.events import Event, Sink
from helpers.launched import Sandbox, wait_until_gone
from helpers.limits import PATIENCE_S
from helpers.managed import assert_same, describe_job, make_model, train_plainly, train_step

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
    assert told == [(0, "evener-workers"), (1, "evener-workers")]
    metrics = handle.poll_metrics()
    assert [(m.epoch, m.complete, m.samples) for m in metrics] == [(0, True, 46), (1, True, 46)]
    expected = sum(n * x for n, x in zip([16, 16, 14], losses, strict=False)) / 46
    assert metrics[0].avg_loss == pytest.approx(expected, rel=1e-12)
    assert metrics[1].eval["eval"] == pytest.approx(float(model[0].weight.detach().sum()))
    assert captured["calls"] == 0, "workers have copies"
    out, err = capfd.readouterr()
    assert "hello from 0" in out
    assert "[rank 2] farewell from 2" in out
    assert "team of 3" in err


# ── failures ─────────────────────────────────────────────────────────────────────────────────────


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
    assert error.state is handle.state
    assert "handle.state holds the model after step 2" in str(error)
    assert_same(handle.state.state_dict(), train_plainly(2)[0])
    assert all(wait_until_gone(pid) for pid in pids)


def test_a_killed_worker_is_named_and_the_others_keep_the_model():
    handle = describe_job(**TWO, num_epochs=10**6).run()
    assert next(handle.metrics()).epoch == 0
    pids = handle._run.pids
    os.kill(pids[0], signal.SIGKILL)
    with pytest.raises(WorkerError, match=rf"rank 0 \(pid {pids[0]}\) was killed by SIGKILL"):
        handle.join()
    assert handle.state.progress.steps >= 3
    assert all(wait_until_gone(pid) for pid in pids)


def test_a_worker_that_hangs_is_named_and_ended_and_the_others_keep_the_model(monkeypatch):
    monkeypatch.setattr("evener.managed.workers.SURVIVORS_S", 0.5)
    handle = describe_job(**TWO, num_epochs=10**6, timeout_s=4.0).run()
    assert next(handle.metrics()).epoch == 0
    pids = handle._run.pids
    os.kill(pids[1], signal.SIGSTOP)
    with pytest.raises(WorkerError, match=r"rank 0 .* failed: CollectiveTimeoutError: .*rank 1"):
        handle.join()
    assert handle.state.progress.steps >= 3
    assert all(wait_until_gone(pid) for pid in pids)


@pytest.mark.parametrize(
    ("leave", "said"),
    [
        (lambda: os._exit(0), r"rank 1 \(pid \d+\) ended with exit code 0"),
        (lambda: sys.exit(0), r"rank 1 \(cpu, pid \d+\) failed: SystemExit: 0; also ended: rank 0"),
        (lambda: os.execvp("sleep", ["sleep", "3600"]), "rank 1 .* has become another program"),
    ],
)
def test_a_worker_that_leaves_is_named_and_not_those_that_lost_it(leave, said, capfd):
    def train(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        if os.environ["RANK"] == "1":
            print("last words", flush=True)
            leave()
        return train_step(model, batch)

    with pytest.raises(WorkerError, match=said) as caught:
        describe_job(**TWO, train_fn=train).run().join()
    assert caught.value.rank == 1
    assert "[rank 1] last words" in capfd.readouterr().out


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

    monkeypatch.setattr(subprocess, "Popen", Failing)
    with pytest.raises(LaunchError, match="rank 1 could not be started"):
        describe_job(**TWO).run()  # what is left behind, the fixture of all tests finds


def test_workers_that_are_killed_are_replaced_and_cost_nothing_of_the_result():
    """The main worker dies as an epoch begins, and the next one when it is to send the model."""

    class Kept(Sink):
        def __init__(self) -> None:
            self.kinds: list[str] = []

        def emit(self, event: Event) -> None:
            self.kinds.append(event["type"])

        def close(self) -> None:
            pass

    def die(epoch: int, _: nn.Module) -> None:
        if epoch == 1 and os.environ["EVENER_MEMBER"].endswith("/0"):
            os.kill(os.getpid(), signal.SIGKILL)

    def make_mortal(device: torch.device) -> nn.Module:
        def die_instead_of_sending(*_: object) -> None:
            if os.environ["EVENER_MEMBER"].endswith("/1"):
                os.kill(os.getpid(), signal.SIGKILL)

        model = make_model(device)
        model.register_state_dict_pre_hook(die_instead_of_sending)
        return model

    events = Kept()
    run = describe_job(model_fn=make_mortal, epoch_fn=die, sinks=[events], elastic=(2, 2)).run()
    metrics = list(run.metrics())
    assert_same(run.join().state_dict(), train_plainly(6)[0])
    assert [(m.epoch, m.complete, m.samples) for m in metrics] == [(0, True, 46), (1, True, 46)]
    assert "worker_lost" in events.kinds
    assert [events.kinds[0], events.kinds[-1]] == ["run_started", "run_finished"]


# ── the end ──────────────────────────────────────────────────────────────────────────────────────


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


# ── checkpoints ──────────────────────────────────────────────────────────────────────────────────


def test_a_run_goes_on_with_another_number_of_workers(tmp_path: Path) -> None:
    options: dict[str, Any] = {"checkpoint_every": 2, "checkpoint_dir": tmp_path}
    describe_job(num_epochs=None, num_steps=4, **options, **TWO).run().join()
    three = describe_job(devices=3, partition_ratios=[1, 2, 1], checkpoint_dir=tmp_path)
    handle = three.resume(tmp_path).run()
    epochs = [(m.epoch, m.complete, m.samples) for m in handle.metrics()]
    assert epochs == [(1, True, 30)], "what is left of the epoch"
    assert_same(handle.join().state_dict(), train_plainly(6)[0])
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-2", "step-4", "step-6"]
    with pytest.raises(ConfigError, match=r"holds checkpoints of another run \(step-2\); resume"):
        describe_job(checkpoint_dir=tmp_path).run()
    with pytest.raises(CheckpointError, match=r"resume is '.*nothing', and there is no such folde"):
        describe_job(resume=tmp_path / "nothing").run()


# ── scripts, as users write them ─────────────────────────────────────────────────────────────────

ANYWHERE = """
import json, torch
from torch import nn
from evener import Ddp, record_scalar

torch.manual_seed(0)
x = torch.randn(64, 4, dtype=torch.float64)
def split(a, b):
    return torch.utils.data.TensorDataset(x[a:b], x[a:b].sum(1, keepdim=True))
def train(model, batch):
    inputs, targets = batch
    record_scalar("count", len(inputs), "sum")
    return (model(inputs) - targets).square().mean()
handle = Ddp.builder(
    lambda device: nn.Linear(4, 1, dtype=torch.float64),
    lambda params: torch.optim.SGD(params, lr=0.1),
    train,
    dataset=split(0, 40), eval_dataset=split(40, 64), batch_size=10, num_epochs=2,
    metrics_fn=lambda m: tell(f"metrics of {m.epoch}"), quiet=True, **eval(sys.argv[1]),
).run()
def row(m):
    return [m.avg_loss, m.scalars["count"], m.eval["count"], m.eval["loss"]]
found = [row(m) for m in handle.metrics()]
state = handle.join()
print(json.dumps([handle.world_size, found, state.params["weight"][0].tolist()]))
"""


@pytest.mark.long
def test_a_builder_trains_in_whatever_has_started_its_script(sandbox: Sandbox) -> None:
    """On one device, in workers of its own, and as a rank of a team: all with the same numbers."""
    script = sandbox.script(ANYWHERE)
    workers = "{'devices': ['cpu', 'cpu'], 'run_folder': 'run'}"
    running = [
        sandbox.start(sys.executable, script, "{'devices': 'cpu'}"),
        sandbox.start(sys.executable, script, workers),
        sandbox.evener("launch", "--nproc", 2, script, "{'devices': 'cpu'}"),
    ]
    ends = [each.end() for each in running]
    assert [end.code for end in ends] == [0, 0, 0], ends
    lines = [re.sub(r"^\[.*?\] ", "", line) for end in ends for line in end.out.splitlines()]
    alone, *others = [json.loads(line) for line in lines if "[[" in line]
    assert [size for size, *_ in (alone, *others)] == [1, 2, 2, 2], "each rank has the result"
    for _, found, weight in others:
        assert [row[1:3] for row in found] == [[40, 24]] * 2
        for row, expected in zip((*found, weight), (*alone[1], alone[2]), strict=True):
            assert row == pytest.approx(expected, rel=1e-12)
    told = [line[2:] for line in sandbox.mailbox.rest()]
    assert told.count("metrics of 0") == told.count("metrics of 1") == 3
    again = sandbox.start(sys.executable, script, workers).end()
    assert again.code == 1
    assert "run', which holds the events of another run" in again.err
    report = sandbox.evener("report", sandbox.folder / "run", "-o", "report.html").end()
    assert (report.code, (sandbox.folder / "report.html").is_file()) == (0, True), report.err


UNGUARDED = """
import psutil, torch
from torch import nn
from evener import Ddp
tell("script runs")
class Squares(torch.utils.data.Dataset):
    def __len__(self): return 32
    def __getitem__(self, i): return torch.tensor([i / 32.0]), torch.tensor([i * i / 1024.0])
rate = 0.1
def train(model, batch):
    x, y = batch
    return (model(x) - y).square().mean()
def optimizer(params):
    return torch.optim.SGD(params, lr=rate)
handle = Ddp.builder(lambda device: nn.Linear(1, 1), optimizer, train, devices=["cpu", "cpu"],
    dataset=Squares(), batch_size=8, num_epochs=10**6, num_workers=1, quiet=True).run()
next(handle.metrics())
mine = psutil.Process()
workers = [child for child in mine.children() if child.pid in handle._run.pids]
loaders = [loader for worker in workers for (loader,) in [worker.children()]]  # one each
tell("pids " + " ".join(str(p.pid) for p in [*workers, *loaders]))
wait_forever()
"""


def test_an_unguarded_script_runs_once_and_takes_all_its_processes_with_it(
    sandbox: Sandbox,
) -> None:
    killed = sandbox.start(sys.executable, sandbox.script(UNGUARDED))
    pids_line, runs = sandbox.mailbox.read(2)
    assert runs == "0 script runs"
    pids = [int(word) for word in pids_line.split()[2:]]
    assert len(pids) == 4, "two workers, and a process of each that loads data"
    os.kill(killed.process.pid, signal.SIGKILL)
    assert all(wait_until_gone(pid) for pid in pids)
    assert sandbox.mailbox.rest() == []
