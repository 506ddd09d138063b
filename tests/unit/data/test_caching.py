"""The cache in front of a fetcher: the same batches, fetched once."""

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset, default_collate

from evener.data import caching
from evener.data.fetching import Fetcher
from evener.devices import Cpu
from evener.engine.loaders.dataset_arguments import DatasetArguments
from evener.errors import ConfigError, DataError
from helpers.fetch_cases import keep_list, masking_collate

CACHES = ["memory", "device", "disk"]
CPU = torch.device("cpu")


class Nested:
    """Items of everything that can be held."""

    def __init__(self) -> None:
        self.reads: Counter[int] = Counter()

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.reads[index] += 1
        return {
            "x": torch.full((2, 3), index).t(),
            "half": torch.tensor(index, dtype=torch.bfloat16),
            "array": (np.full(3, index), np.float32(index)),
            "label": index,
            "flag": index > 5,
            "share": index / 7,
            "text": f'item {index} "ä"\n',
        }


def fetch(dataset: Any, cache: str | None, collate_fn: Any = default_collate, **more: Any) -> Any:
    options = {"num_workers": 0, "seed": 3} | more
    prefetch = options.pop("prefetch", "auto")
    given = DatasetArguments(dataset, batch_size=4, collate_fn=collate_fn, **options)
    return given.cached_fetcher(prefetch, cache, CPU) if cache else given.fetcher(prefetch)


def flat(batch: Any) -> list[Any]:
    leaves = torch.utils._pytree.tree_leaves(batch)
    return [x.tolist() if isinstance(x, Tensor | np.ndarray) else x for x in leaves]


def load(fetcher: Fetcher, epoch: int, *batches: list[int]) -> list[Any]:
    pending = [fetcher.submit(epoch, batch) for batch in batches]
    return [flat(one.result()) for one in pending]


@pytest.mark.parametrize("prefetch", ["inline", "thread"])
@pytest.mark.parametrize("collate_fn", [default_collate, keep_list])
@pytest.mark.parametrize("cache", CACHES)
def test_batches_are_those_without_a_cache_and_samples_are_fetched_once(
    cache, collate_fn, prefetch
):
    dataset = Nested()
    plain = fetch(Nested(), None, collate_fn)
    with fetch(dataset, cache, collate_fn, prefetch=prefetch) as cached, plain:
        for epoch, batches in enumerate([([1, 2], [3, 4, 3]), ([4, 1], [2, 8]), ([8],)]):
            assert load(cached, epoch, *batches) == load(plain, epoch, *batches)
    assert dataset.reads == {1: 2, 2: 2, 3: 2, 4: 2, 8: 2}, "the second one checks the first"


@pytest.mark.parametrize(("cache", "kind"), [("memory", np.ndarray), ("device", Tensor)])
def test_arrays_stay_arrays_except_on_the_device(cache, kind):
    with fetch(Nested(), cache, keep_list) as fetcher:
        for _ in range(2):
            [sample] = fetcher.submit(0, [1]).result()
            assert type(sample["array"][0]) is kind


@pytest.mark.parametrize("cache", CACHES)
def test_what_a_collate_function_changes_stays_unchanged_in_the_cache(cache):
    def changing(samples: list[Any]) -> Any:
        labels = [sample.pop("label") for sample in samples]
        return labels, [sample["x"].add_(1) for sample in samples]

    with fetch(Nested(), cache, changing) as fetcher:
        first, second = (load(fetcher, epoch, [1, 2]) for epoch in range(2))
    assert first == second
    assert first[0][:2] == [1, 2]


def test_a_data_set_that_shares_its_memory_does_not_reach_the_cache():
    xs = torch.zeros(4, 2)
    with fetch(TensorDataset(xs), "memory") as fetcher:
        before = load(fetcher, 0, [0, 1])
        xs.add_(1)
        assert load(fetcher, 1, [0, 1]) == before


@pytest.mark.parametrize("draw", [random.random, np.random.rand, lambda: float(torch.rand(()))])
def test_random_items_are_refused_and_told_apart_by_index(draw: Callable[[], float]):
    class Flipped:
        def __len__(self) -> int:
            return 100

        def __getitem__(self, index: int) -> Tensor:
            return torch.tensor(float(index) if index < 7 or draw() < 0.5 else 0.0)

    with fetch(Flipped(), "memory") as fetcher:
        fetcher.submit(0, range(7)).result()
        message = r"sample \d+ of .*Flipped differs when .* cache='memory' .* into collate_fn"
        with pytest.raises(ConfigError, match=message):
            fetcher.submit(0, range(7, 32)).result()


