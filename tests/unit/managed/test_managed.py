"""Managed runs: the loop of a rank, on threads; and a run on one device, in this thread."""

import gc
import math
import signal
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset

from evener.data.order import Permutation
from evener.errors import ConfigError, UsageError, WorkerError
from evener.managed.description import ManagedRun, describe
from evener.managed.epoch_metrics import EpochContext, EpochMetrics, record_scalar
from evener.managed.rank import ManagedRank, to_device
from evener.managed.trained import TrainedState
from evener.team.environment import DistributedTrainConfig
from helpers.limits import PATIENCE_S
from helpers.managed import (
    BATCH,
    SAMPLES,
    SEED,
    assert_same,
    data,
    describe_job,
    loss_of,
    make_model,
    train_plainly,
    train_step,
)
from helpers.models import regression_data
from helpers.teams import run_team


def run_job(world_size: int, **options: Any) -> list[tuple[list[EpochMetrics], TrainedState]]:
    """Runs the job on threads; metrics and state of every rank."""
    job = job_of(devices=["cpu"] * world_size, **options)

    def one(communicator: Any) -> tuple[list[EpochMetrics], TrainedState]:
        rank = ManagedRank(
            job,
            environment=DistributedTrainConfig(),
            stop_when=lambda: False,
            communicator=communicator,
        )
        try:
            return list(rank.train()), rank.state()
        finally:
            rank.close()

    return run_team(world_size, one)


def job_of(**options: Any) -> ManagedRun:
    builder = describe_job(**options)
    return describe(*builder._functions, **builder._options)


@pytest.mark.parametrize("policy", ["sync", "cadence", "async"])
def test_what_is_recorded_in_a_step_that_is_left_out_does_not_count(policy: str) -> None:
    x, y = (part.clone() for part in data().tensors)
    x[5] = math.nan

    def step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = loss_of(model, batch)
        record_scalar("left_out", float(not loss.isfinite()), "sum")
        record_scalar("batches", 1.0, "sum")
        return loss

    results = run_job(
        2, dataset=TensorDataset(x, y), train_fn=step, policy=policy, non_finite="skip"
    )
    for metrics, state in results:
        assert [m.scalars["left_out"] for m in metrics] == [0.0, 0.0]
        assert all(m.scalars["batches"] > 0 for m in metrics)
        assert all(tensor.isfinite().all() for tensor in state.params.values())


def test_a_job_can_do_without_a_guard_of_the_divergence() -> None:
    def guard(**options: Any) -> str:
        builder = describe_job(policy="cadence", **options)
        if not options:
            builder = builder.no_divergence_guard()
        run = describe(*builder._functions, **builder._options)
        return run.team_config(lambda: False).divergence_guard

    assert (guard(anchor=2), guard(divergence_guard="none"), guard()) == ("level", "none", "none")


# ── numbers ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("ratios", [(1.0,), (1.0, 0.2), (0.5, 1.0, 0.0)])
def test_unequal_devices_train_what_a_plain_loop_trains(ratios):
    results = run_job(len(ratios), partition_ratios=ratios)
    model, losses = train_plainly(6)
    for metrics, state in results:
        assert_same(state.state_dict(), model)
        assert [m.epoch for m in metrics] == [0, 1]
        assert all(m.complete and m.samples == SAMPLES for m in metrics)
        assert [m.steps for m in metrics] == [3, 6]
        sizes = [16, 16, 14]
        for m in metrics:
            expected = sum(n * x for n, x in zip(sizes, losses[3 * m.epoch :], strict=False))
            assert m.avg_loss == pytest.approx(expected / SAMPLES, rel=1e-12)
            # What is recorded is averaged as the loss is, however it was split.
            assert m.scalars["loss"] == pytest.approx(m.avg_loss, rel=1e-12)
            assert m.scalars["first"] == pytest.approx(float(data()[:][0][:, 0].mean()), rel=1e-9)
            # A count counts every sample, and the last value is of the epoch's last sample.
            assert m.scalars["count"] == sum(own.get("count", 0) for own in m.per_rank) == SAMPLES
            newest = Permutation(SAMPLES, SEED, m.epoch)[SAMPLES - 1]
            assert m.scalars["newest"] == float(data()[newest][0][0])
            assert m.per_rank_batch_share == pytest.approx(
                [r / sum(ratios) for r in ratios], abs=1 / BATCH
            )
    assert results[0][0] == [EpochMetrics.from_document(m.document()) for m in results[-1][0]], (
        "the same on every rank"
    )


