"""Replicas averaged by hand: in one process, and in teams of threads that stand for processes."""

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evener import (
    CollectiveMismatchError,
    ConfigError,
    Ddp,
    DistributedTrainConfig,
    NonFiniteGradientError,
    Replicas,
)
from evener.comm.base import Communicator
from evener.manual import place as put
from helpers.models import cnn, mlp, regression_data
from helpers.teams import run_team

Make = Callable[[int], nn.Module]


def wrap(models: Sequence[nn.Module], comm: Communicator | None = None, **options: Any) -> Replicas:
    return Ddp.wrap(
        models,
        "cpu",
        quiet=True,
        environment=DistributedTrainConfig(),
        communicator=comm,
        **options,
    )


def spread(
    layout: Sequence[int],
    make: Make,
    body: Callable[[Replicas, list[nn.Module]], Any],
    **options: Any,
) -> list[Any]:
    """Runs ``body`` with ``layout[p]`` replicas in process p; ``make`` is given their number."""

    made = [make(number) for number in range(sum(layout))]  # threads would share one seed

    def process(comm: Communicator) -> Any:
        first = sum(layout[: comm.rank])
        models = made[first : first + layout[comm.rank]]
        with wrap(models, comm, **options) as replicas:
            return body(replicas, models)

    return run_team(len(layout), process)


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def mean_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(x), y)


LAYOUTS = [(1,), (3,), (1, 1), (2, 1), (1, 2, 2)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_weighted_gradients_are_those_of_one_process(layout):
    total = sum(layout)
    counts = [5, 2, 9, 1, 4][:total]
    x, y = regression_data(sum(counts))
    reference = mlp(dtype=torch.float64)
    mean_loss(reference, x.double(), y.double()).backward()

    def body(replicas: Replicas, models: list[nn.Module]) -> Any:
        own = counts[replicas.first : replicas.first + len(models)]
        for number, model in enumerate(models):
            start = sum(counts[: replicas.first + number])
            part = slice(start, start + own[number])
            mean_loss(model, x[part], y[part]).backward()
        replicas.weighted_all_reduce_gradients(own)
        assert replicas.world_size == total
        assert replicas.devices == (torch.device("cpu"),) * len(models)
        return [gradients(m) for m in models]

    found = [g for process in spread(layout, lambda _: mlp(), body) for g in process]
    for each in found:
        for mine, first, true in zip(each, found[0], gradients(reference), strict=True):
            assert torch.equal(mine, first)
            assert torch.linalg.vector_norm(mine - true) <= 1e-6 * torch.linalg.vector_norm(true)


@pytest.mark.parametrize("layout", [(2,), (1, 2)], ids=str)
def test_parameters_and_buffers_are_copied_from_replica_0_only_when_told(layout):
    def make(number: int) -> nn.Module:
        model = cnn(seed=number)
        model[1].running_mean.fill_(number)
        model[4].weight.requires_grad_(False)
        model.register_buffer("mask", torch.tensor([True, False, bool(number)]))
        return model

    def body(replicas: Replicas, models: list[nn.Module]) -> Any:
        states = []
        for action in (lambda: None, replicas.sync_buffers, replicas.sync_params):
            action()
            states.append([copy.deepcopy(m.state_dict()) for m in models])
            for model in models:
                model[1].running_mean.add_(replicas.rank)
        return states

    processes = spread(layout, make, body)
    truth = make(0).state_dict()
    parameters = {n for n, _ in make(0).named_parameters()}
    number = 0
    for before, with_buffers, with_params in processes:
        for a, b, c in zip(before, with_buffers, with_params, strict=True):
            own = make(number).state_dict()
            for name in truth:
                assert torch.equal(a[name], own[name])
                assert torch.equal(b[name], own[name] if name in parameters else truth[name])
                assert torch.equal(c[name], truth[name])
            number += 1


def test_without_a_gradient_a_replica_counts_as_zero_with_its_weight():
    def make(number: int) -> nn.Module:
        return nn.ModuleDict({"a": nn.Linear(2, 1, bias=False), "b": nn.Linear(2, 1, bias=False)})

    def body(replicas: Replicas, models: list[nn.Module]) -> Any:
        for i, model in enumerate(models):
            if replicas.first + i == 1:
                model["a"].weight.grad = torch.tensor([[4.0, 8.0]])
        replicas.weighted_all_reduce_gradients(
            [[3], [1]][replicas.first] if len(models) == 1 else [3, 1]
        )
        return [(m["a"].weight.grad, m["b"].weight.grad) for m in models]

    for layout in [(2,), (1, 1)]:
        for process in spread(layout, make, body):
            for a, b in process:
                assert a.tolist() == [[1.0, 2.0]]
                assert b is None


def test_frozen_parameters_and_their_gradients_are_left_alone():
    def make(number: int) -> nn.Module:
        model = nn.Linear(1, 1)
        model.weight.grad = torch.full((1, 1), float(number))
        model.weight.requires_grad_(False)
        model.bias.grad = torch.full((1,), float(number))
        return model

    def body(replicas: Replicas, models: list[nn.Module]) -> Any:
        replicas.all_reduce_gradients()
        return [(m.weight.grad.item(), m.bias.grad.item()) for m in models]

    assert spread((1, 2), make, body) == [[(0.0, 1.0)], [(1.0, 1.0), (2.0, 1.0)]]


class Tied(nn.Module):
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(4, 2)
        self.head = nn.Linear(2, 4, bias=False)
        if tied:
            self.head.weight = self.words.weight


def test_tied_weights_are_averaged_once():
    def body(replicas: Replicas, models: list[nn.Module]) -> Any:
        replicas.sync_params()
        for i, model in enumerate(models):
            model.words.weight.grad = torch.full((4, 2), float(replicas.first + i))
        replicas.all_reduce_gradients()
        assert all(m.head.weight is m.words.weight for m in models)
        return [m.head.weight.grad[0, 0].item() for m in models]

    assert spread((1, 2), lambda _: Tied(tied=True), body) == [[1.0], [1.0, 1.0]]


def test_models_may_grow_and_shrink_between_calls():
    def body(replicas: Replicas, models: list[nn.Module]) -> Any:
        seen = []
        for width in (2, 5, 3, 2):
            for i, model in enumerate(models):
                model.add_module("top", nn.Linear(2, width))
                model.top.weight.data.fill_(replicas.first + i + width)
                model(torch.ones(1, 2)).sum().mul(replicas.first + i).backward()
            replicas.sync_params()
            replicas.all_reduce_gradients()
            seen.append([(m.top.weight[0, 0].item(), m.top.bias.grad.tolist()) for m in models])
        return seen

    def make(number: int) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 2))

    expected = [(float(width), [1.0] * width) for width in (2, 5, 3, 2)]
    for process, size in zip(spread((1, 2), make, body), (1, 2), strict=True):
        assert process == [[one] * size for one in expected]


