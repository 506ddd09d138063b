"""Every row of ``docs/coming-from.md`` that says "yes" is executed, and does what it says.

A snippet belongs to the row with that first cell and uses every public name of the row. A row
without a snippet, and a snippet without a row, fail.
"""

import functools
import hashlib
import inspect
import json
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from typer.testing import CliRunner

import evener
from evener import (
    ApplyPolicy,
    AverageBackend,
    BatchResult,
    CheckpointError,
    ConfigError,
    DataParallelCoordinator,
    Ddp,
    DdpBuilder,
    DdpConfig,
    DdpHandle,
    DistributedBackend,
    DistributedComm,
    DistributedRole,
    DistributedTrainConfig,
    DistributedTrainer,
    DivergenceGuard,
    ElChe,
    EpochMetrics,
    JsonlSink,
    LMBatch,
    NonFiniteGradientError,
    Replicas,
    Sample,
    TrainedState,
    TransformerTrainer,
    UsageError,
    Verdict,
    WindowResult,
    WorkerError,
    record_scalar,
    shard_batches,
    shard_files,
)
from evener.cli import app
from evener.comm.base import Communicator
from helpers.classification import TINY_LLAMA, config, samples
from helpers.language import llama, lm_batch
from helpers.limits import PATIENCE_S
from helpers.source import ROOT
from helpers.teams import run_team, setup

Snippet = Callable[[Path], None]

SNIPPETS: dict[str, Snippet] = {}


def row(first_cell: str) -> Callable[[Snippet], Snippet]:
    def add(snippet: Snippet) -> Snippet:
        SNIPPETS[first_cell] = snippet
        return snippet

    return add


def rows_with_yes() -> Iterator[list[str]]:
    for line in (ROOT / "docs" / "coming-from.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and cells[-1] == "yes":
            yield cells


YES = {cells[0]: cells[1] for cells in rows_with_yes()}


def test_every_row_that_says_yes_has_a_snippet() -> None:
    assert set(SNIPPETS) == set(YES)


@pytest.mark.parametrize("first_cell", sorted(YES))
def test_what_a_row_names_does_what_it_says(first_cell: str, tmp_path: Path) -> None:
    source = inspect.getsource(SNIPPETS[first_cell])
    names = re.findall(r"`([A-Za-z]\w*(?:\.\w+)?)(?:\([^`]*\))?`", YES[first_cell])
    used = [n.rpartition(".")[2] for n in names if n.partition(".")[0] in evener.__all__]
    used += re.findall(r"`\w+\((\w+)=\.\.\.\)`", YES[first_cell])
    for name in used:
        assert re.search(rf"\b{name}\b", source), f"the snippet does not use {name}"
    SNIPPETS[first_cell](tmp_path)


# ── what the snippets share ──────────────────────────────────────────────────────────────────────

DATA = TensorDataset(torch.arange(80.0).view(40, 2) / 80)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = model(batch[0]).square().mean()
    return loss


def alone(policy: str | ApplyPolicy = "sync", scheduler: Any = None, **options: Any) -> Ddp:
    model = network()
    chosen = options.pop("config", None) or DdpConfig(**options)
    return Ddp.setup(
        model, sgd(model.parameters()), scheduler, policy=policy, devices="cpu", config=chosen,
        quiet=True,
    )  # fmt: skip


def train(ddp: Ddp, epochs: int = 1) -> list[WindowResult]:
    """The results of all windows, and the model trained."""
    results: list[WindowResult] = []
    ddp.on_commit(results.append)
    loader = ddp.loader(DATA, batch_size=8)
    for epoch in range(epochs):
        for batch in loader.epoch(epoch):
            ddp.backward(loss_of(ddp.assembly.model, batch))
            ddp.step()
    return results


def train_step(model: nn.Module, batch: Any) -> Tensor:
    record_scalar("rows", float(len(batch[0])))
    return loss_of(model, batch)


def builder(**options: Any) -> DdpBuilder:
    given: dict[str, Any] = {"devices": ["cpu"], "quiet": True, **options}
    return Ddp.builder(lambda device: network(), sgd, train_step, **given)


def short(**options: Any) -> DdpBuilder:
    return builder(dataset=DATA, batch_size=8, num_epochs=1, **options)


@functools.cache
def run_of_two() -> tuple[list[EpochMetrics], TrainedState]:
    """One managed run in two processes, for all rows that need more than one device."""
    handle = short(devices=["cpu", "cpu"], speed_hint=(3.0, 1.0), backend="gloo").run()
    return list(handle.metrics()), handle.join()


def replicas(number: int = 2) -> Replicas:
    torch.manual_seed(1)
    models = [nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1)) for _ in range(number)]
    return Ddp.wrap(models, "cpu", quiet=True)


