"""Training on an accelerator of a kind of its own, with the result of the CPU.

``test_accelerator.py`` runs these in a process of their own, where the accelerator is registered.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evener import (
    ClassifyPipeline,
    DataParallelCoordinator,
    Ddp,
    DdpConfig,
    DistributedComm,
    DistributedTrainConfig,
    DistributedTrainer,
    ReplicasDifferError,
    TransformerTrainer,
)
from evener.comm.base import Communicator
from evener.devices import OtherAccelerator
from helpers import pretend
from helpers.classification import TINY_LLAMA, config, samples
from helpers.language import llama, lm_batch, relative_error, train_plainly, union, vector
from helpers.limits import PATIENCE_S
from helpers.models import mlp
from helpers.queued import give_milestones
from helpers.teams import run_team

pretend.register()

HERE = torch.device(pretend.NAME, 0)
#: The same operators, but some that torch fuses on the CPU are taken apart elsewhere.
TOLERANCE = 1e-5


def test_the_accelerator_is_one_of_its_own_kind() -> None:
    there = torch.ones(3, device=HERE)
    pretend.operators.clear()
    assert (there + there).sum().item() == 6.0
    assert pretend.operators["aten::add"] == 1
    with pytest.raises(RuntimeError, match="same device"):
        there + torch.ones(3)
    for widen in (Tensor.double, lambda t: t.to("cpu", torch.float64)):
        with pytest.raises(TypeError, match="no float64"):
            widen(there)


# ── the trainer ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("backends", [("accelerator", "accelerator"), ("accelerator", "cpu")])
def test_a_distributed_trainer_computes_there(backends: tuple[str, str]) -> None:
    steps = [[lm_batch(10 * s + r, 1 + (s + r) % 3) for r in range(2)] for s in range(3)]
    true = vector(train_plainly(llama(), [union(batches) for batches in steps], lr=1e-3))
    ends = DistributedComm.local(2, timeout_s=PATIENCE_S)
    pretend.seeds.clear()

    def body(comm: Communicator) -> tuple[torch.device, Tensor]:
        rank = comm.rank
        # Two threads share the one device, where processes would each have their own.
        place = DistributedTrainConfig.of_rank(rank, 2, local_rank=0, backend=backends[rank])
        trainer = TransformerTrainer(llama(seed=rank), {"lr": 1e-3})
        options = DdpConfig(quiet=True, timeout_s=PATIENCE_S)
        with DistributedTrainer(trainer, ends[rank], place, options=options) as distributed:
            for batches in steps:
                assert distributed.train_batch(batches[rank]) > 0
        where = next(trainer.model.parameters()).device
        trainer.model.cpu()
        return where, vector(trainer.model)

    results = run_team(2, body)
    expected = [HERE if b == "accelerator" else torch.device("cpu") for b in backends]
    assert [where for where, _ in results] == expected
    for _, mine in results:
        assert relative_error(mine, true) <= TOLERANCE
    assert torch.equal(results[0][1], results[1][1])
    assert len(set(pretend.seeds)) == 3 * backends.count("accelerator")


# ── a user's loop ────────────────────────────────────────────────────────────────────────────────


class Normalised(nn.Module):
    """A model with buffers: float statistics and an integer counter."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.layers = mlp(seed=seed)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layers(x))


