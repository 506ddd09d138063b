"""The loaders that people have: mapped, read rank by rank, or refused by name."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from evener.comm.base import Communicator
from evener.ddp import Ddp
from evener.engine.loaders.stream import StreamLoader, count_samples
from evener.engine.loaders.training import TeamLoader
from evener.errors import CheckpointError, CollectiveMismatchError, ConfigError, UsageError
from helpers.loops import Numbered, linear, step
from helpers.teams import run_team, setup

SIZE = 22
DATA = Numbered(SIZE, torch.float64)
X = DATA.x


def go_through(
    comm: Communicator, make: Any, *, epochs: int = 1, shares: Any = (3, 2, 1), **options: Any
) -> tuple[list[int], Tensor, int, list[str]]:
    """Trains over what ``make(ddp)`` gives; returns ids seen, parameters, windows, notices."""
    model, optimizer = linear(torch.float64)
    said: list[str] = []
    with setup(comm, model, optimizer, shares=shares[: comm.world_size]) as ddp:
        ddp.assembly.engine.options.guards.notice = said.append  # type: ignore[method-assign]
        loader = ddp.loader(make(ddp), **options)
        seen: list[int] = []
        for epoch in range(epochs):
            for ids, x in loader.epoch(epoch):
                seen.extend(ids.tolist())
                step(ddp, x)
        return seen, model.weight.detach().clone(), ddp.window, said


def everything(results: Any) -> Counter[int]:
    return Counter(i for seen, *_ in results for i in seen)


class NoLength(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (DataLoader(DATA, batch_size=None), "batch_size=None"),
        (DATA, "batch_size is not given"),
        (
            DataLoader(DATA, batch_size=50, drop_last=True),
            "22 samples, batch_size=50 and drop_last=True",
        ),
        (DataLoader([], batch_size=4), "an epoch has no batch: 0 samples"),
        ((x for x in X), r"a generator, which has no length .*list\(generator\)"),
        ({1, 2}, "a set, which has no length"),
        (NoLength(), "a NoLength, which has no length"),
    ],
)
def test_data_that_is_refused(data: Any, named: str) -> None:
    model, optimizer = linear()
    given = {} if isinstance(data, DataLoader | Numbered) else {"batch_size": 4}
    with setup(Communicator(), model, optimizer) as ddp, pytest.raises(ConfigError, match=named):
        ddp.loader(data, **given)


# ── a DataLoader over a map-style data set ───────────────────────────────────────────────────────


@pytest.mark.parametrize("shuffle", [True, False])
def test_what_a_data_loader_keeps(shuffle: bool) -> None:
    """Its collate_fn, its order, and its batch size, which is that of the team."""

    def double(samples: list[Any]) -> Any:
        ids, xs = torch.utils.data.default_collate(samples)
        return ids, 2 * xs

    def body(comm: Communicator) -> tuple[list[int], list[int], Tensor]:
        model, optimizer = linear(torch.float64)
        given = DataLoader(DATA, batch_size=4, shuffle=shuffle, collate_fn=double)
        seen: list[int] = []
        with setup(comm, model, optimizer, shares=(3, 2, 1)[: comm.world_size]) as ddp:
            loader = ddp.loader(given)
            assert isinstance(loader, TeamLoader)
            assert (loader.num_workers, loader.drop_last) == (0, False)
            sizes = [loader.batch_size, len(loader), ddp.loader(given, batch_size=11).batch_size]
            for ids, x in loader.epoch(0):
                assert torch.equal(x, 2 * X[ids])
                seen += ids.tolist()
                step(ddp, x)
        return sizes, seen, model.weight.detach()

    ((sizes, seen, weight),) = run_team(1, body)
    assert sizes == [4, 6, 11]
    assert (seen == list(range(SIZE))) == (not shuffle)
    for others, _, other in run_team(3, body):
        assert others == sizes
        assert torch.allclose(other, weight, rtol=1e-12)


@pytest.mark.parametrize("world_size", [1, 2])
def test_samplers_that_choose(world_size: int) -> None:
    chosen = [3, 5, 8, 13, 21]

    def subset(ddp: Ddp) -> Any:
        return DataLoader(DATA, batch_size=2, sampler=SubsetRandomSampler(chosen))

    results = run_team(world_size, lambda comm: go_through(comm, subset, epochs=2))
    assert everything(results) == dict.fromkeys(chosen, 2)

    def weighted(ddp: Ddp) -> Any:
        weights = [1.0] * 11 + [0.0] * 11
        return DataLoader(DATA, batch_size=4, sampler=WeightedRandomSampler(weights, 40))

    results = run_team(world_size, lambda comm: go_through(comm, weighted, epochs=2))
    counts = everything(results)
    assert sum(counts.values()) == 80
    assert set(counts) <= set(range(11))
    assert counts == everything([go_through(Communicator(), weighted, epochs=2)])
    assert "comes from WeightedRandomSampler" in results[0][3][0]


@pytest.mark.parametrize("kind", ["weighted", "distributed"])
def test_a_sampler_that_draws_other_samples_on_another_rank(kind: str) -> None:
    def make(ddp: Ddp) -> Any:
        own = torch.Generator().manual_seed(ddp.rank)
        sampler: Any = WeightedRandomSampler([1.0] * SIZE, 40, generator=own)
        if kind == "distributed":
            sampler = DistributedSampler(DATA, num_replicas=2, rank=ddp.rank)
        return DataLoader(DATA, batch_size=4, sampler=sampler)

    with pytest.raises(UsageError, match=r"rank \d has \d+ samples in order .* Leave a "):
        run_team(2, lambda comm: go_through(comm, make))


# ── read rank by rank ────────────────────────────────────────────────────────────────────────────


class Part(IterableDataset[tuple[int, Tensor]]):
    """Every ``step``-th sample from ``first`` on."""

    def __init__(self, first: int, step: int) -> None:
        self.first, self.step = first, step

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        return ((i, X[i]) for i in range(self.first, SIZE, self.step))


def reference(batches: list[list[int]]) -> Tensor:
    """One process, a step for the union of what the ranks contribute to a window."""
    model, optimizer = linear(torch.float64)
    for batch in batches:
        optimizer.zero_grad()
        model(X[batch]).square().mean().backward()
        optimizer.step()
    return model.weight.detach().clone()


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_stream_on_every_rank_of_unlike_length(world_size: int, wrapped: bool) -> None:
    """Rank 0 has most of the data; the others, once through, take part with nothing."""
    parts = [
        [i for i in range(SIZE) if min(i % 5, world_size - 1) == rank] for rank in range(world_size)
    ]
    sizes = [7 // world_size + (rank < 7 % world_size) for rank in range(world_size)]
    num_windows = max(-(-len(part) // size) for part, size in zip(parts, sizes, strict=True))

    class Own(IterableDataset[tuple[int, Tensor]]):
        def __init__(self, rank: int) -> None:
            self.ids = parts[rank]

        def __iter__(self) -> Iterator[tuple[int, Tensor]]:
            return ((i, X[i]) for i in self.ids)

    def make(ddp: Ddp) -> Any:
        return DataLoader(Own(ddp.rank), batch_size=7) if wrapped else Own(ddp.rank)

    options = {} if wrapped else {"batch_size": 7}
    results = run_team(world_size, lambda comm: go_through(comm, make, **options))
    assert everything(results) == dict.fromkeys(range(SIZE), 1)
    expected = reference(
        [
            [i for part, n in zip(parts, sizes, strict=True) for i in part[k * n : (k + 1) * n]]
            for k in range(num_windows)
        ]
    )
    for _, weight, windows, said in results:
        assert torch.allclose(weight, expected, rtol=1e-12)
        assert windows == num_windows
        assert len(said) == 1
        assert "Own: each rank reads it by itself" in said[0]


def test_a_stream_has_no_length_and_goes_on_by_epochs(tmp_path: Path) -> None:
    def run(load: bool, epochs: int) -> list[int]:
        model, optimizer = linear(torch.float64)
        with setup(Communicator(), model, optimizer) as ddp:
            loader = ddp.loader(Part(0, 1), batch_size=6)
            assert isinstance(loader, StreamLoader)
            with pytest.raises(TypeError):
                len(loader)
            if load:
                ddp.load(tmp_path / "a")
            seen = []
            for epoch in range(epochs):
                for ids, x in loader.epoch(epoch):
                    seen.extend(ids.tolist())
                    ddp.backward(model(x).mean())
                    ddp.step()
            ddp.save(tmp_path / "a")
            return seen

    assert len(run(False, 2)) == 2 * SIZE
    assert len(run(True, 3)) == SIZE
    model, optimizer = linear(torch.float64)
    with setup(Communicator(), model, optimizer) as ddp:
        ddp.load(tmp_path / "a")
        with pytest.raises(CheckpointError, match="data cursor has num_samples=1"):
            ddp.loader(DATA, batch_size=4)


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (torch.zeros(4, 2), 4),
        ({"a": torch.zeros(()), "b": torch.zeros(3)}, 3),
        ([torch.zeros(2, 1), torch.zeros(5)], 2),
        ("text", 1),
    ],
)
def test_how_many_samples_a_batch_has(batch: Any, samples: int) -> None:
    assert count_samples(batch) == samples


# ── no loader at all ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("world_size", [1, 3])
def test_without_a_loader_each_step_is_an_update_by_weight(world_size: int) -> None:
    rows = [[0, 1, 2], [3, 4], [5]][:world_size]

    def body(comm: Communicator) -> tuple[Tensor, list[int], int]:
        model, optimizer = linear(torch.float64)
        committed: list[int] = []
        own = rows[comm.rank]
        with setup(comm, model, optimizer) as ddp:
            said: list[str] = []
            ddp.assembly.engine.options.guards.notice = said.append  # type: ignore[method-assign]
            ddp.on_commit(lambda result: committed.append(result.window))
            for k in range(3):
                x = X[[i + 6 * k for i in own]]
                ddp.backward(model(x).square().mean(), weight=len(x))
                result = ddp.step()
                assert result is not None
                assert result.weight == sum(len(r) for r in rows)
        assert "training without ddp.loader" in said[0]
        return model.weight.detach().clone(), committed, len(said)

    results = run_team(world_size, body)
    expected = reference([[i + 6 * k for own in rows for i in own] for k in range(3)])
    for weight, committed, notices in results:
        assert torch.allclose(weight, expected, rtol=1e-12)
        assert committed == [0, 1, 2]
        assert notices == 1


def test_a_stream_that_one_rank_leaves_before_the_others_is_named() -> None:
    def body(comm: Communicator) -> str:
        model, optimizer = linear(torch.float64)

        def train() -> None:
            with setup(comm, model, optimizer) as ddp:
                for _, x in ddp.loader(Part(0, 1), batch_size=4).epoch(0):
                    ddp.backward(model(x).square().mean())
                    ddp.step()
                    if comm.rank == 1:
                        break

        with pytest.raises(CollectiveMismatchError) as caught:
            train()
        return str(caught.value)

    for message in run_team(2, body):
        assert "rank 0 is closing a window" in message
        assert "leave a loop over a stream on all ranks at the same ddp.window" in message
