"""Looks whether all ranks hold the same: a hash of each tensor, formed where it lies."""

import struct
from collections import Counter
from collections.abc import Sequence
from functools import cache
from hashlib import blake2b
from itertools import chain

import torch
from torch import Tensor, nn

from evener.averaging.buffers import BufferAverager
from evener.comm.base import Communicator
from evener.comm.flat import FlatBuffers
from evener.errors import ReplicasDifferError

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: Elements that are hashed at once: with their factors they fit into a core's cache.
_CHUNK = 1 << 17
# Odd numbers near 2**64 divided by the golden ratio, and others without a pattern, as int64.
_STEP, _MIX, _FOLD = -7046029254386353131, -4658895280553007687, 1181783497276652981
_WHY = (
    "Ranks that start alike and apply the same averages stay alike, so something else has written "
    "to it on one rank (to a buffer: without a mark of PyTorch's, as through .data), an optimizer "
    "steps by rank-dependent rules, or memory is faulty. Remedy: change weights on all ranks alike "
    "or not at all, write to buffers in place, and resume from the last checkpoint"
)


class ReplicaCheck:
    """Compares by hashes what all ranks should hold alike: trainable parameters, and buffers.

    A tensor's hash is Σ bits · factor modulo 2**64 over its elements, with an odd factor for each
    place: integers only, so that it does not depend on the device or the order of summing. Any
    difference in a single element changes it; differences in several leave it as it is by chance
    alone, once in 2**64. It guards against faults, not against forgery.

    Below, ``parameters`` are laid out as ``FlatGroup.data`` of each group, ``buffers`` are in the
    order of ``BufferAverager``.

    Args:
        model: Differences are looked for in its parameters first, then in its buffers.
        flat: Its trainable parameters.
        buffers: Those of its buffers that are made equal.
        every: Windows after which to compare; 0 for never.

    Attributes:
        every: As given.
    """

    def __init__(
        self, model: nn.Module, flat: FlatBuffers, buffers: BufferAverager, *, every: int
    ) -> None:
        self._flat = flat
        self._buffers = buffers
        self.every = every
        named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers())
        self._order = [name for name, _ in named]

    def is_due(self, window: int) -> bool:
        """Return whether to compare after this window, wherever in an epoch it is."""
        return self.every > 0 and (window + 1) % self.every == 0

    def digest(self, parameters: Sequence[Tensor], buffers: Sequence[Tensor]) -> int:
        """Return a hash of all bits, below 2**53, so that a float64 of a row carries it."""
        hashes = self.hashes(parameters, buffers)
        packed = struct.pack(f"={len(hashes)}q", *hashes)
        return int.from_bytes(blake2b(packed, digest_size=8).digest()) >> 11

    def name_difference(
        self,
        comm: Communicator,
        window: int,
        parameters: Sequence[Tensor],
        buffers: Sequence[Tensor],
    ) -> None:
        """Find what is not the same on all ranks, where digests differ; all call it together.

        Args:
            comm: The ranks.
            window: The window that was applied last, for messages; -1 before the first.
            parameters: See above.
            buffers: See above.

        Raises:
            ReplicasDifferError: On every rank: the first parameter or buffer that differs.
        """
        names = [*self._flat.names, *self._buffers.names]
        hashes = dict(zip(names, self.hashes(parameters, buffers), strict=True))
        own = {name: hashes[name] for name in self._order if name in hashes}
        what = f"hashes of parameters and buffers {_after(window)}"
        ranks = dict(zip(comm.numbers, comm.all_gather_json(own, what=what), strict=True))
        for name in dict.fromkeys(chain.from_iterable(ranks.values())):
            found = {rank: theirs.get(name) for rank, theirs in ranks.items()}
            usual = Counter(found.values()).most_common(1)[0][0]  # the first rank's of equally many
            odd = [rank for rank, value in found.items() if value != usual]
            if not odd:
                continue
            other = next(rank for rank, value in found.items() if value == usual)
            kind = "buffer" if name in self._buffers.names else "parameter"
            raise ReplicasDifferError(
                f"{_after(window)}, {kind} {name!r} of rank {odd[0]} is not that of rank {other}. "
                f"{_WHY}",
                rank=odd[0],
                parameter=name,
                window=window,
            )

    @torch.no_grad()
    def hashes(self, parameters: Sequence[Tensor], buffers: Sequence[Tensor]) -> list[int]:
        """Return a 64-bit hash of each parameter's bits, in flat order, then of each buffer's.

        They are formed where the tensors lie.
        """
        pieces: list[Tensor] = []
        for group, data in zip(self._flat.groups, parameters, strict=True):
            pieces += [data[start:stop] for start, stop in group.spans()]
        pieces += buffers
        found = [_hash(piece) for piece in pieces]
        # In one transfer, unless the model lies on several devices.
        return torch.stack([one.to(found[0].device) for one in found]).tolist() if found else []


@cache
def _factors(device: torch.device) -> Tensor:
    """Return odd int64 numbers without a pattern, ``(_CHUNK,)``; equal on every device."""
    x = torch.arange(1, _CHUNK + 1, dtype=torch.int64, device=device) * _STEP
    x = (x ^ (x >> 29)) * _MIX
    return (x ^ (x >> 32)) | 1


def _hash(tensor: Tensor) -> Tensor:
    """Return a scalar int64; products and sums wrap round at 2**64."""
    flat = tensor.contiguous().view(-1)
    flat = torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
    bits, factors = flat.view(_INTEGERS[flat.element_size()]), _factors(flat.device)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for part in torch.split(bits, _CHUNK):
        total = total * _FOLD + (part.to(torch.int64) * factors[: part.numel()]).sum()
    return total


def _after(window: int) -> str:
    return f"after window {window}" if window >= 0 else "before the first window"