def data(number: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    xs = torch.randn(number, 8, generator=generator)
    ys = torch.randint(4, (number,), generator=generator)
    return list(zip(xs, ys, strict=True))


def train(
    comm: Communicator, devices: str, policy: str, make: Callable[[int], nn.Module], **options: Any
) -> dict[str, Any]:
    model = make(comm.rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ddp = Ddp.setup(
        model,
        optimizer,
        policy=policy,
        devices=devices,
        environment=DistributedTrainConfig(),
        communicator=comm,
        config=DdpConfig(quiet=True, timeout_s=PATIENCE_S, **options),
    )
    loader = ddp.loader(data(48), batch_size=12, seed=5, micro_batch_size=4)
    with ddp:
        for epoch in range(2):
            for x, y in loader.epoch(epoch):
                loss = F.cross_entropy(model(x.to(ddp.device)), y.to(ddp.device))
                ddp.backward(loss)
                ddp.step()
    where = ddp.device
    return {"device": where, **{k: v.cpu() for k, v in model.state_dict().items()}}


@pytest.mark.parametrize("policy", ["sync", "cadence", "async"])
def test_a_loop_runs_there_beside_a_rank_on_the_cpu(policy: str) -> None:
    whole = {"max_grad_norm": 1.0, "verify_every": 1} if policy == "sync" else {"verify_every": 1}

    def body(comm: Communicator) -> dict[str, Any]:
        return train(comm, ("auto", "cpu")[comm.rank], policy, Normalised, **whole)

    first, second = run_team(2, body)
    assert first.pop("device") == HERE
    assert second.pop("device") == torch.device("cpu")
    for name, value in first.items():
        assert torch.allclose(value.float(), second[name].float(), rtol=1e-6, atol=1e-7), name
        assert torch.isfinite(value.float()).all()
    assert first["norm.num_batches_tracked"].item() > 0


def test_rows_are_gathered_there_beside_a_rank_on_the_cpu() -> None:
    held_out = [(torch.tensor(i), torch.full((3,), i % 2 == 0)) for i in range(10)]

    def body(comm: Communicator) -> None:
        model = mlp(seed=0)
        ddp = Ddp.setup(
            model,
            torch.optim.SGD(model.parameters(), lr=1e-2),
            devices=("auto", "cpu")[comm.rank],
            environment=DistributedTrainConfig(),
            communicator=comm,
            config=DdpConfig(quiet=True, timeout_s=PATIENCE_S),
        )
        with ddp:
            for batch_size in (1, 3):
                loops = ddp.eval_loader(held_out, batch_size=batch_size)
                parts = [ddp.gather([t.to(ddp.device) for t in batch]) for batch in loops]
                numbers, flags = (torch.cat(rows) for rows in zip(*parts, strict=True))
                assert numbers.device.type == flags.device.type == ddp.device.type
                assert numbers.cpu().tolist() == list(range(10))
                assert torch.equal(flags.cpu(), torch.stack([flag for _, flag in held_out]))

    run_team(2, body)


def test_sync_gives_what_one_process_on_the_cpu_gives() -> None:
    def body(devices: str) -> Callable[[Communicator], dict[str, Any]]:
        return lambda comm: train(comm, devices, "sync", lambda seed: mlp(seed=seed))

    (true,) = run_team(1, body("cpu"))
    found = run_team(2, body("accelerator"))
    for mine in found:
        for name, value in true.items():
            if name != "device":
                assert relative_error(mine[name], value) <= TOLERANCE, name


def test_sums_that_overflow_float32_are_formed_where_float64_is() -> None:
    def body(comm: Communicator) -> float:
        model = nn.Linear(2, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        ddp = Ddp.setup(
            model,
            optimizer,
            devices="auto",
            environment=DistributedTrainConfig(),
            communicator=comm,
            config=DdpConfig(quiet=True, max_grad_norm=1.0, timeout_s=PATIENCE_S),
        )
        norms = []
        ddp.on_commit(lambda result: norms.append(result.grad_norm))
        loader = ddp.loader([torch.full((2,), 1e25)] * 4, batch_size=4, seed=0)
        with ddp:
            for batch in loader.epoch(0):
                ddp.backward(model(batch.to(ddp.device)).mean())
                ddp.step()
        return norms[-1]

    for norm in run_team(2, body):
        assert norm == pytest.approx(2**0.5 * 1e25, rel=1e-5)


def test_another_value_on_one_rank_is_found_there_too() -> None:
    def body(comm: Communicator) -> BaseException | None:
        model = mlp(seed=0)
        ddp = Ddp.setup(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            devices="accelerator",
            environment=DistributedTrainConfig(),
            communicator=comm,
            # Rank 0 has to have a share, however fast it turns out to be.
            config=DdpConfig(
                quiet=True, verify_every=1, partition_ratios=(1, 1), timeout_s=PATIENCE_S
            ),
        )
        loader = ddp.loader(data(24), batch_size=12, seed=5)
        try:
            with ddp:
                for x, y in loader.epoch(0):
                    loss = F.cross_entropy(model(x.to(ddp.device)), y.to(ddp.device))
                    ddp.backward(loss)
                    if comm.rank == 0:
                        with torch.no_grad():
                            model[2].bias[1].add_(1e-3)
                    ddp.step()
        except ReplicasDifferError as error:
            return error
        return None

    for error in run_team(2, body):
        assert isinstance(error, ReplicasDifferError)
        assert error.parameter == "2.bias"


def test_a_checkpoint_from_there_is_loaded_on_the_cpu(tmp_path: Path) -> None:
    def setup(devices: str) -> tuple[nn.Module, Ddp]:
        model = mlp(seed=1)
        ddp = Ddp.setup(
            model,
            torch.optim.AdamW(model.parameters(), lr=1e-2),
            devices=devices,
            environment=DistributedTrainConfig(),
            config=DdpConfig(quiet=True),
        )
        return model, ddp

    def epoch(model: nn.Module, ddp: Ddp, number: int) -> None:
        for x, y in loader.epoch(number):
            ddp.backward(F.cross_entropy(model(x.to(ddp.device)), y.to(ddp.device)))
            ddp.step()

    model, ddp = setup("accelerator")
    with ddp:
        loader = ddp.loader(data(24), batch_size=12, seed=5)
        epoch(model, ddp, 0)
        ddp.save(tmp_path / "there")
        epoch(model, ddp, 1)
    other, ddp = setup("cpu")
    with ddp:
        loader = ddp.loader(data(24), batch_size=12, seed=5)
        ddp.load(tmp_path / "there")
        epoch(other, ddp, 1)
    for mine, value in zip(model.parameters(), other.parameters(), strict=True):
        assert relative_error(mine.detach().cpu(), value.detach()) <= TOLERANCE


def test_replicas_of_one_process_average_by_hand_there() -> None:
    models = [mlp(seed=0), mlp(seed=0)]
    wrapped = Ddp.wrap(models, devices=[0, "cpu"], quiet=True)
    with wrapped:
        for number, model in enumerate(models):
            x, y = next(iter(data(1)))
            where = next(model.parameters()).device
            loss = F.cross_entropy(model(x[None].to(where)), y[None].to(where))
            (loss * (number + 1)).backward()
        wrapped.all_reduce_gradients()
    for mine, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert mine.grad is not None
        assert other.grad is not None
        assert torch.allclose(mine.grad.cpu(), other.grad, rtol=1e-6)


@pytest.mark.parametrize("micro_batch_size", [2, 4])
def test_a_step_of_one_rank_waits_for_nothing(
    monkeypatch: pytest.MonkeyPatch, micro_batch_size: int
) -> None:
    give_milestones(monkeypatch, OtherAccelerator)
    data = [(torch.randn(8, generator=torch.Generator().manual_seed(n)), n) for n in range(32)]

    def trained(device: str) -> Tensor:
        model = mlp(8, 16, 4)
        optimizer = torch.optim.AdamW(model.to(device).parameters(), lr=1e-2, fused=True)
        options = DdpConfig(quiet=True, max_grad_norm=0.5)
        ddp = Ddp.setup(model, optimizer, devices=[device], config=options)
        with ddp:
            loader = ddp.loader(data, batch_size=4, micro_batch_size=micro_batch_size)
            for number, (x, _) in enumerate(loader.epoch(0)):
                batch = x.to(device)
                pretend.waits.clear()
                pretend.operators.clear()
                ddp.backward(model(batch).square().mean())
                ddp.step()
                assert pretend.waits == [], number
                assert pretend.operators["aten::_local_scalar_dense"] == 0
        return vector(model.cpu())

    assert relative_error(trained("pretend:0"), trained("cpu")) <= TOLERANCE


# ── classification ───────────────────────────────────────────────────────────────────────────────


def test_a_coordinator_shares_out_to_it(tmp_path: Path) -> None:
    def trained(devices: list[str]) -> tuple[list[float], Tensor]:
        with DataParallelCoordinator(TINY_LLAMA, config(), devices) as coordinator:
            losses = [
                coordinator.train_batch_parallel(samples(7, first=7 * step)).avg_loss
                for step in range(4)
            ]
            folder = tmp_path / "-".join(devices).replace(":", "")
            coordinator.save(folder)
            known = ClassifyPipeline.load(folder)
            texts = [sample.text for sample in samples(9, seed=1)]
            assert [p.label for p in known.predict(texts)] == [
                p.label for p in coordinator.predict(texts)
            ]
            assert coordinator.evaluate(samples(9, seed=1)).total == 9
            network = coordinator.primary_pipeline.model.cpu()
            learnt = [p.detach().flatten() for p in network.parameters() if p.requires_grad]
            return losses, torch.cat(learnt)

    losses, weights = trained(["cpu"])
    alone_losses, alone_weights = trained(["pretend:0"])
    assert alone_losses == pytest.approx(losses, rel=TOLERANCE)
    assert relative_error(alone_weights, weights) <= TOLERANCE
    there_losses, there_weights = trained(["pretend:0", "cpu"])
    assert there_losses == pytest.approx(losses, rel=TOLERANCE)
    assert relative_error(there_weights, weights) <= TOLERANCE
