"""The signature of a data set: what it compares, and what cannot be compared."""

import itertools
import time
from collections.abc import Sequence
from typing import Any

import numpy
import pytest
import torch

from evener.data.fetching import make_fetcher
from evener.data.signature import sign


def signature(dataset: Sequence[Any], **options: Any) -> dict[str, Any]:
    return sign(make_fetcher(dataset, **options), len(dataset))


def items(count: int, scale: float = 1.0) -> list[tuple[torch.Tensor, int]]:
    return [(torch.full((2, 2), scale * k, dtype=torch.bfloat16), k) for k in range(count)]


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return sorted(name for name in one.keys() & other.keys() if one[name] != other[name])


def test_it_tells_lengths_types_and_contents_apart() -> None:
    own = signature(items(100))
    assert own["data types"] == "Tensor torch.bfloat16, Tensor torch.int64"
    assert len(own) == 2 + 8
    assert own == signature(items(100))
    assert "data length" in differing(own, signature(items(99)))
    assert "data of item 99" in differing(own, signature(items(100, scale=2.0)))
    assert "data types" in differing(own, signature([k for k, _ in items(100)]))


def test_random_numbers_of_the_usual_generators_follow_from_the_seed() -> None:
    class Augmented(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            return super().__getitem__(index)[0] + torch.rand(1) + numpy.random.rand()

    before = torch.get_rng_state(), numpy.random.get_state()[1].tolist()
    own = signature(Augmented(items(20)))
    assert any(name.startswith("data of item") for name in own)
    assert own == signature(Augmented(items(20)))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert numpy.random.get_state()[1].tolist() == before[1]


def test_of_items_that_differ_when_read_again_only_length_and_types_count() -> None:
    counter = itertools.count()

    class Changing(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            return {"x": torch.tensor(next(counter)), "who": object()}

    assert signature(Changing(range(9)), collate_fn=lambda samples: samples[0]) == {
        "data length": 9,
        "data types": "object, Tensor torch.int64",
    }


def test_reading_ends_in_time_and_leaves_out_what_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Slow(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            clock[0] += 0.3
            return super().__getitem__(index)

    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    assert [*signature(Slow(range(50)))] == ["data length", "data types"]
    assert signature([None]) == {"data length": 1}