# ── floDl ────────────────────────────────────────────────────────────────────────────────────────


@row("`Trainer::setup(model, builder, optim_f)`, `setup_with`")
def _(folder: Path) -> None:
    model = network()
    optimizer = sgd(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    chosen = DdpConfig(max_grad_norm=1.0)
    with Ddp.setup(
        model, optimizer, scheduler, config=chosen, devices="cpu", quiet=True
    ) as ddp:  # fmt: skip
        assert len(train(ddp)) == 5
    with pytest.raises(ConfigError, match="each rank makes its own model and optimizer"):
        Ddp.setup(model, lambda device: network(), sgd)  # type: ignore[arg-type, return-value]


@row("`Trainer::setup_head`, `Graph`")
def _(folder: Path) -> None:
    body, head = nn.Linear(2, 3), nn.Linear(3, 1)
    optimizer = sgd([*body.parameters(), *head.parameters()])
    before = head.weight.clone()
    with Ddp.setup([body, head], optimizer, devices="cpu", quiet=True) as ddp:
        for (x,) in ddp.loader(DATA, batch_size=8):
            ddp.backward(head(body(x).relu()).square().mean())
            ddp.step()
    assert not torch.equal(before, head.weight)


@row("`set_data_loader`, `forward_batch`, `Graph::step`")
def _(folder: Path) -> None:
    with alone() as ddp:
        for batch in ddp.loader(DATA, batch_size=8):
            ddp.backward(loss_of(ddp.assembly.model, batch))
            ddp.step()
        assert ddp.progress.steps == 5


@row("`Trainer::run(.., TrainerConfig)`, `ElCheConfig`")
def _(folder: Path) -> None:
    made = Ddp.builder(
        lambda device: network(), sgd, train_step, dataset=DATA, batch_size=8, num_epochs=1,
        devices=["cpu"], config=DdpConfig(anchor=2, quiet=True),
    )  # fmt: skip
    assert made.policy("cadence").backend("nccl").run().join().progress.samples == len(DATA)


@row("Optimizer per replica, El Che on when GPUs differ")
def _(folder: Path) -> None:
    metrics, _ = run_of_two()
    assert metrics[0].devices == ("cpu", "cpu")
    assert sum(metrics[0].per_rank_batch_share) == pytest.approx(1.0)
    assert all(speed > 0 for speed in metrics[0].per_rank_samples_per_s)


@row("`Ddp::wrap`")
def _(folder: Path) -> None:
    models = [network(), network()]
    devices = ["cpu", "cpu"]
    with Ddp.wrap(models, devices, quiet=True) as wrapped:
        assert isinstance(wrapped, Replicas)
        assert wrapped.world_size == 2


@row("`sync_params`, `sync_buffers`")
def _(folder: Path) -> None:
    for call, same in ((Replicas.sync_buffers, False), (Replicas.sync_params, True)):
        with replicas() as wrapped:
            first, second = wrapped.models
            first(torch.randn(4, 2))  # moves the statistics of this one
            call(wrapped)
            assert torch.equal(first[1].running_mean, second[1].running_mean)  # type: ignore[index]
            assert torch.equal(first[0].weight, second[0].weight) is same  # type: ignore[index]


@row("`all_reduce_gradients`")
def _(folder: Path) -> None:
    with replicas() as wrapped:
        for number, model in enumerate(wrapped.models):
            for p in model.parameters():
                p.grad = torch.full_like(p, float(number))
        wrapped.all_reduce_gradients()
        for model in wrapped.models:
            assert all(bool((p.grad == 0.5).all()) for p in model.parameters())


@row("`weighted_all_reduce_gradients(counts)`")
def _(folder: Path) -> None:
    with replicas() as wrapped:
        for p in wrapped.models[1].parameters():
            p.grad = torch.full_like(p, 4.0)  # the first replica has none
        wrapped.weighted_all_reduce_gradients([3, 1])
        for model in wrapped.models:
            assert all(bool((p.grad == 1.0).all()) for p in model.parameters())


@row("`Trainer::builder(model_f, optim_f, train_fn)`")
def _(folder: Path) -> None:
    made = Ddp.builder(lambda device: network(), sgd, train_step)
    assert isinstance(made, DdpBuilder)
    _, state = run_of_two()  # in two processes
    assert state.progress.samples == len(DATA)


@row("`dataset`, `batch_size`, `num_epochs`")
def _(folder: Path) -> None:
    state = builder().dataset(DATA).batch_size(8).num_epochs(1).run().join()
    assert state.progress.steps == 5
    with pytest.raises(ConfigError, match="batch_size missing"):
        builder().dataset(DATA).num_epochs(1).run()


@row("the builder's `policy`")
def _(folder: Path) -> None:
    assert short().policy("cadence").run().join().progress.samples == len(DATA)
    with pytest.raises(ConfigError, match="no effect with policy 'sync'"):
        short().anchor(3).run()


@row("`checkpoint_fn`, `epoch_fn`, `metrics_fn`, `eval_fn`")
def _(folder: Path) -> None:
    told: list[str] = []
    run = (
        short(checkpoint_every=5)
        .epoch_fn(lambda epoch, model, context: told.append(f"epoch at {context.step}"))
        .eval_fn(lambda model: told.append("eval") or 1.0)
        .metrics_fn(lambda metrics: told.append("metrics"))
        .checkpoint_fn(lambda window, model: told.append("checkpoint"))
    )
    run.run().join()
    assert told == ["epoch at 0", "checkpoint", "eval", "metrics"]
    with pytest.raises(WorkerError, match="ZeroDivisionError"):
        short().epoch_fn(lambda epoch, model: 1 / 0).run().join()


@row("the builder's `checkpoint_every`")
def _(folder: Path) -> None:
    for policy in ApplyPolicy:
        windows: list[int] = []
        local = {} if policy is ApplyPolicy.SYNC else {"anchor": 1, "max_anchor": 1}
        run = short(checkpoint_fn=lambda window, model, seen=windows: seen.append(window), **local)
        state = run.checkpoint_every(2).policy(policy).run().join()
        assert len(windows) == state.progress.steps // 2


@row("`save_path`, `resume_from`")
def _(folder: Path) -> None:
    whole = short().run().join().state_dict()
    builder(dataset=DATA, batch_size=8, num_steps=3).checkpoint_dir(folder).run().join()
    resumed = short().resume(folder).run().join().state_dict()
    assert all(torch.equal(resumed[name], tensor) for name, tensor in whole.items())


@row("`eval_dataset`, `eval_every`, `eval_result_fn`")
def _(folder: Path) -> None:
    given = DATA.tensors[0]
    run = builder(dataset=DATA, batch_size=8, num_epochs=3).eval_dataset(DATA).eval_every(2)
    handle = run.eval_fn(lambda model, batch: batch[0].mean()).run()
    evaluated = [metrics.eval for metrics in handle.metrics() if isinstance(metrics, EpochMetrics)]
    assert [len(figures) for figures in evaluated] == [0, 1, 1]
    assert evaluated[1]["eval"] == pytest.approx(given.mean().item())


@row("`record_scalar`, `scalar_reductions`")
def _(folder: Path) -> None:
    def step(model: nn.Module, batch: Any) -> Tensor:
        for reduction in ("mean", "sum", "last"):
            record_scalar(reduction, float(len(batch[0])), reduction)  # type: ignore[arg-type]
        return loss_of(model, batch)

    made = Ddp.builder(lambda device: network(), sgd, step, dataset=DATA, batch_size=8)
    (metrics,) = made.num_epochs(1).devices(["cpu"]).quiet().run().metrics()
    assert metrics.scalars["sum"] == len(DATA)
    assert metrics.scalars["mean"] <= 8
    assert metrics.scalars["last"] <= 8


@row("`DdpHandle`")
def _(folder: Path) -> None:
    handle = builder(dataset=DATA, batch_size=8, num_epochs=1000).run()
    assert isinstance(handle, DdpHandle)
    assert next(iter(handle.metrics())).epoch == 0
    handle.stop()
    assert handle.join() is handle.state
    assert isinstance(handle.poll_metrics(), list)
    assert (handle.world_size, handle.devices) == (1, ("cpu",))


@row("`next_metrics`")
def _(folder: Path) -> None:
    handle = short().run()
    assert isinstance(handle, DdpHandle)
    assert handle.next_metrics().epoch == 0  # type: ignore[union-attr]
    assert handle.next_metrics() is None


@row("`TrainedState`: `params`, `buffers`")
def _(folder: Path) -> None:
    _, state = run_of_two()
    assert isinstance(state, TrainedState)
    model = network()
    model.load_state_dict(state.state_dict())
    assert state.params.keys() == dict(model.named_parameters()).keys()
    assert state.buffers.keys() == dict(model.named_buffers()).keys()
    assert (state.extra, state.progress.steps) == ({}, 5)


@row(
    "`EpochMetrics`: `per_rank_throughput`, `device_indices`, `per_rank_share_complete_ms`, "
    "`per_rank_compute_only_ms`, `per_rank_data_starve_ms`"
)
def _(folder: Path) -> None:
    metrics, _ = run_of_two()
    assert isinstance(metrics[0], EpochMetrics)
    named = re.findall(r"`(\w+)`", YES[next(cell for cell in YES if "`EpochMetrics`" in cell)])
    times = named[named.index("ranks") + 1 :]
    assert (
        set(named) - {"EpochMetrics", "WindowResult", "ranks", *times}
        <= metrics[0].document().keys()
    )
    with alone() as ddp:
        result = train(ddp)[-1]
    assert isinstance(result, WindowResult)
    assert all(getattr(result.ranks[0], name) >= 0 for name in times)


@row("`into_worker()` (`next_plan`, `next_batch`, `step`, `finish`)")
def _(folder: Path) -> None:
    model = network()
    with Ddp.setup(model, sgd(model.parameters()), devices="cpu", quiet=True) as ddp:
        loader = ddp.loader(DATA, batch_size=8)
        seen = 0
        for batch in loader.epoch(0):
            seen += len(batch[0])
            ddp.backward(loss_of(model, batch))
            ddp.step()
    assert seen == len(DATA)


@row("`EpochCallbackPolicy`")
def _(folder: Path) -> None:
    with alone() as ddp:
        train(ddp)
        rows = []
        for (x,) in ddp.eval_loader(DATA, batch_size=16):
            rows.append(ddp.gather(x))
        assert torch.equal(torch.cat(rows), DATA.tensors[0])
        assert ddp.weighted_mean(2.0, 40) == 2.0


@row("`DdpConfig`'s `speed_hint(slow_rank, ratio)`")
def _(folder: Path) -> None:
    said = DdpConfig().with_speed_hint(slow_rank=1, ratio=2.0)
    assert said.hinted_speeds(2) == DdpConfig(speed_hint=(1.0, 0.5)).hinted_speeds(2)
    with pytest.raises(ConfigError, match="floDl reads these as"):
        DdpConfig(speed_hint=(1, 2.3))
    run_of_two()  # whose hint was speeds


@row("`max_grad_norm`")
def _(folder: Path) -> None:
    with alone(config=DdpConfig(max_grad_norm=1e-9)) as ddp:
        before = [p.detach().clone() for p in ddp.assembly.model.parameters()]
        train(ddp)
        for p, old in zip(ddp.assembly.model.parameters(), before, strict=True):
            torch.testing.assert_close(p.detach(), old, rtol=0, atol=1e-7)
    for policy in (ApplyPolicy.SYNC, ApplyPolicy.CADENCE, ApplyPolicy.ASYNC):
        with alone(policy, max_grad_norm=1e-9) as ddp:
            weight = ddp.assembly.model[0].weight  # type: ignore[index]
            before_it = weight.detach().clone()
            train(ddp)
            torch.testing.assert_close(weight.detach(), before_it, rtol=0, atol=1e-7)


@row("`partition_ratios`")
def _(folder: Path) -> None:
    with alone(config=DdpConfig(partition_ratios=[1.0])) as ddp:
        assert {result.ranks[0].samples for result in train(ddp)} == {8}
    with pytest.raises(ConfigError, match=r"partition_ratios is .*the team has 1 rank"):
        alone(partition_ratios=[1.0, 2.0])


@row("`overhead_target`, `max_anchor`, `max_batch_diff`")
def _(folder: Path) -> None:
    chosen = DdpConfig(overhead_target=0.2, max_anchor=0, max_batch_diff=1)
    with alone("cadence", config=chosen) as ddp:
        assert sum(result.size for result in train(ddp)) == len(DATA)
    cadence = ElChe(2, 10).with_overhead_target(0.2).with_max_anchor(0).with_max_batch_diff(1)
    cadence.report_timing([1000.0, 1000.0], [10, 10], 900.0)
    assert cadence.anchor == 10
    with pytest.raises(ConfigError, match=r"overhead_target is 0.6"):
        DdpConfig(overhead_target=0.6)


@row("`ElChe`")
def _(folder: Path) -> None:
    cadence = ElChe(world_size=2, anchor=10).with_speed_ratio(slow_rank=1, ratio=2.3)
    assert (cadence.batches(0), cadence.batches(1)) == (23, 10)
    cadence.report_timing([230.0, 300.0], [23, 10], sync_ms=0.0)
    assert cadence.batch_counts == (30, 10)
    assert (cadence.clamp_total(100), cadence.clamp_total(8)) == ((30, 10), (6, 2))
    assert cadence.clamp_total(1) == (1, 0)
    cadence.nudge_anchor_down(0.5)
    assert cadence.batch_counts == (15, 5)


@row("`ApplyPolicy::Sync`")
def _(folder: Path) -> None:
    with alone(ApplyPolicy.SYNC) as ddp:
        results = train(ddp)
    assert [result.size for result in results] == [8] * 5
    assert results[-1].progress.steps == 5


@row("`ApplyPolicy::Cadence`, `ApplyPolicy::Async`")
def _(folder: Path) -> None:
    for policy in (ApplyPolicy.CADENCE, ApplyPolicy.ASYNC):
        with alone(policy, anchor=2) as ddp:
            results = train(ddp)
        assert sum(result.size for result in results) == len(DATA)
        assert results[-1].progress.steps == 5


@row("`AverageBackend::Nccl`, `AverageBackend::Cpu`")
def _(folder: Path) -> None:
    named = (AverageBackend.NCCL, AverageBackend.CPU, AverageBackend.GLOO, AverageBackend.AUTO)
    for backend in named:  # one device exchanges nothing, so that any will do
        assert short().backend(backend).run().join().progress.steps == 5


@row("`ElCheMode` (`NcclSync`, `CpuCadence`, …)")
def _(folder: Path) -> None:
    assert short().backend("cpu").policy("cadence").run().join().progress.steps == 5


@row("Progressive dispatch, `max_overshoot`, sub-batch remainder")
def _(folder: Path) -> None:
    ragged = TensorDataset(DATA.tensors[0][:37])
    state = builder(dataset=ragged, batch_size=8, num_epochs=2).run().join()
    assert state.progress.samples == 2 * 37


@row("`lr_scale_ratio`")
def _(folder: Path) -> None:
    for policy in (ApplyPolicy.CADENCE, ApplyPolicy.ASYNC):
        with alone(policy, config=DdpConfig(lr_scale_ratio=1.0)) as ddp:
            assert train(ddp)[-1].lr == pytest.approx(0.1)  # times 1 + (1 - 1) * 1
    with pytest.raises(ConfigError, match=r"lr_scale_ratio is 1.0"):
        alone(ApplyPolicy.SYNC, lr_scale_ratio=1.0)


@row("LR schedule on `global_step + local_steps`")
def _(folder: Path) -> None:
    model = network()
    optimizer = sgd(model.parameters())
    halved = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    with Ddp.setup(model, optimizer, halved, devices="cpu", quiet=True) as ddp:
        train(ddp)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**5)