def test_out_of_memory_a_share_is_done_again_and_counted_once():
    """The first micro-batch of 8 fits and the second does not: the first is forgotten as well."""
    tried = []

    def train(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = train_step(model, batch)
        tried.append(len(batch[0]))
        if len(batch[0]) > 3 and len(tried) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return loss

    ((metrics, state),) = run_job(1, train_fn=train, micro_batch_size=8)
    model, losses = train_plainly(6)
    assert_same(state.state_dict(), model)
    assert tried[:4] == [8, 8, 4, 2]
    assert max(tried[3:]) == 2
    for m in metrics:
        sizes = [16, 16, 14]
        expected = sum(n * x for n, x in zip(sizes, losses[3 * m.epoch :], strict=False))
        assert m.avg_loss == pytest.approx(expected / SAMPLES, rel=1e-12)
        assert m.scalars["loss"] == pytest.approx(m.avg_loss, rel=1e-12)


def test_the_loss_weighs_what_train_fn_says():
    def train(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        counts = (batch[0][:, 0] > 0).double()
        record_scalar("positive", 1.0)
        each = (model(batch[0]) - batch[1]).square().mean(1)
        return (each * counts).sum() / counts.sum().clamp(min=1), counts.sum()

    one, two = run_job(1, train_fn=train), run_job(2, train_fn=train, partition_ratios=(3, 1))
    positive = int((data()[:][0][:, 0] > 0).sum())
    assert one[0][0][0].weight == two[0][0][0].weight == positive
    for name, tensor in one[0][1].params.items():
        torch.testing.assert_close(two[0][1].params[name], tensor, rtol=1e-10, atol=1e-12)


def test_steps_end_a_run_inside_an_epoch():
    ((metrics, state),) = run_job(1, num_epochs=None, num_steps=5)
    assert [(m.epoch, m.complete, m.samples) for m in metrics] == [(0, True, 46), (1, False, 32)]
    assert state.progress.steps == 5
    assert_same(state.state_dict(), train_plainly(5)[0])


@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_local_steps_count_every_sample_once(policy):
    """What was recorded in a window counts when the window is committed, whoever closed it."""
    results = run_job(2, policy=policy, batch_size=4, anchor=2, num_epochs=3, speed_hint={1: 2})
    for metrics, state in results:
        assert [m.samples for m in metrics] == [SAMPLES] * 3
        for m in metrics:
            assert m.scalars["loss"] == pytest.approx(m.avg_loss, rel=1e-12)
            assert m.scalars["first"] == pytest.approx(float(data()[:][0][:, 0].mean()), rel=1e-9)
            assert m.scalars["count"] == SAMPLES
        assert metrics[2].avg_loss < metrics[0].avg_loss
        for name, tensor in state.params.items():
            assert torch.equal(tensor, results[0][1].params[name]), "the consensus"


def test_scheduler_precision_and_clipping_reach_the_loop():
    def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.1)

    ((metrics, clipped),) = run_job(1, scheduler=schedule, max_grad_norm=1e-9)
    assert [m.lr for m in metrics] == pytest.approx([0.05, 0.005])
    start = make_model(torch.device("cpu")).state_dict()
    for name, tensor in clipped.params.items():
        assert float((tensor - start[name]).abs().max()) < 1e-8


def test_the_seed_decides_initial_weights():
    starts = [
        run_job(1, model_fn=lambda device: nn.Linear(8, 4).double(), seed=seed, num_epochs=1)
        for seed in (1, 1, 2)
    ]
    first, same, other = (state.params["weight"] for ((_, state),) in starts)
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


# ── functions that are called on the way ─────────────────────────────────────────────────────────


def test_who_calls_what_when():
    seen: list[tuple[str, Any]] = []

    def evaluate(model: nn.Module) -> dict[str, float]:
        assert not model.training
        assert not torch.is_grad_enabled()
        seen.append(("eval", None))
        return {"a": 1, "b": torch.tensor(2.0)}

    def save(window: int, model: nn.Module) -> None:
        seen.append(("save", (window, float(model[0].weight.sum()))))

    results = run_job(
        2,
        eval_fn=evaluate,
        checkpoint_every=2,
        checkpoint_fn=save,
        epoch_fn=lambda epoch, model: seen.append(("epoch", epoch)),
    )
    assert sorted(v for kind, v in seen if kind == "epoch") == [0, 0, 1, 1], "on every rank"
    assert [kind for kind, _ in seen].count("eval") == 2, "on rank 0"
    saved = [value for kind, value in seen if kind == "save"]
    assert [window for window, _ in saved] == [2, 4, 6]
    for window, total in saved:
        weight = train_plainly(window)[0][0].weight.detach()
        assert total == pytest.approx(float(weight.sum()), rel=1e-9), "the committed model"
    for metrics, _ in results:
        assert metrics[0].eval == {"a": 1.0, "b": 2.0}


def test_epoch_fn_may_ask_where_it_is():
    """What has a default is the function's own."""
    seen: list[EpochContext] = []

    def note(epoch: int, model: nn.Module, context: EpochContext, own: str = "mine") -> None:
        assert (epoch, own) == (context.epoch, "mine")
        seen.append(context)

    def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.1)

    run_job(2, epoch_fn=note, scheduler=schedule)
    run_job(1, epoch_fn=lambda epoch, model, own=seen: own[epoch])
    found = [(c.rank, c.epoch, c.step, c.samples, c.world_size, c.is_main_process) for c in seen]
    assert sorted(found) == [
        *((0, 0, 0, 0, 2, True), (0, 1, 3, SAMPLES, 2, True)),
        *((1, 0, 0, 0, 2, False), (1, 1, 3, SAMPLES, 2, False)),
    ]
    assert {c.epoch: round(c.lr, 9) for c in seen} == {0: 0.05, 1: 0.005}
    assert {c.device.type for c in seen} == {"cpu"}