def test_a_model_that_grows_on_one_process_alone_is_refused_everywhere_and_nothing_changes():
    def body(replicas: Replicas, models: list[nn.Module]) -> Any:
        for model in models:
            model[0].bias.grad = torch.full((2,), float(replicas.rank))
        if replicas.rank == 1:
            models[0].append(nn.Linear(2, 3))
        with pytest.raises(CollectiveMismatchError) as caught:
            replicas.all_reduce_gradients()
        assert models[0][0].bias.grad.tolist() == [replicas.rank] * 2
        return caught.value

    for rank, error in enumerate(spread((1, 1), lambda _: nn.Sequential(nn.Linear(2, 2)), body)):
        sizes = (2, 4) if rank == 0 else (4, 2)
        assert f"rank {rank} in 'all_reduce_gradients(), layout " in str(error)
        assert all(f" of {size} tensors'" in str(error) for size in sizes)
        (note,) = error.__notes__
        assert "must have the same tensors, the same ones frozen" in note
        assert "'0.bias': '[2] float32'" in note


def test_frozen_on_one_replica_only_is_refused():
    def make(number: int) -> nn.Module:
        model = nn.Linear(1, 1)
        model.bias.requires_grad_(number != 1)
        return model

    def body(replicas: Replicas, models: list[nn.Module]) -> None:
        replicas.sync_params()  # does not ask who is frozen
        error = CollectiveMismatchError if replicas.world_size > len(models) else ConfigError
        with pytest.raises(error, match=r"differ in bias" if len(models) > 1 else "layout"):
            replicas.all_reduce_gradients()

    for layout in [(2,), (1, 1)]:
        spread(layout, make, body)