@row("`NoGuard`, `LevelGuard` (`TrendGuard`), `no_divergence_guard`")
def _(folder: Path) -> None:
    chosen = DdpConfig(divergence_guard="level", divergence_threshold=0.1, divergence_factor=0.5)
    with alone("cadence", config=chosen):
        pass
    short(policy="cadence").divergence_guard("level").run().join()
    short(policy="cadence").no_divergence_guard().run().join()
    assert DdpConfig(divergence_factor=0.5).divergence_factor == 0.5
    assert DdpConfig(divergence_guard="none") != DdpConfig()


@row("The trait `ConvergenceGuard`")
def _(folder: Path) -> None:
    seen: list[float] = []

    class Mine(DivergenceGuard):
        def report(self, divergence: float) -> Verdict:
            seen.append(divergence)
            return Verdict.SUPPRESS_GROWTH

    with alone("cadence", divergence_guard=Mine(), anchor=1) as ddp:
        verdicts = {result.cadence.guard for result in train(ddp, 2) if result.cadence is not None}
    assert seen
    assert "suppress_growth" in verdicts


@row("Consensus for evaluation and checkpoints")
def _(folder: Path) -> None:
    with alone("cadence") as ddp:
        committed: list[int] = []
        ddp.on_commit(lambda result: committed.append(result.window))
        train(ddp)
        ddp.save(folder)
        saved = {n: t.clone() for n, t in ddp.assembly.model.state_dict().items()}
    assert committed
    with alone("cadence") as ddp:
        ddp.load(folder)
        found = ddp.assembly.model.state_dict()
        assert all(torch.equal(found[name], tensor) for name, tensor in saved.items())


