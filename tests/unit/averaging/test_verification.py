"""Hashes of parameters: any difference counts, nothing else does."""

import pytest
import torch
from torch import nn

from evener.averaging.verification import ReplicaCheck
from evener.comm.base import Communicator, SingleCommunicator
from evener.comm.flat import FlatBuffers
from evener.errors import ReplicasDifferError
from helpers.teams import run_team

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64]
LARGE = 300_000  # more than is hashed at once


def hashes(*parameters: torch.Tensor, world_size: int = 2) -> list[int]:
    named = [(f"p{i}", nn.Parameter(p.clone())) for i, p in enumerate(parameters)]
    flat = FlatBuffers(named, world_size)
    found = ReplicaCheck(flat).hashes()
    return [found[flat.index_of(f"p{i}")] for i in range(len(parameters))]


def numbers(dtype: torch.dtype, size: int = LARGE) -> torch.Tensor:
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


def test_ranks_that_agree_go_on_and_one_rank_has_nobody_to_ask() -> None:
    def program(comm: Communicator) -> None:
        model = nn.ModuleList([nn.Linear(3, 2), nn.Linear(2, 2, dtype=torch.float64)])
        for p in model.parameters():
            nn.init.ones_(p)
        check = ReplicaCheck(FlatBuffers(list(model.named_parameters()), comm.world_size))
        check.compare(comm, 0)
        check.compare(comm, 1)

    run_team(3, program)
    with SingleCommunicator() as comm:
        program(comm)


def test_two_that_differ_are_named_with_rank_0_as_the_measure() -> None:
    def program(comm: Communicator) -> ReplicasDifferError:
        model = nn.Linear(3, 2)
        nn.init.ones_(model.weight)
        nn.init.constant_(model.bias, float(comm.rank))
        check = ReplicaCheck(FlatBuffers(list(model.named_parameters()), comm.world_size))
        with pytest.raises(ReplicasDifferError) as caught:
            check.compare(comm, 7)
        return caught.value

    for error in run_team(2, program):
        assert (error.rank, error.parameter, error.window) == (1, "bias", 7)
        assert "parameter 'bias' of rank 1 is not that of rank 0" in str(error)
