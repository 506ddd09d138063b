"""Numbers that travel in fewer bits between hosts: bfloat16, or small integers with scales."""

from typing import Final

import torch
from torch import Tensor

WIRES: Final = {"float32": 32, "bfloat16": 16, "int8": 8, "int4": 4}
"""Names of what numbers travel in, with the bits of a number."""

BLOCK: Final = 128
"""Consecutive numbers that share a scale: a large number spoils the resolution of few others."""

_SCALE_BYTES: Final = 4


def packed_bytes(numel: int, bits: int) -> int:
    """Return the bytes in which ``numel`` numbers travel; a multiple of ``BLOCK`` numbers."""
    scales = _SCALE_BYTES * (numel // BLOCK) if bits < 16 else 0
    return numel * bits // 8 + scales


def pack(values: Tensor, bits: int, into: Tensor) -> None:
    """Round numbers to what travels.

    Args:
        values: Float32, ``(n,)``, where ``n`` is a multiple of ``BLOCK``.
        bits: Those of a number: 16, 8 or 4.
        into: Receives the bytes: uint8, ``(packed_bytes(n, bits),)``.
    """
    if bits == 16:
        into.view(torch.bfloat16).copy_(values)
        return
    most = 2 ** (bits - 1) - 1
    blocks = values.view(-1, BLOCK)
    scales = blocks.abs().amax(dim=1, keepdim=True).div_(most)
    # The scale of a block with a number that is not finite is not finite either, and so are all of
    # the block's numbers after ``unpack``.
    steps = torch.where(scales > 0, blocks / scales, 0.0).round_().nan_to_num_(0.0, 0.0, 0.0)
    whole = steps.clamp_(-most, most).to(torch.int8)
    split = _SCALE_BYTES * len(blocks)
    into[:split].view(torch.float32).copy_(scales.view(-1))
    numbers = whole.view(torch.uint8).view(-1)
    if bits == 4:
        low, high = numbers.view(-1, 2).unbind(1)
        numbers = (low & 15) | (high << 4)
    into[split:].copy_(numbers)


def unpack(packed: Tensor, bits: int, into: Tensor) -> None:
    """Write the numbers of ``pack`` to ``into``: float32, ``(n,)``."""
    if bits == 16:
        into.copy_(packed.view(torch.bfloat16))
        return
    split = _SCALE_BYTES * (into.numel() // BLOCK)
    scales, numbers = packed[:split].view(torch.float32), packed[split:]
    if bits == 4:
        halves = torch.stack((numbers << 4, numbers & 240), dim=1).view(-1)
        whole = halves.view(torch.int8) >> 4  # keeps the sign
    else:
        whole = numbers.view(torch.int8)
    torch.mul(whole.view(-1, BLOCK), scales.view(-1, 1), out=into.view(-1, BLOCK))