@row("Timeline, `record_log_dir`")
def _(folder: Path) -> None:
    by_hand = folder / "by hand"
    by_hand.mkdir()
    sink = JsonlSink(by_hand / "events.jsonl")
    short(sinks=[sink]).run_folder(folder / "run").run().join()
    for run in (folder / "run", by_hand):
        page, trace = run / "page.html", run / "trace.json"
        options = ["-o", str(page), "--trace", str(trace)]
        assert CliRunner().invoke(app, ["report", str(run), *options]).exit_code == 0
        assert "<h2>Timeline</h2>" in page.read_text()
        names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
        assert "compute" in names


# ── entrenar ─────────────────────────────────────────────────────────────────────────────────────


@row("`DistributedTrainConfig`")
def _(folder: Path) -> None:
    place = DistributedTrainConfig(2, 0, 0, "coordinator", "0.0.0.0:9000", "auto", "gloo")  # type: ignore[arg-type]
    assert (place.coordinator_addr, place.coordinator_port) == ("0.0.0.0", 9000)
    with pytest.raises(ConfigError, match="that host alone can use it"):
        DistributedTrainConfig(2, 1, 1, "worker", "0.0.0.0:9000")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="is not a host"):
        DistributedTrainConfig(2, 1, 1, "worker", "node 7")  # type: ignore[arg-type]
    variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node7", "MASTER_PORT": "9000"}
    assert DistributedTrainConfig.from_env(variables).rank == 1


