"""Numbers in few bits: within half a step of the scale of their block, whatever they are."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from evener.comm.rounding import BLOCK, pack, packed_bytes, unpack

numbers = st.lists(
    st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False),
    min_size=1,
    max_size=3 * BLOCK,
)


def round_trip(values: torch.Tensor, bits: int) -> torch.Tensor:
    packed = torch.empty(packed_bytes(values.numel(), bits), dtype=torch.uint8)
    pack(values, bits, packed)
    found = torch.full_like(values, torch.nan)
    unpack(packed, bits, found)
    return found


@given(numbers, st.sampled_from([8, 4]))
def test_each_number_is_within_half_a_step(given_numbers: list[float], bits: int) -> None:
    values = torch.zeros(-(-len(given_numbers) // BLOCK) * BLOCK)
    values[: len(given_numbers)] = torch.tensor(given_numbers)
    found, blocks = round_trip(values, bits), values.view(-1, BLOCK)
    steps = blocks.abs().amax(dim=1, keepdim=True) / (2 ** (bits - 1) - 1)
    assert ((found.view(-1, BLOCK) - blocks).abs() <= steps * 0.500001 + 1e-37).all()
    assert not found[len(given_numbers) :].any(), "zeros stay zeros"


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