@pytest.mark.parametrize("cache", CACHES)
def test_a_collate_function_draws_as_without_a_cache(cache):
    class Plain:
        def __len__(self) -> int:
            return 100

        def __getitem__(self, index: int) -> dict[str, int]:
            return {"index": index}

    with fetch(Plain(), cache, masking_collate) as cached:
        plain = fetch(Plain(), None, masking_collate)
        for epoch in range(3):
            assert load(cached, epoch, [1, 2], [3]) == load(plain, epoch, [1, 2], [3])


@pytest.mark.parametrize(
    "leaf", [object(), b"bytes", torch.eye(2).to_sparse(), np.array(["text"]), torch.nn.ReLU()]
)
def test_what_cannot_be_held_is_named(leaf):
    class Odd:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> Any:
            return index, leaf

    with fetch(Odd(), "disk", keep_list) as fetcher:
        message = rf"sample 2 of .*Odd contains a {type(leaf).__name__}, .* leave cache out"
        with pytest.raises(ConfigError, match=message):
            fetcher.submit(0, [2]).result()


def test_an_error_of_a_sample_is_the_one_without_a_cache():
    class Broken(Nested):
        def __getitem__(self, index: int) -> Any:
            if index == 2:
                raise KeyError("gone")
            return index

    def ragged(samples: list[Any]) -> Any:
        raise ValueError("ragged")

    with fetch(Broken(), "memory") as fetcher:
        with pytest.raises(DataError, match=r"sample 2 of epoch 1 could .*Broken: KeyError"):
            fetcher.submit(1, [1, 2]).result()
        assert fetcher.submit(1, [1, 3]).result().tolist() == [1, 3]
    with (
        fetch(Broken(), "memory", ragged) as fetcher,
        pytest.raises(DataError, match=r"from .*Broken could not be collated: ValueError: ragged"),
    ):
        fetcher.submit(0, [1]).result()


@pytest.mark.parametrize("cache", ["memory", "disk"])
def test_where_memory_gets_short_samples_are_fetched_again(cache, monkeypatch):
    class Large(Nested):
        def __getitem__(self, index: int) -> Tensor:
            self.reads[index] += 1
            return torch.full((5000,), index, dtype=torch.float64)  # 40 kB

    free = [10**9]
    monkeypatch.setattr(Cpu, "free_bytes", lambda *_: free[0])
    monkeypatch.setattr(caching.DiskStore, "free_bytes", lambda _: free[0])
    monkeypatch.setattr(caching, "_WATCH_S", -1.0)  # look at every batch
    monkeypatch.setattr(caching, "_NUM_CHECKED", 4)
    dataset = Large()
    with fetch(dataset, cache) as fetcher:
        load(fetcher, 0, [0, 1], [2, 3])
        assert not fetcher.remark
        dataset.reads.clear()
        pending = fetcher.submit(1, [0, 1, 2, 3])  # nothing is missing
        free[0] = 100_000
        assert pending.result()[:, -1].tolist() == [0, 1, 2, 3]
        assert dataset.reads.total() == 2
        assert f"cache='{cache}' holds 2 samples (0.00 GiB) in" in fetcher.remark
        remark = fetcher.remark
        free[0] = 0
        assert fetcher.submit(2, [3, 1]).result()[:, 0].tolist() == [3, 1]
        free[0] = 10**9
        load(fetcher, 3, [0, 1, 2, 3])  # there is room again
        dataset.reads.clear()
        load(fetcher, 4, [0, 1, 2, 3])
        assert not dataset.reads
        assert fetcher.remark == remark, "told once"


def test_the_file_of_a_cache_has_no_name_and_shrinks(tmp_path: Path, monkeypatch):
    free = [10**9]
    monkeypatch.setattr(caching.DiskStore, "free_bytes", lambda _: free[0])
    xs = torch.arange(8 * 50_000).reshape(8, -1)
    with fetch(TensorDataset(xs), f"disk:{tmp_path}") as fetcher:
        load(fetcher, 0, [0, 1, 2, 3])
        assert not list(tmp_path.iterdir())
        free[0] = 500_000
        [[found]] = load(fetcher, 0, [4])
        assert found == [xs[4].tolist()]
        assert load(fetcher, 0, [0, 1, 2, 3])[0][0] == xs[:4].tolist()


@pytest.mark.parametrize("cache", ["ram", "disk:/nowhere/at/all", True])
def test_an_unknown_place_is_named_with_the_remedy(cache):
    remedy = "give a folder" if str(cache).startswith("disk") else "give 'device', 'memory', 'disk'"
    with pytest.raises(ConfigError, match=f"cache={cache!r} .*{remedy}"):
        fetch(Nested(), cache)
