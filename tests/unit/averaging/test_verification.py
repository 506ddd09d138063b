"""Hashes of parameters and buffers: any difference counts, nothing else does."""

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from evener.averaging.buffers import BufferAverager
from evener.averaging.verification import ReplicaCheck
from evener.comm.base import Communicator
from evener.comm.flat import FlatBuffers
from evener.errors import ReplicasDifferError
from helpers.teams import run_team

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64]
LARGE = 300_000  # more than is hashed at once


class CheckOfModel:
    """Compares what a model holds, as ranks agreed on it."""

    def __init__(self, model: nn.Module, comm: Communicator, world_size: int = 2) -> None:
        self.flat = FlatBuffers(list(model.named_parameters()), world_size)
        self.buffers = BufferAverager(model, comm)
        self.check = ReplicaCheck(model, self.flat, self.buffers, every=1)

    def tensors(self) -> tuple[list[Tensor], Sequence[Tensor]]:
        return [group.data for group in self.flat.groups], self.buffers.committed()

    def hashes(self) -> list[int]:
        return self.check.hashes(*self.tensors())

    def digest(self) -> int:
        return self.check.digest(*self.tensors())

    def name_difference(self, comm: Communicator, window: int) -> None:
        self.check.name_difference(comm, window, *self.tensors())


def hashes(*parameters: Tensor, world_size: int = 2) -> list[int]:
    model = nn.ParameterDict({f"p{i}": nn.Parameter(p.clone()) for i, p in enumerate(parameters)})
    with Communicator() as comm:
        check = CheckOfModel(model, comm, world_size)
        found = check.hashes()
    return [found[check.flat.names.index(f"p{i}")] for i in range(len(parameters))]


def buffer_hashes(**buffers: Tensor) -> list[int]:
    model = nn.Module()
    for name, buffer in buffers.items():
        model.register_buffer(name, buffer)
    with Communicator() as comm:
        return CheckOfModel(model, comm).hashes()


def numbers(dtype: torch.dtype, size: int = LARGE) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_single_bit_anywhere_changes_the_hash_of_its_parameter_alone(dtype: torch.dtype) -> None:
    first, second = numbers(dtype), numbers(dtype, 10)
    before = hashes(first, second)
    for place in (0, 131_071, 131_072, LARGE - 1):
        spoilt = first.clone()
        bits = spoilt.view(torch.uint8).view(LARGE, -1)
        bits[place, -1] ^= 1
        after = hashes(spoilt, second)
        assert after[0] != before[0]
        assert after[1] == before[1]


def test_it_does_not_depend_on_the_number_of_ranks_nor_on_neighbours() -> None:
    x, y = numbers(torch.float32, 1001), numbers(torch.float32, 7)
    assert hashes(x, y, world_size=1) == hashes(x, y, world_size=7)
    assert hashes(x)[0] == hashes(x, y)[0]


def test_differences_that_cancel_in_a_plain_sum_are_seen() -> None:
    bits = numbers(torch.float32, 64).view(torch.int32)
    before = hashes(bits.view(torch.float32))
    for steps in ({3: 1, 4: -1}, {3: 1, 4: -2, 5: 1}, {0: 5, 32: -5}, {8: 1, 9: -1, 40: -1, 41: 1}):
        other = bits.clone()
        for place, step in steps.items():
            other[place] += step
        assert hashes(other.view(torch.float32)) != before
    swapped = bits.clone()
    swapped[[10, 20]] = swapped[[20, 10]]
    assert hashes(swapped.view(torch.float32)) != before


def test_a_zero_with_a_sign_is_another_zero_and_a_nan_is_itself() -> None:
    assert hashes(torch.tensor([0.0])) != hashes(torch.tensor([-0.0]))
    assert hashes(torch.tensor([torch.nan])) == hashes(torch.tensor([torch.nan]))


