"""The loaders that people have: mapped, read rank by rank, or refused by name."""

import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from evener.comm.base import Communicator
from evener.ddp import Ddp
from evener.engine.loaders.stream import StreamLoader, count_samples
from evener.engine.loaders.training import TeamLoader
from evener.errors import CheckpointError, CollectiveMismatchError, ConfigError, UsageError
from helpers.teams import run_team, setup

LOCK = threading.Lock()
SIZE = 22
X = torch.randn(SIZE, 3, generator=torch.Generator().manual_seed(1)).double()
DATA = TensorDataset(torch.arange(SIZE), X)


def line() -> tuple[nn.Module, torch.optim.Optimizer]:
    with LOCK:
        torch.manual_seed(0)
        model = nn.Linear(3, 1).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


def go_through(
    comm: Communicator, make: Any, *, epochs: int = 1, shares: Any = (3, 2, 1), **options: Any
) -> tuple[list[int], Tensor, int, list[str]]:
    """Trains over what ``make(ddp)`` gives; returns ids seen, parameters, windows, notices."""
    model, optimizer = line()
    said: list[str] = []
    with setup(comm, model, optimizer, shares=shares[: comm.world_size]) as ddp:
        ddp.assembly.engine.options.guards.notice = said.append  # type: ignore[method-assign]
        loader = ddp.loader(make(ddp), **options)
        seen: list[int] = []
        for epoch in range(epochs):
            for ids, x in loader.epoch(epoch):
                seen.extend(ids.tolist())
                ddp.backward(model(x).square().mean())
                ddp.step()
        return seen, model.weight.detach().clone(), ddp.window, said


def everything(results: Any) -> Counter[int]:
    return Counter(i for seen, *_ in results for i in seen)


# ── a DataLoader over a map-style data set ───────────────────────────────────────────────────────


def test_what_a_data_loader_keeps() -> None:
    def double(samples: list[Any]) -> Any:
        ids, xs = torch.utils.data.default_collate(samples)
        return ids, 2 * xs

    given = DataLoader(DATA, batch_size=4, shuffle=True, collate_fn=double, num_workers=0)
    model, optimizer = line()
    with setup(Communicator(), model, optimizer) as ddp:
        loader = ddp.loader(given)
        assert isinstance(loader, TeamLoader)
        assert (loader.batch_size, len(loader)) == (4, 6)
        for ids, x in loader.epoch(0):
            assert torch.equal(x, 2 * X[ids])
            ddp.backward(model(x).mean())
            ddp.step()
        other = ddp.loader(given, batch_size=11, collate_fn=list, shuffle=False)
        assert [i for batch in other.epoch(0) for i, _ in _stepping(ddp, model, batch)] == list(
            range(SIZE)
        )


def _stepping(ddp: Ddp, model: nn.Module, batch: Any) -> Any:
    ddp.backward(model(batch[0][1]).mean())
    ddp.step()
    return batch


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("world_size", [1, 3])
def test_batch_size_is_that_of_the_team(world_size: int, shuffle: bool) -> None:
    def make(ddp: Ddp) -> Any:
        return DataLoader(DATA, batch_size=4, shuffle=shuffle)

    results = run_team(world_size, lambda comm: go_through(comm, make, epochs=2))
    assert everything(results) == dict.fromkeys(range(SIZE), 2)
    assert [windows for _, _, windows, _ in results] == [12] * world_size
    single = go_through(Communicator(), make, epochs=2)
    assert all(torch.allclose(w, single[1], rtol=1e-12) for _, w, _, _ in results)
    if not shuffle:
        assert single[0] == 2 * list(range(SIZE))


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

    def body(comm: Communicator) -> None:
        with pytest.raises(UsageError, match=r"rank \d has \d+ samples in order .* Leave a "):
            go_through(comm, make)

    run_team(2, body)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: DataLoader(DATA, batch_size=None), "batch_size=None"),
        (lambda: DATA, "batch_size is not given"),
        (
            lambda: DataLoader(DATA, batch_size=50, drop_last=True),
            "22 samples, batch_size=50 and drop_last=True",
        ),
        (lambda: DataLoader([], batch_size=4), "an epoch has no batch: 0 samples"),
    ],
)
def test_loaders_that_are_refused(make: Any, named: str) -> None:
    model, optimizer = line()
    with (
        setup(Communicator(), model, optimizer) as ddp,
        pytest.raises(ConfigError, match=named),
    ):
        ddp.loader(make())