@row("`role`, `backend`")
def _(folder: Path) -> None:
    for rank, role in enumerate((DistributedRole.COORDINATOR, DistributedRole.WORKER)):
        for backend in (DistributedBackend.AUTO, DistributedBackend.CUDA, DistributedBackend.CPU):
            assert DistributedTrainConfig.of_rank(rank, 2, backend=backend).role is role


@row("`--distributed --world-size --rank --coordinator-addr`")
def _(folder: Path) -> None:
    options = ["--nnodes", "2", "--node-rank", "2", "--master-addr", "node7"]
    (folder / "run.yaml").write_text("seed: 1")
    answer = CliRunner().invoke(app, ["pretrain", str(folder / "run.yaml"), *options])
    assert answer.exit_code != 0
    assert "--node-rank is 2, but --nnodes is 2" in answer.output
    step = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "SLURM_STEP_ID": "0"}
    nodes = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "node[1-2]", "SLURM_NNODES": "2"}
    torchrun = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "9000"}
    for variables in (torchrun, {**step, **nodes, "SLURM_STEP_NUM_TASKS": "2"}):
        place = DistributedTrainConfig.from_env(variables)
        assert (place.rank, place.world_size, place.coordinator_addr) == (1, 2, "node1")


@row("YAML `training.distributed`")
def _(folder: Path) -> None:
    (folder / "team.yaml").write_text(
        "training:\n  distributed: {world_size: 2, rank: 0, coordinator_addr: '0.0.0.0:9000'}\n"
    )
    place = DistributedTrainConfig.from_yaml(folder / "team.yaml")
    assert (place.role, place.coordinator_port) == (DistributedRole.COORDINATOR, 9000)
    (folder / "team.yaml").write_text(
        "training:\n  distributed: {world_size: 2, rank: 0, role: coordinator, "
        "coordinator_addr: 'node7:9000'}\n"
    )
    shared = [DistributedTrainConfig.from_yaml(folder / "team.yaml", rank=r) for r in range(2)]
    assert [place.role for place in shared] == ["coordinator", "worker"]