# ── evaluation ───────────────────────────────────────────────────────────────────────────────────

HELD = TensorDataset(*regression_data(37, seed=7, dtype=torch.float64))


def measure(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[dict[str, Tensor], int]:
    """Means over those with a positive first number, and how many these are; and a count."""
    assert not model.training
    assert not torch.is_grad_enabled()
    x, y = batch
    chosen = x[:, 0] > 0
    record_scalar("seen", len(x), "sum")
    error = (model(x) - y)[chosen].abs().mean() if chosen.any() else torch.tensor(math.nan)
    return {"error": error}, int(chosen.sum())


@pytest.mark.parametrize("ratios", [(1.0,), (1.0, 0.2, 0.0)])
@pytest.mark.parametrize("policy", ["sync", "cadence"])
def test_a_data_set_is_evaluated_once_over_all_ranks(policy, ratios):
    """After every second epoch and at the end; the training stays what it was."""
    options: dict[str, Any] = {"policy": policy, "num_epochs": 3, "eval_every": 2}
    options |= {"partition_ratios": ratios} if policy == "sync" else {"batch_size": 4}
    results = run_job(len(ratios), eval_dataset=lambda: HELD, eval_fn=measure, **options)
    (_, state), *_ = run_job(len(ratios), eval_dataset=HELD, **options)
    model = make_model(torch.device("cpu"))
    model.load_state_dict(state.state_dict())
    for metrics, _ in results:
        first, second, third = (m.eval for m in metrics)
        assert first == {}
        assert second["seen"] == third["seen"] == len(HELD)
    for metrics, state in results if policy == "sync" else ():
        assert_same(state.state_dict(), train_plainly(9)[0])
        x, y = HELD[:]
        with torch.no_grad():
            error = (model(x) - y)[x[:, 0] > 0].abs().mean()
        assert metrics[2].eval["error"] == pytest.approx(float(error), rel=1e-12)


def test_without_eval_fn_it_is_the_loss_that_is_trained_on():
    for metrics, state in run_job(2, eval_dataset=HELD, num_epochs=1):
        model = make_model(torch.device("cpu"))
        model.load_state_dict(state.state_dict())
        with torch.no_grad():
            loss = float(loss_of(model, HELD[:]))
        assert metrics[0].eval["loss"] == pytest.approx(loss, rel=1e-12)
        assert metrics[0].eval["count"] == len(HELD)
        assert metrics[0].scalars["count"] == SAMPLES, "of the training alone"


@pytest.mark.parametrize("where", ["epoch_fn", "eval_fn", "checkpoint_fn", "collate_fn"])
def test_what_a_callback_raises_ends_the_run(where):
    def callback(*arguments: Any) -> None:
        raise ZeroDivisionError(where)

    every = {"checkpoint_every": 1} if where == "checkpoint_fn" else {}
    handle = describe_job(**{where: callback, **every}).run()
    with pytest.raises(WorkerError, match=where) as caught:
        handle.join()
    assert caught.value.__cause__ is not None


class Endless(IterableDataset):
    def __iter__(self):
        return iter(range(10**9))


@pytest.mark.parametrize(
    ("name", "answer", "message"),
    [
        ("train_fn", None, "train_fn returned None as the loss"),
        ("train_fn", 1.5, "train_fn returned 1.5 as the loss"),
        ("train_fn", torch.ones(2, requires_grad=True), r"a tensor of shape \(2,\) as the loss"),
        ("train_fn", (torch.ones(()), "many"), "weight is 'many'"),
        ("scheduler", None, "scheduler returned None, a NoneType; return a torch scheduler"),
        ("model_fn", "model", "model_fn returned 'model', a str; return a torch.nn.Module"),
        ("optim_fn", None, "optim_fn returned None, a NoneType; return a torch.optim optimizer"),
        ("eval_fn", "good", "eval_fn returned 'good'; return a number"),
    ],
)
def test_answers_of_the_wrong_kind(name, answer, message):
    with pytest.raises(WorkerError, match=message):
        describe_job(**{name: lambda *_: answer}).run().join()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "an epoch has no batch: 0 samples"),
        (iter([1]), "the data set is a list_iterator, which has no length"),
        (Endless(), "dataset is a stream; .* give a map-style data set"),
    ],
)
def test_data_that_cannot_be_divided(data, message):
    with pytest.raises(WorkerError, match=message):
        describe_job(dataset=data).run().join()