BUFFERS = {
    "mean": torch.linspace(-1, 1, 7),
    "fp16": torch.ones(3, dtype=torch.float16),
    "mask": torch.tensor([[True, False], [True, True]]),
    "count": torch.tensor(5),
    "uint8": torch.tensor([1, 2, 255], dtype=torch.uint8),
    "wide": torch.arange(6.0, dtype=torch.float64).view(2, 3),
}


@pytest.mark.parametrize("name", BUFFERS)
def test_a_buffer_of_any_type_counts(name: str) -> None:
    before = buffer_hashes(**BUFFERS)
    spoilt = copy.deepcopy(BUFFERS)
    last = spoilt[name].view(-1)
    last[-1] = not last[-1] if last.dtype is torch.bool else last[-1] + 1
    after = buffer_hashes(**spoilt)
    changed = [key for key, a, b in zip(BUFFERS, before, after, strict=True) if a != b]
    assert changed == [name]


def test_a_buffer_counts_by_its_elements_not_by_its_strides() -> None:
    wide = BUFFERS["wide"]
    turned = wide.t().contiguous().t()
    assert turned.stride() != wide.stride()
    assert buffer_hashes(x=turned) == buffer_hashes(x=wide)


def test_buffers_that_are_not_made_equal_are_not_compared() -> None:
    assert buffer_hashes(empty=torch.zeros(0), complex=torch.zeros(2, dtype=torch.cfloat)) == []


class Nested(nn.Module):
    """Holds a buffer, and after it a layer with both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.register_buffer("mask", torch.zeros(2, dtype=torch.bool), persistent=False)
        self.norm = nn.BatchNorm1d(2)
        self.head = nn.Linear(2, 1, bias=False)
        nn.init.ones_(self.head.weight)


@pytest.mark.parametrize(
    ("spoilt", "first"),
    [
        (("head.weight", "norm.running_mean"), "head.weight"),
        (("norm.num_batches_tracked", "norm.bias"), "norm.bias"),
        (("norm.running_mean", "mask"), "mask"),
        (("mask", "weight"), "weight"),
        (("norm.running_var", "norm.num_batches_tracked"), "norm.running_var"),
    ],
)
def test_the_first_parameter_is_named_or_else_the_first_buffer(
    spoilt: tuple[str, ...], first: str
) -> None:
    def program(comm: Communicator) -> ReplicasDifferError:
        model = Nested()
        check = CheckOfModel(model, comm)
        if comm.rank == 2:
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                if name in spoilt:
                    tensor.data.copy_(tensor == 0)
        with pytest.raises(ReplicasDifferError) as caught:
            check.name_difference(comm, 4)
        return caught.value

    kind = "parameter" if first in dict(Nested().named_parameters()) else "buffer"
    for error in run_team(3, program):
        assert (error.rank, error.parameter, error.window) == (2, first, 4)
        assert f"after window 4, {kind} {first!r} of rank 2 is not that of rank 0" in str(error)
        assert "Remedy" in str(error)


def test_what_a_rank_writes_after_the_agreement_is_its_own() -> None:
    """The layer has seen a batch on one rank only: what was agreed on is compared."""

    def program(comm: Communicator) -> None:
        model = nn.BatchNorm1d(3)
        check = CheckOfModel(model, comm)
        if comm.rank == 1:
            model(torch.randn(4, 3))
        check.name_difference(comm, 0)

    run_team(2, program)


def test_a_parameter_that_one_rank_lacks_differs() -> None:
    def program(comm: Communicator) -> ReplicasDifferError:
        model = nn.Linear(2, 1, bias=comm.rank == 0)
        nn.init.ones_(model.weight)
        with pytest.raises(ReplicasDifferError) as caught:
            CheckOfModel(model, comm).name_difference(comm, 0)
        return caught.value

    assert [error.parameter for error in run_team(2, program)] == ["bias", "bias"]


def test_a_digest_fits_into_a_row() -> None:
    with Communicator() as comm:
        digest = CheckOfModel(nn.Linear(3, 2), comm).digest()
    assert 0 <= digest == int(float(digest)) < 2**53
