"""``ddp.loader(cache=...)`` over teams: the same training, with fewer fetches."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from evener.comm.base import Communicator
from evener.devices import Cpu
from evener.errors import ConfigError
from helpers.teams import run_team, setup

SIZE, EPOCHS = 22, 4
X = torch.randn(SIZE, 3, generator=torch.Generator().manual_seed(1)).double()


class Counted(Dataset[Any]):
    def __init__(self) -> None:
        self.fetched: Counter[int] = Counter()

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        self.fetched[index] += 1
        return index, X[index]


def noisy(samples: list[Any]) -> tuple[Tensor, Tensor]:
    ids, xs = zip(*samples, strict=True)
    return torch.tensor(ids), torch.stack(xs) + torch.randn(len(xs), 3)


def train(comm: Communicator, policy: str, **options: Any) -> tuple[Tensor, list[Any], Any]:
    dataset, model = Counted(), nn.Linear(3, 1).double()
    nn.init.constant_(model.weight, 0.5)
    nn.init.constant_(model.bias, 0)
    seen: list[Any] = []
    shares = (3.0, 2.0)[: comm.world_size] if policy == "sync" else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with setup(comm, model, optimizer, policy=policy, shares=shares) as ddp:
        loader = ddp.loader(dataset, batch_size=5, micro_batch_size=2, **options)
        for epoch in ddp.epochs(EPOCHS):
            for ids, x in loader.epoch(epoch):
                seen.append((epoch, ids.tolist()))
                ddp.backward(model(x).square().mean())
                ddp.step()
        return model.weight.detach().clone(), seen, dataset.fetched


@pytest.mark.parametrize("collate_fn", [None, noisy])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("cache", ["memory", "device", "disk"])
def test_training_is_the_same_and_a_rank_fetches_a_sample_once(cache, world_size, collate_fn):
    plain = run_team(world_size, lambda comm: train(comm, "sync", collate_fn=collate_fn))
    cached = run_team(
        world_size, lambda comm: train(comm, "sync", collate_fn=collate_fn, cache=cache)
    )
    for (weight, seen, fetched), (expected, expected_seen, _) in zip(cached, plain, strict=True):
        assert torch.equal(weight, expected)
        assert seen == expected_seen
        # Each is checked by one more fetch, as there are fewer than are checked.
        assert fetched == dict.fromkeys({i for _, ids in seen for i in ids}, 2)


@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_every_sample_comes_once_an_epoch_under_local_steps(policy):
    results = run_team(2, lambda comm: train(comm, policy, cache="memory"))
    for epoch in range(EPOCHS):
        ids = Counter(i for _, seen, _ in results for e, ids in seen if e == epoch for i in ids)
        assert ids == dict.fromkeys(range(SIZE), 1)
    assert all(set(fetched.values()) == {2} for *_, fetched in results)


def test_worker_processes_are_asked_for_what_is_missing() -> None:
    weight, _, fetched = train(Communicator(), "sync", cache="memory", num_workers=1)
    assert torch.equal(weight, train(Communicator(), "sync")[0])
    assert not fetched, "in the worker, not here"


def test_a_full_cache_says_once_how_much_it_holds(monkeypatch, capsys) -> None:
    monkeypatch.setattr(Cpu, "free_bytes", lambda *_: 300)
    weight, _, fetched = train(Communicator(), "sync", cache="memory")
    assert torch.equal(weight, train(Communicator(), "sync")[0])
    assert max(fetched.values()) > 2
    said = capsys.readouterr().err
    assert said.count("cache='memory' holds") == 1


def test_a_stream_is_refused() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            yield from range(5)

    model = nn.Linear(3, 1)
    with (
        setup(Communicator(), model, torch.optim.SGD(model.parameters(), lr=0.1)) as ddp,
        pytest.raises(
            ConfigError, match=r"cache='disk' needs .* a stream does not have; give a map"
        ),
    ):
        ddp.loader(DataLoader(Stream(), 2), cache="disk")