# ── read rank by rank ────────────────────────────────────────────────────────────────────────────


class Part(IterableDataset[tuple[int, Tensor]]):
    """Every ``step``-th sample from ``first`` on."""

    def __init__(self, first: int, step: int) -> None:
        self.first, self.step = first, step

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        return ((i, X[i]) for i in range(self.first, SIZE, self.step))


def reference(batches: list[list[int]]) -> Tensor:
    """One process, a step for the union of what the ranks contribute to a window."""
    model, optimizer = line()
    for batch in batches:
        optimizer.zero_grad()
        model(X[batch]).square().mean().backward()
        optimizer.step()
    return model.weight.detach().clone()


def windows_of(parts: list[list[int]], sizes: list[int]) -> list[list[int]]:
    batches = [
        [part[k : k + n] for k in range(0, len(part), n)]
        for part, n in zip(parts, sizes, strict=True)
    ]
    return [
        [i for own in batches if k < len(own) for i in own[k]]
        for k in range(max(len(own) for own in batches))
    ]


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_stream_on_every_rank_of_unlike_length(world_size: int, wrapped: bool) -> None:
    """Rank 0 has most of the data; the others, once through, take part with nothing."""

    def part_of(rank: int) -> list[int]:
        return [i for i in range(SIZE) if min(i % 5, world_size - 1) == rank]

    class Own(Part):
        def __init__(self, rank: int) -> None:
            self.ids = part_of(rank)

        def __iter__(self) -> Iterator[tuple[int, Tensor]]:
            return ((i, X[i]) for i in self.ids)

    def make(ddp: Ddp) -> Any:
        return DataLoader(Own(ddp.rank), batch_size=7) if wrapped else Own(ddp.rank)

    options = {} if wrapped else {"batch_size": 7}
    results = run_team(world_size, lambda comm: go_through(comm, make, **options))
    sizes = [7 // world_size + (r < 7 % world_size) for r in range(world_size)]
    windows = windows_of([part_of(r) for r in range(world_size)], sizes)
    assert everything(results) == dict.fromkeys(range(SIZE), 1)
    expected = reference(windows)
    for _, weight, num_windows, said in results:
        assert torch.allclose(weight, expected, rtol=1e-12)
        assert num_windows == len(windows)
        assert len(said) == 1
        assert "Own: each rank reads it by itself" in said[0]


class NoLength(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("data", "kind"), [((x for x in X), "generator"), ({1, 2}, "set"), (NoLength(), "NoLength")]
)
def test_what_cannot_be_split_is_refused_with_the_remedy(data: Any, kind: str) -> None:
    model, optimizer = line()
    with (
        setup(Communicator(), model, optimizer) as ddp,
        pytest.raises(ConfigError, match=rf"a {kind}, which has no length .*list\(generator\)"),
    ):
        ddp.loader(data, batch_size=4)


def test_a_stream_has_no_length_and_goes_on_by_epochs(tmp_path: Path) -> None:
    def run(load: bool, epochs: int) -> list[int]:
        model, optimizer = line()
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
    model, optimizer = line()
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
        model, optimizer = line()
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


def test_without_a_loader_ranks_that_end_early_are_named() -> None:
    def body(comm: Communicator) -> str:
        model, optimizer = line()

        def train() -> None:
            with setup(comm, model, optimizer) as ddp:
                for k in range(3 - comm.rank):
                    ddp.backward(model(X[k : k + 2]).square().mean())
                    ddp.step()

        with pytest.raises(CollectiveMismatchError) as caught:
            train()
        return str(caught.value)

    for message in run_team(2, body):
        assert "rank 0 is closing a window" in message
        assert "rank 1 is ending an epoch" in message


def test_a_stream_that_one_rank_leaves_before_the_others_is_named() -> None:
    def body(comm: Communicator) -> str:
        model, optimizer = line()

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