@row("`--deterministic --seed`")
def _(folder: Path) -> None:
    first, second = (short(seed=3).run().join().state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@row("`ring_allreduce`")
def _(folder: Path) -> None:
    with replicas(3) as wrapped:
        assert wrapped.weighted_mean([1.0, 2.0, 6.0]) == 3.0


def on_threads(ends: list[DistributedComm], body: Callable[[DistributedComm], Any]) -> list[Any]:
    found = [None for _ in ends]

    def run(rank: int) -> None:
        found[rank] = body(ends[rank])

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(ends))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert None not in found
    return found


@row("ZeRO-1")
def _(folder: Path) -> None:
    assert DdpConfig().sharded_update == "auto"

    def body(comm: Communicator) -> dict[int, Any]:
        model = nn.Linear(2, 3)
        optimizer = torch.optim.Adam(model.parameters())
        with setup(comm, model, optimizer, sharded_update="on") as ddp:
            for (x,) in ddp.loader(DATA, batch_size=8).epoch(0):
                ddp.backward(model(x).square().mean())
                ddp.step()
            with pytest.raises(UsageError, match="is divided among 2 ranks"):
                optimizer.state[model.weight]
            states: dict[int, Any] = optimizer.state_dict()["state"]
        return states

    for states in run_team(2, body):
        assert [state["exp_avg"].shape for state in states.values()] == [(3, 2), (3,)]