@pytest.mark.parametrize("layout", [(2,), (1, 1)], ids=str)
@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda: nn.Sequential(nn.Linear(2, 3)), "0.bias: '[3] float32' instead of '[2] float32'"),
        (
            lambda: nn.Sequential(nn.Linear(2, 2)).double(),
            "0.bias: '[2] float64' instead of '[2] float32'",
        ),
        (
            lambda: nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False)),
            "1.num_batches_tracked: '[] int64' instead of None",
        ),
    ],
)
def test_other_architectures_are_refused_by_the_first_difference(layout, other, words):
    def process(comm: Communicator) -> str:
        makers = [lambda: nn.Sequential(nn.Linear(2, 2)), other]
        mine = makers if comm.world_size == 1 else [makers[comm.rank]]
        with pytest.raises(ConfigError) as caught:
            wrap([make() for make in mine], comm)
        return str(caught.value)

    messages = run_team(len(layout), process)
    assert len(set(messages)) == 1
    assert f"replica 1 and replica 0 differ in {words}" in messages[0]


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        (
            [1, 2, 3],
            r"batch_counts is \[1, 2, 3\]; give a list with a number for each of the 2",
        ),
        ([0, 0], "batch_counts are 0 on all 2 replicas"),
        ([-1, 2], r"batch_counts is \[-1, 2\]; give finite numbers of 0 or more"),
        ([math.nan, 2], r"batch_counts is \[nan, 2\]"),
        (["1 sample", 1], r"batch_counts is \['1 sample', 1\]; give a list"),
    ],
)
def test_bad_counts_are_refused_and_the_next_call_works(counts, words):
    models = [nn.Linear(1, 1) for _ in range(2)]
    for number, model in enumerate(models):
        model.bias.grad = torch.tensor([2.0 + number])
    with wrap(models) as replicas:
        with pytest.raises(ConfigError, match=words):
            replicas.weighted_all_reduce_gradients(counts)
        assert [model.bias.grad.item() for model in models] == [2, 3]
        replicas.weighted_all_reduce_gradients([1, 1])
        assert [model.bias.grad.item() for model in models] == [2.5, 2.5]


def test_non_finite_gradients_are_refused_by_name_or_let_through():
    def body(replicas: Replicas, models: list[nn.Module]) -> Any:
        for i, model in enumerate(models):
            bad = replicas.first + i == 2
            model.weight.grad = torch.full((1, 1), math.inf if bad else 1.0)
            model.bias.grad = torch.ones(1)
        before = [gradients(m) for m in models]
        if replicas._non_finite == "raise":
            with pytest.raises(
                NonFiniteGradientError, match=r"'weight' on replica 2 \(rank 1\)"
            ) as e:
                replicas.all_reduce_gradients()
            assert (e.value.rank, e.value.parameter, e.value.window) == (1, "weight", 0)
            assert before == [gradients(m) for m in models]
        else:
            replicas.all_reduce_gradients()
            assert all(math.isinf(m.weight.grad.item()) for m in models)
            assert all(m.bias.grad.item() == 1 for m in models)

    spread((1, 2), lambda _: nn.Linear(1, 1), body)
    spread((1, 2), lambda _: nn.Linear(1, 1), body, non_finite="propagate")


def test_sparse_and_outgrown_gradients_are_refused():
    table = nn.Embedding(4, 2, sparse=True)
    with wrap([table]) as replicas:
        table(torch.tensor([1])).sum().backward()
        with pytest.raises(ConfigError, match=r"'weight' on replica 0 is .*sparse_coo.*sparse=Fal"):
            replicas.all_reduce_gradients()
        table.weight.grad = torch.ones(4, 2)
        table.weight.data = torch.zeros(6, 2)
        with pytest.raises(ConfigError, match=r"is \[4, 2\], .* its parameter \[6, 2\].*zero_grad"):
            replicas.all_reduce_gradients()


def test_numbers_are_averaged_over_replicas():
    def body(replicas: Replicas, models: list[nn.Module]) -> Any:
        values = [float(replicas.first + i) for i in range(len(models))]
        weighted = replicas.weighted_mean(
            [math.nan, *values[1:]] if replicas.rank == 0 else values,
            [0.0, *values[1:]] if replicas.rank == 0 else values,
        )
        with pytest.raises(ConfigError, match=r"values is .*; give a list"):
            replicas.weighted_mean([1.0] * 7)
        with pytest.raises(ConfigError, match="weights are 0 on all 3 replicas"):
            replicas.weighted_mean(values, [0.0] * len(values))
        return replicas.weighted_mean(values), weighted

    assert spread((2, 1), lambda _: nn.Linear(1, 1), body) == [(1.0, 5 / 3)] * 2