def test_batches_are_moved_whatever_holds_their_tensors():
    class Graph:
        def __init__(self, nodes: torch.Tensor) -> None:
            self.nodes = nodes

        def to(self, device: torch.device) -> "Graph":
            return Graph(self.nodes.to(device))

    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    batch = {"x": [torch.ones(1), "text"], "words": packed, "graph": Graph(torch.ones(2))}
    moved = to_device(batch, torch.device("meta"))
    assert moved["x"][1] == "text"
    found = (moved["x"][0], moved["words"].data, moved["graph"].nodes)
    assert [t.device.type for t in found] == ["meta"] * 3
    assert isinstance(moved["words"], torch.nn.utils.rnn.PackedSequence)


def test_record_scalar_takes_one_number_and_only_inside_train_fn():
    with pytest.raises(UsageError, match=r"record_scalar\('a', ...\) was called outside train_fn"):
        record_scalar("a", 1.0)
    for value in (torch.ones(3), "x"):
        handle = describe_job(train_fn=lambda *_, v=value: record_scalar("a", v)).run()
        with pytest.raises(WorkerError, match=r"record_scalar\('a', ...\) got"):
            handle.join()
    for reductions, words in (
        (["max"], r"got reduction 'max'; choose one of mean, sum, last"),
        (["mean", "sum"], r"was called with reduction 'mean' and 'sum'; a name has one reduction"),
    ):
        handle = describe_job(
            train_fn=lambda *_, r=reductions: [record_scalar("a", 1.0, one) for one in r]
        ).run()
        with pytest.raises(WorkerError, match=words):
            handle.join()