@row("`DistributedCudaTrainer` (`DistributedTrainer`), `DistributedComm`")
def _(folder: Path) -> None:
    models = [llama(), llama()]  # here, as threads cannot import transformers at the same time

    def body(comm: DistributedComm) -> tuple[bool, int, bool]:
        trainer = TransformerTrainer(models[comm.rank], max_steps=1)
        with DistributedTrainer(trainer, comm, options=DdpConfig(quiet=True)) as distributed:
            comm.barrier()
            distributed.train_batch(lm_batch(comm.rank, 2))
            return distributed.is_coordinator, distributed.step, distributed.reached_max_steps

    ends = DistributedComm.local(2, timeout_s=PATIENCE_S)
    assert on_threads(ends, body) == [(True, 1, True), (False, 1, True)]
    with DistributedComm.remote(DistributedTrainConfig()) as comm:
        assert comm.world_size == 1


@row("`create_local_comm_pair`")
def _(folder: Path) -> None:
    ends = DistributedComm.local(2, timeout_s=PATIENCE_S)
    assert on_threads(ends, lambda comm: (comm.barrier(), comm.rank)[1]) == [0, 1]


@row("`CudaTransformerTrainer`, `TransformerTrainer`")
def _(folder: Path) -> None:
    trainer = TransformerTrainer(llama(), max_steps=1)
    assert trainer.forward_backward_batch(LMBatch.of_documents([[1, 2, 3]])) > 0
    trainer.apply_gradients()
    assert trainer.reached_max_steps
    trainer.close()