def test_what_cannot_be_replicas_is_refused():
    model = nn.Linear(1, 1)
    with pytest.raises(ConfigError, match="models is empty"):
        wrap([])
    with pytest.raises(ConfigError, match="model 0 is a str"):
        wrap(["model"])
    with pytest.raises(ConfigError, match=r"models 0 and 1 share the parameter 'weight'.*deepcopy"):
        wrap([model, model])
    with pytest.raises(NotImplementedError, match="to_empty"):
        wrap([nn.Linear(1, 1, device="meta")])
    with pytest.raises(ConfigError, match="non_finite is 'skip'"):
        wrap([model], non_finite="skip")
    with pytest.raises(ConfigError, match=r"1 models, but 2 devices"):
        Ddp.wrap([model], ["cpu", "cpu"], environment=DistributedTrainConfig())
    with pytest.raises(
        ConfigError, match=r"devices is \['gpu'\], but torch finds .* one of 'auto'"
    ):
        Ddp.wrap([model], "gpu", environment=DistributedTrainConfig())
    with pytest.raises(ConfigError, match=r"devices is \['cuda:99'\], but torch finds"):
        Ddp.wrap([model], ["cuda:99"], environment=DistributedTrainConfig())


def devices_of(num_models: int, local_rank: int, **place: Any) -> list[str]:
    environment = DistributedTrainConfig(
        world_size=2,
        rank=local_rank,
        local_rank=local_rank,
        role="worker" if local_rank else "coordinator",
        local_world_size=2,
        **place,
    )
    return [str(d) for d in put([nn.Linear(1, 1)] * num_models, "auto", environment)]


def test_auto_gives_processes_gpus_in_turn(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert devices_of(1, 0) == ["cuda:0"]
    assert devices_of(2, 0) == ["cuda:0", "cuda:1"]
    assert devices_of(2, 1) == ["cuda:2", "cpu"]
    assert devices_of(2, 1, backend="cpu") == ["cpu", "cpu"]
    alone, models = DistributedTrainConfig(), [nn.Linear(1, 1)] * 2
    named = {"cuda": ("cuda:0", "cuda:1"), torch.device("cuda:1"): ("cuda:1", "cuda:1")}
    for devices, found in {**named, (2, "cpu"): ("cuda:2", "cpu")}.items():
        assert tuple(map(str, put(models, devices, alone))) == found
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert devices_of(1, 1) == ["cpu"]
    assert devices_of(1, 1, launched_by="slurm") == ["cuda:0"]  # bound to a GPU of its own


def test_several_networks_share_one_connection_and_close_it_with_the_last(capsys):
    generator, critic = nn.Linear(2, 2), nn.Linear(2, 1)
    place = DistributedTrainConfig()
    one = Ddp.wrap(generator, environment=place)
    two = Ddp.wrap([critic], ["cpu"], environment=place)
    assert one._comm is two._comm
    with pytest.raises(ConfigError, match="backend is 'gloo', but replicas wrapped before use 'au"):
        Ddp.wrap(nn.Linear(1, 1), backend="gloo", environment=place)
    one.close()
    one.close()
    two.sync_params()
    two.close()
    assert Ddp.wrap(generator, environment=place, quiet=True)._comm is not two._comm
    assert capsys.readouterr().err.count("replicas of a model: 1 CPU rank | ") == 2


@pytest.mark.gpu
def test_a_gpu_and_the_cpu_average_in_one_process():
    x, y = regression_data(12)
    alone = mlp()
    mean_loss(alone, x, y).backward()
    with Ddp.wrap(
        [mlp(), mlp(seed=1)], ["cuda:0", "cpu"], quiet=True, environment=DistributedTrainConfig()
    ) as replicas:
        replicas.sync_params()
        for model, device, part in zip(
            replicas.models, replicas.devices, (slice(0, 9), slice(9, 12)), strict=True
        ):
            mean_loss(model, x[part].to(device), y[part].to(device)).backward()
        replicas.weighted_all_reduce_gradients([9, 3])
        for model, device in zip(replicas.models, replicas.devices, strict=True):
            for mine, true in zip(model.parameters(), alone.parameters(), strict=True):
                assert mine.grad.device == device
                error = torch.linalg.vector_norm(mine.grad.cpu() - true.grad)
                assert error <= 1e-5 * torch.linalg.vector_norm(true.grad)
