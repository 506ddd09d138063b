"""Numbers in few bits: within half a step of the scale of their block, whatever they are."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evener.comm.rounding import BLOCK, pack_sum, packed_bytes, unpack

numbers = st.lists(
    st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False),
    min_size=1,
    max_size=3 * BLOCK,
)


def round_trip(values: torch.Tensor, bits: int) -> torch.Tensor:
    return sum_up(values, torch.zeros_like(values), [], bits)[0]


def sum_up(
    values: torch.Tensor, lost: torch.Tensor, others: list[torch.Tensor], bits: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what arrives of a sum, and its bytes."""
    packed = torch.empty(packed_bytes(values.numel(), bits), dtype=torch.uint8)
    pack_sum(values.clone(), lost, others, bits, packed)
    found = torch.full_like(values, torch.nan)
    unpack(packed, bits, found)
    return found, packed


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("numel", [1, BLOCK + 1, 3_000 * BLOCK + 5])
def test_nothing_is_lost_for_good_of_a_sum(numel: int, bits: int) -> None:
    """Whatever does not arrive is kept for the next time, of short sums and of long ones."""
    own, theirs, before = torch.randn(3, numel)
    lost, theirs_lost = before.clone(), torch.zeros(numel)
    arrived, packed = sum_up(theirs, theirs_lost, [], bits)
    torch.testing.assert_close(arrived + theirs_lost, theirs)
    found, _ = sum_up(own, lost, [packed], bits)
    torch.testing.assert_close(found + lost, own + before + arrived)
    assert lost.abs().max() < 2.0 ** {16: -4, 8: -3, 4: 1}[bits]


@given(numbers, st.sampled_from([8, 4]))
def test_each_number_is_within_half_a_step(given_numbers: list[float], bits: int) -> None:
    values = torch.tensor(given_numbers)
    found = round_trip(values, bits)
    for arrived, block in zip(found.split(BLOCK), values.split(BLOCK), strict=True):
        step = block.abs().max() / (2 ** (bits - 1) - 1)
        assert ((arrived - block).abs() <= step * 0.500001 + 1e-37).all()
        assert not arrived[block == 0].any(), "zeros stay zeros"


@given(st.integers(-7, 7), st.sampled_from([8, 4]))
def test_multiples_of_a_power_of_two_keep_their_value(factor: int, bits: int) -> None:
    most = 2 ** (bits - 1) - 1
    values = torch.zeros(BLOCK)
    values[0], values[1], values[2], values[3] = most, factor, -factor, -most
    assert torch.equal(round_trip(values * 0.25, bits), values * 0.25)


def test_a_number_that_is_not_finite_spoils_its_block_alone() -> None:
    for bits in (8, 4):
        for bad in (float("inf"), float("nan")):
            values = torch.ones(2 * BLOCK)
            values[5] = bad
            found = round_trip(values, bits)
            assert not found[5].isfinite()
            assert torch.equal(found[BLOCK:], values[BLOCK:])


def test_a_number_takes_few_bits() -> None:
    assert [packed_bytes(1280, bits) for bits in (16, 8, 4)] == [2560, 1320, 680]