@row("per-block all-reduce in reverse block order")
def _(folder: Path) -> None:
    with (
        DistributedComm.remote(DistributedTrainConfig()) as comm,
        DistributedTrainer(TransformerTrainer(llama(2)), comm) as distributed,
    ):
        labels = [bucket.label for bucket in distributed.buckets]
    blocks = [label for label in labels if label.startswith("block")]
    assert blocks == sorted(blocks, reverse=True)
    assert labels[-1] == "embedding"


@row("`DataParallelCoordinator(gpu_indices)`, `BatchResult`")
def _(folder: Path) -> None:
    with DataParallelCoordinator(TINY_LLAMA, config(), ["cpu", "cpu"]) as coordinator:
        result = coordinator.train_batch_parallel(samples(6))
        assert isinstance(result, BatchResult)
        assert BatchResult.accuracy(result) == result.correct / 6
    if not torch.accelerator.is_available():
        with pytest.raises(ConfigError, match=r"devices is \[0, 1\].*numbered from 0"):
            DataParallelCoordinator(TINY_LLAMA, config(), [0, 1])


@row("`primary_pipeline`, `primary_pipeline_ref`, `num_gpus`")
def _(folder: Path) -> None:
    with DataParallelCoordinator(TINY_LLAMA, config(), ["cpu", "cpu"]) as coordinator:
        assert coordinator.primary_pipeline is coordinator.pipelines[0]
        assert len(coordinator.devices) == 2


@row("`SafetySample`")
def _(folder: Path) -> None:
    with DataParallelCoordinator(TINY_LLAMA, config(), ["cpu"]) as coordinator:
        named = [Sample(s.text, config().labels[int(s.label)]) for s in samples(3)]
        assert coordinator.train_batch_parallel(named).total == 3


@row("`shard_samples`, `average_gradients`, `has_non_finite`")
def _(folder: Path) -> None:
    with DataParallelCoordinator(TINY_LLAMA, config(), ["cpu", "cpu"]) as coordinator:
        with torch.no_grad():
            for p in coordinator.pipelines[1].model.parameters():
                p.fill_(float("nan"))
        with pytest.raises(NonFiniteGradientError):
            coordinator.train_batch_parallel(samples(6))


@row("`shard_batches`, file shards")
def _(folder: Path) -> None:
    assert [shard_batches(5, rank, 2) for rank in range(2)] == [[0, 2, 4], [1, 3]]
    assert shard_files(["b.txt", "a.txt"], 0, 2) == ["a.txt"]
    with alone() as ddp:
        assert len(ddp.loader(DATA, batch_size=8)) == 5


@row("`ElasticCoordinator`, elastic shards")
def _(folder: Path) -> None:
    with pytest.raises(ConfigError, match="give as many as there may be workers, 2"):
        short(devices=["cpu"] * 3).elastic(1, 2).run()


@row("`DistributedCheckpointCoordinator`, `hash_weights`")
def _(folder: Path) -> None:
    with alone() as ddp:
        train(ddp)
        ddp.save(folder)
    (step,) = folder.glob("step-*")
    assert hashlib.sha256((step / "model.safetensors").read_bytes()).hexdigest() in json.dumps(
        json.loads((step / "manifest.json").read_text())
    )
    (step / "model.safetensors").write_bytes(b"damaged")
    with alone() as ddp, pytest.raises(CheckpointError, match="no complete checkpoint"):
        ddp.load(folder)
