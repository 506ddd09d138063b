"""An accelerator that is neither CUDA's nor torch's own (``helpers/pretend.py``), beside the CPU.

It stays for the life of a process, and `auto` would take it in other tests: so each test runs in a
forked process, in which ranks are threads.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evener import Ddp, DdpConfig
from evener.comm.base import Communicator
from evener.team.environment import DistributedTrainConfig
from helpers import pretend
from helpers.language import relative_error, vector
from helpers.launched import QUICK, SRC
from helpers.limits import PATIENCE_S
from helpers.lineage import check_exactly_once
from helpers.models import mlp
from helpers.pretraining import NUM_SAMPLES, Lab
from helpers.ranks import Rank, run_ranks
from helpers.teams import run_team

TESTS = Path(__file__).resolve().parents[1]
HERE = f"{pretend.NAME}:0"
#: The same operators, but some that torch fuses on the CPU are taken apart elsewhere.
TOLERANCE = 1e-5


def be_there(rank: Rank, check: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    pretend.register()
    check(*arguments)


def run_there(check: Callable[..., None], *arguments: Any) -> None:
    run_ranks(be_there, 1, check, arguments)


def set_up(model: nn.Module, devices: Any, comm: Communicator | None = None, **options: Any) -> Ddp:
    policy = options.pop("policy", "sync")
    return Ddp.setup(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2, **options.pop("adamw", {})),
        policy=policy,
        devices=devices,
        environment=DistributedTrainConfig(),
        communicator=comm,
        config=DdpConfig(quiet=True, timeout_s=PATIENCE_S, **options),
    )


def data(number: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    xs = torch.randn(number, 8, generator=generator)
    ys = torch.randint(4, (number,), generator=generator)
    return list(zip(xs, ys, strict=True))


class Normalised(nn.Module):
    """A model with buffers: float statistics and an integer counter."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.layers = mlp(seed=seed)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layers(x))


def train(comm: Communicator, devices: str, model: nn.Module, **options: Any) -> dict[str, Any]:
    ddp = set_up(model, devices, comm, **options)
    loader = ddp.loader(data(48), batch_size=12, seed=5, micro_batch_size=4)
    with ddp:
        for epoch in range(2):
            for x, y in loader.epoch(epoch):
                ddp.backward(F.cross_entropy(model(x.to(ddp.device)), y.to(ddp.device)))
                ddp.step()
    return {"device": str(ddp.device), **{k: v.cpu() for k, v in model.state_dict().items()}}


def check_beside_the_cpu(policy: str) -> None:
    whole = {"max_grad_norm": 1.0} if policy == "sync" else {}

    def body(comm: Communicator) -> dict[str, Any]:
        devices = ("auto", "cpu")[comm.rank]
        return train(comm, devices, Normalised(comm.rank), policy=policy, verify_every=1, **whole)

    first, second = run_team(2, body)
    assert (first.pop("device"), second.pop("device")) == (HERE, "cpu")
    for name, value in first.items():
        assert torch.allclose(value.float(), second[name].float(), rtol=1e-6, atol=1e-7), name
    assert first["norm.num_batches_tracked"].item() > 0


@pytest.mark.parametrize("policy", ["sync", "cadence", "async"])
def test_a_loop_runs_there_beside_a_rank_on_the_cpu(policy: str) -> None:
    run_there(check_beside_the_cpu, policy)


def check_one_process() -> None:
    (true,) = run_team(1, lambda comm: train(comm, "cpu", mlp(seed=0)))
    for mine in run_team(2, lambda comm: train(comm, "accelerator", mlp(seed=comm.rank))):
        assert mine.pop("device") == HERE
        for name, value in mine.items():
            assert relative_error(value, true[name]) <= TOLERANCE, name


def test_sync_gives_what_one_process_on_the_cpu_gives() -> None:
    run_there(check_one_process)


def check_gather() -> None:
    held_out = [(torch.tensor(i), torch.full((3,), i % 2 == 0)) for i in range(10)]

    def body(comm: Communicator) -> None:
        with set_up(mlp(seed=0), ("auto", "cpu")[comm.rank], comm) as ddp:
            batches = ddp.eval_loader(held_out, batch_size=3)
            parts = [ddp.gather([t.to(ddp.device) for t in batch]) for batch in batches]
            numbers, flags = (torch.cat(rows) for rows in zip(*parts, strict=True))
            assert numbers.device.type == flags.device.type == ddp.device.type
            assert numbers.cpu().tolist() == list(range(10))
            assert torch.equal(flags.cpu(), torch.stack([flag for _, flag in held_out]))

    run_team(2, body)