# ── one device: in this thread ───────────────────────────────────────────────────────────────────


def test_one_device_trains_when_asked_for_results():
    epochs: list[int] = []
    handle = describe_job(metrics_fn=lambda m: epochs.append(m.epoch), num_epochs=4).run()
    assert epochs == []
    assert not handle.done
    assert handle.state is None
    assert next(handle.metrics()).epoch == 0
    assert handle.next_metrics().epoch == 1
    assert epochs == [0, 1]
    assert (handle.devices, handle.world_size) == (("cpu",), 1)
    state = handle.join()
    assert [m.epoch for m in handle.poll_metrics()] == [2, 3]
    assert handle.next_metrics() is None
    assert epochs == [0, 1, 2, 3]
    assert handle.done
    assert handle.state is state
    assert list(handle.metrics()) == []
    assert_same(state.state_dict(), train_plainly(12)[0])
    fresh = make_model(torch.device("cpu"))
    fresh.load_state_dict(state.state_dict())
    assert handle.join() is state


def test_polling_never_trains_and_lets_the_run_continue():
    """A program that only polls ends, on one device as on several."""
    threads: set[str] = set()

    def train(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        threads.add(threading.current_thread().name)
        assert gate.wait(PATIENCE_S)
        return train_step(model, batch)

    gate = threading.Event()
    with describe_job(train_fn=train).run() as handle:
        assert handle.poll_metrics() == []
        with pytest.raises(TimeoutError, match="no epoch has ended within"):
            handle.next_metrics(timeout_s=0.01)
        gate.set()
        landed = [handle.next_metrics(timeout_s=PATIENCE_S)]
        while not handle.done:
            landed += handle.poll_metrics()
        landed += handle.poll_metrics()
        assert [m.epoch for m in landed] == [0, 1]
        assert handle.next_metrics(timeout_s=PATIENCE_S) is None
        assert threading.current_thread().name not in threads
        assert_same(handle.join().state_dict(), train_plainly(6)[0])


def test_stop_from_a_callback():
    handle = describe_job(num_epochs=1000, metrics_fn=lambda m: m.epoch == 1 and handle.stop())
    handle = handle.run()
    assert handle.join().progress.steps == 6


def test_an_exception_in_the_block_stays_the_same():
    handle = describe_job(num_epochs=1000).run()

    def use() -> None:
        with handle:
            handle.next_metrics()
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        use()
    assert handle.state.progress.steps == 3


def test_an_exception_of_train_fn_surfaces_and_leaves_the_model():
    def train(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        calls.append(None)
        if len(calls) == 3:
            raise ValueError("spilled")
        return train_step(model, batch)

    calls: list[None] = []
    with describe_job(train_fn=train).run() as handle:
        with pytest.raises(WorkerError, match=r"rank 0.*ValueError: spilled") as caught:
            list(handle.metrics())
        with pytest.raises(WorkerError):
            handle.join()
    assert isinstance(caught.value.__cause__, ValueError)
    assert (caught.value.rank, caught.value.kind) == (0, "ValueError")
    assert caught.value.state is handle.state
    assert_same(handle.state.state_dict(), train_plainly(2)[0])


def test_what_metrics_fn_raises_is_raised_as_it_is():
    def publish(metrics: EpochMetrics) -> None:
        raise ConnectionResetError("no dashboard")

    handle = describe_job(metrics_fn=publish).run()
    with pytest.raises(ConnectionResetError, match="no dashboard"):
        handle.join()
    assert handle.state.progress.steps == 3


def test_ctrl_c_ends_a_run_after_a_whole_step():
    def train(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        calls.append(None)
        if len(calls) == 2:
            signal.raise_signal(signal.SIGINT)
        return train_step(model, batch)

    calls: list[None] = []
    handle = describe_job(train_fn=train, num_epochs=1000).run()
    with pytest.raises(KeyboardInterrupt):
        handle.join()
    assert handle.done
    assert len(calls) == 2
    steps = handle.state.progress.steps
    assert steps in (1, 2)
    assert_same(handle.state.state_dict(), train_plainly(steps)[0])


def test_a_run_that_nobody_joins_says_so(capfd):
    handle = describe_job().run()
    handle.next_metrics()
    del handle
    gc.collect()
    assert "a managed run was not joined" in capfd.readouterr().err


# ── options ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset": None, "batch_size": None}, "dataset, batch_size missing"),
        ({"num_epochs": None}, r"num_epochs \(or num_steps\) missing"),
        ({"num_steps": 3}, "num_epochs and num_steps are both given"),
        ({"partition_ratios": [1], "speed_hint": [1]}, "partition_ratios .*give one of them"),
        ({"checkpoint_every": 3}, "checkpoint_every has no effect without checkpoint_fn or"),
        ({"batchsize": 3}, "batchsize is 3: unknown key; allowed are .*, batch_size, "),
        ({"eval_fn": 3}, "eval_fn is 3, a int; give a function"),
        ({"checkpoint_dir": b"runs"}, "checkpoint_dir is b'runs': give the path of a folder"),
        ({"devices": "tpu"}, "devices is 'tpu'"),
        ({"anchor": 10}, "anchor is 10, but has no effect with policy 'sync'"),
        (
            {"policy": "async", "partition_ratios": [1]},
            r"partition_ratios is .* policy 'async'",
        ),
        ({"config": {"anchor": 3}}, "config is {'anchor': 3}: .* instance of DdpConfig"),
        ({"elastic": (1, 3), "devices": 2}, r"elastic is \(1, 3\), and the run has 2 devices"),
        ({"elastic": (1, 2), "partition_ratios": [1, 1]}, "partition_ratios is .* elastic team"),
        ({"eval_every": 2}, "eval_every has no effect without eval_fn or eval_dataset"),
        ({"max_failures": 5}, "max_failures has no effect without elastic"),
    ],
)
def test_options_are_checked_before_anything_starts(options, message):
    with pytest.raises(ConfigError, match=message):
        describe_job(**options).run()


# ── in a notebook ────────────────────────────────────────────────────────────────────────────────


def test_metrics_are_a_table_with_a_row_for_each_rank():
    shown = EpochMetrics(
        epoch=3, complete=False, avg_loss=0.25, scalars={"<i>": 0.5}, per_rank=({"<i>": 0.5}, {}),
        eval={"eval": 0.75}, samples=4000, weight=4000.0, steps=9, lr=0.1, epoch_ms=1500.0,
        per_rank_samples_per_s=(2000.0, 1000.0), per_rank_batch_share=(0.75, 0.25),
        devices=("cuda:0", "cpu"),
    )._repr_html_()  # fmt: skip
    assert (
        "epoch 3 (incomplete): loss 0.25, &lt;i&gt; 0.5, eval 0.75; 4,000 samples in 1.5 s" in shown
    )
    first = "<td>0</td><td>cuda:0</td><td>75.0%</td><td>2,000</td><td>0.5</td>"
    second = "<td>1</td><td>cpu</td><td>25.0%</td><td>1,000</td><td>–</td>"
    assert f"<tr>{first}</tr><tr>{second}</tr>" in shown
