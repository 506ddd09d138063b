"""Numbers that travel in fewer bits between hosts: bfloat16, or small integers with scales."""

from collections.abc import Iterator, Sequence
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import pad

WIRES: Final = {"float32": 32, "bfloat16": 16, "int8": 8, "int4": 4}
"""Names of what numbers travel in, with the bits of a number."""

BLOCK: Final = 128
"""Consecutive numbers that share a scale: a large number coarsens few others."""

_SCALE_BYTES: Final = 4


#: Consecutive numbers that are packed at a time: they stay in a processor's cache meanwhile.
_PIECE: Final = 1024 * BLOCK


def packed_bytes(numel: int, bits: int) -> int:
    """Return the bytes in which ``numel`` numbers travel, as whole blocks."""
    blocks = -(-numel // BLOCK)
    return blocks * (BLOCK * bits // 8 + (_SCALE_BYTES if bits < 16 else 0))


def pack_sum(
    values: Tensor, lost: Tensor, others: Sequence[Tensor], bits: int, into: Tensor
) -> None:
    """Round a sum to what travels, with error feedback.

    Args:
        values: Float32, ``(n,)``; overwritten by the sum.
        lost: What rounding took before, which is added; overwritten by what it takes now: 0 for
            numbers that are not finite, or not in bfloat16.
        others: Packed numbers to add.
        bits: Those of a number: 16, 8 or 4.
        into: Receives the bytes: uint8, at least ``(packed_bytes(n, bits),)``.
    """
    theirs = torch.empty_like(values[:_PIECE]) if others else values
    for start, end, packed in _pieces(values.numel(), bits):
        own, rest = values[start:end], lost[start:end]
        own.add_(rest)
        for other in others:
            _unpack(other[packed], bits, theirs[: end - start])
            own.add_(theirs[: end - start])
        _pack(own, bits, into[packed])
        _unpack(into[packed], bits, rest)
        torch.sub(own, rest, out=rest).nan_to_num_(0.0, 0.0, 0.0)


def unpack(packed: Tensor, bits: int, into: Tensor) -> None:
    """Write the numbers that ``pack_sum`` has packed to ``into``: float32, ``(n,)``."""
    for start, end, place in _pieces(into.numel(), bits):
        _unpack(packed[place], bits, into[start:end])


def _pieces(numel: int, bits: int) -> Iterator[tuple[int, int, slice]]:
    """Yield the start and end of each piece, and where it is packed."""
    for start in range(0, numel, _PIECE):
        end = min(start + _PIECE, numel)
        yield start, end, slice(packed_bytes(start, bits), packed_bytes(end, bits))


def _pack(values: Tensor, bits: int, into: Tensor) -> None:
    """Round the numbers of a piece."""
    if bits == 16:
        into.view(torch.bfloat16)[: values.numel()].copy_(values)
        return
    most = 2 ** (bits - 1) - 1
    blocks = pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(dim=1, keepdim=True).div_(most)
    # The scale of a block with a number that is not finite is not finite either, and so are all of
    # the block's numbers after ``_unpack``.
    steps = torch.where(scales > 0, blocks / scales, 0.0).round_().nan_to_num_(0.0, 0.0, 0.0)
    whole = steps.clamp_(-most, most).to(torch.int8)
    split = _SCALE_BYTES * len(blocks)
    into[:split].view(torch.float32).copy_(scales.view(-1))
    numbers = whole.view(torch.uint8).view(-1)
    if bits == 4:
        low, high = numbers.view(-1, 2).unbind(1)
        numbers = (low & 15) | (high << 4)
    into[split:].copy_(numbers)


def _unpack(packed: Tensor, bits: int, into: Tensor) -> None:
    """Write the numbers of a packed piece."""
    if bits == 16:
        into.copy_(packed.view(torch.bfloat16)[: into.numel()])
        return
    split = _SCALE_BYTES * -(-into.numel() // BLOCK)
    scales, numbers = packed[:split].view(torch.float32), packed[split:]
    if bits == 4:
        halves = torch.stack((numbers << 4, numbers & 240), dim=1).view(-1)
        whole = halves.view(torch.int8) >> 4  # keeps the sign
    else:
        whole = numbers.view(torch.int8)
    values = whole.view(-1, BLOCK) * scales.view(-1, 1)
    into.copy_(values.view(-1)[: into.numel()])