def test_rows_are_gathered_there_beside_a_rank_on_the_cpu() -> None:
    run_there(check_gather)


def check_norms() -> None:
    def body(comm: Communicator) -> float:
        model = nn.Linear(2, 1, bias=False)
        ddp = set_up(model, "auto", comm, max_grad_norm=1.0)
        norms: list[float] = []
        ddp.on_commit(lambda result: norms.append(result.grad_norm))
        loader = ddp.loader([torch.full((2,), 1e25)] * 4, batch_size=4, seed=0)
        with ddp:
            for batch in loader.epoch(0):
                ddp.backward(model(batch.to(ddp.device)).mean())
                ddp.step()
        return norms[-1]

    for norm in run_team(2, body):
        assert norm == pytest.approx(2**0.5 * 1e25, rel=1e-5)


def test_sums_that_overflow_float32_are_formed_where_float64_is() -> None:
    run_there(check_norms)


def check_by_hand() -> None:
    models = [mlp(seed=0), mlp(seed=0)]
    with Ddp.wrap(models, devices=[0, "cpu"], quiet=True) as wrapped:
        for number, model in enumerate(models):
            (x, y), *_ = data(1)
            where = next(model.parameters()).device
            loss = F.cross_entropy(model(x[None].to(where)), y[None].to(where))
            (loss * (number + 1)).backward()
        wrapped.all_reduce_gradients()
    for mine, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.allclose(mine.grad.cpu(), other.grad, rtol=1e-6)


def test_replicas_of_one_process_average_by_hand_there() -> None:
    run_there(check_by_hand)


def check_waits() -> None:
    from evener.devices import OtherAccelerator
    from helpers.queued import give_milestones

    def trained(device: str) -> Tensor:
        model = mlp(8, 16, 4)
        options = {"max_grad_norm": 0.5, "adamw": {"fused": True}}
        with set_up(model.to(device), [device], **options) as ddp:
            loader = ddp.loader(data(32), batch_size=4, micro_batch_size=2)
            for number, (x, _) in enumerate(loader.epoch(0)):
                batch = x.to(device)
                pretend.waits.clear()
                pretend.operators.clear()
                ddp.backward(model(batch).square().mean())
                ddp.step()
                assert pretend.waits == [], number
                assert pretend.operators["aten::_local_scalar_dense"] == 0
        return vector(model.cpu())

    with pytest.MonkeyPatch.context() as patch:
        give_milestones(patch, OtherAccelerator)
        assert relative_error(trained(HERE), trained("cpu")) <= TOLERANCE


def test_a_step_of_one_rank_waits_for_nothing() -> None:
    run_there(check_waits)


@pytest.mark.long
def test_the_command_line_takes_it_beside_the_cpu(tmp_path: Path) -> None:
    pretend.install(tmp_path / "site")
    (tmp_path / "lab").mkdir()
    lab = Lab(tmp_path / "lab")
    path = (SRC, QUICK, TESTS, tmp_path / "site")
    lab.sandbox.environ["PYTHONPATH"] = os.pathsep.join(map(str, path))
    try:
        # Measured, it may turn out too slow for any share.
        options = ("--set", "epochs=1", "--set", "speed_hint=[1, 1]")
        ended = lab.command("run.yaml", "--nproc", "2", *options).end()
        assert ended.code == 0, ended.err
        ranks = lab.path_of().summary["ranks"]
        assert [rank["device"].partition(" ")[0] for rank in ranks] == [HERE, "cpu"]
        assert all(rank["samples"] > 0 for rank in ranks)
        assert check_exactly_once(lab.path_of().events, NUM_SAMPLES) == []
    finally:
        lab.close()


def cached_batches() -> None:
    ddp = set_up(mlp(seed=1), HERE)
    fetched: list[int] = []

    class Counted(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            fetched.append(index)
            return super().__getitem__(index)

    samples = data(48)
    loader = ddp.loader(Counted(samples), batch_size=12, seed=5, cache="device")
    with ddp:
        for epoch in range(2):
            found = []
            for x, y in loader.epoch(epoch):
                assert x.device == y.device == torch.device(HERE)
                found += x.cpu().tolist()
                ddp.backward(F.cross_entropy(ddp.assembly.model(x), y))
                ddp.step()
            assert sorted(found) == sorted(x.tolist() for x, _ in samples)
        assert len(fetched) == 48 + 32, "each once, and the first ones once more"


def test_a_cache_on_the_device_hands_out_tensors_that_are_there() -> None:
    run_there(cached_batches)
