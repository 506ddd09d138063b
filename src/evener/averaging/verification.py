"""Looks whether all ranks hold the same parameters: a hash of each, formed where it lies."""

import struct
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from evener.comm.base import Communicator
from evener.comm.flat import FlatBuffers
from evener.errors import ReplicasDifferError

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: Elements that are hashed at once: with their factors they fit into a core's cache.
_CHUNK = 1 << 17
_MODULUS = 1 << 64
# Odd numbers near 2**64 divided by the golden ratio, and others without a pattern, as int64.
_STEP, _MIX, _FOLD = -7046029254386353131, -4658895280553007687, 1181783497276652981


class ReplicaCheck:
    """Compares the trainable parameters of all ranks by hashes.

    A parameter's hash is Σ bits · factor modulo 2**64 over its elements, with an odd factor for
    each place: integers only, so that it does not depend on the device or the order of summing. Any
    difference in a single element changes it; differences in several leave it as it is by chance
    alone, once in 2**64. It guards against faults, not against forgery.

    Args:
        flat: The trainable parameters.
    """

    def __init__(self, flat: FlatBuffers) -> None:
        self._flat = flat
        self._factors: dict[torch.device, Tensor] = {}

    def compare(
        self, comm: Communicator, window: int, values: Sequence[Tensor] | None = None
    ) -> None:
        """Compares hashes over ranks; all ranks call it together.

        Sixteen bytes a rank travel, and one number per parameter only if those differ.

        Args:
            comm: The ranks.
            window: The window that was applied last, for messages.
            values: Instead of the parameters, what is laid out as ``FlatGroup.data`` of each group.

        Raises:
            ReplicasDifferError: On every rank: the first parameter, in the order of the model, that
                is not the same on all of them.
        """
        if comm.world_size == 1:
            return
        own = self.hashes(values)
        what = f"hash of the parameters after window {window}"
        rows = comm.all_gather_rows(_halves(_fold(own)), what=what)
        if all(row == rows[0] for row in rows):
            return
        packed = comm.all_gather_bytes(struct.pack(f"={len(own)}q", *own), what=what)
        table = [struct.unpack(f"={len(p) // 8}q", p) for p in packed]
        for index in self._flat.in_model_order():
            found = [row[index] for row in table]
            if len(set(found)) > 1:
                raise _difference(self._flat.names[index], found, window)

    @torch.no_grad()
    def hashes(self, values: Sequence[Tensor] | None = None) -> list[int]:
        """A 64-bit hash of each parameter's bits, in flat order; one transfer from each device.

        Args:
            values: As in ``compare``.
        """
        groups = self._flat.groups
        result: list[int] = []
        for group, data in zip(groups, values or [g.data for g in groups], strict=True):
            factors = self._factors_on(data.device)
            bits = _bits(data)
            wide = bits.numel() // max(1, data.numel())  # a complex number is two
            parts = [_hash(bits[wide * a : wide * b], factors) for a, b in group.spans()]
            result += torch.stack(parts).tolist()
        return result

    def _factors_on(self, device: torch.device) -> Tensor:
        if device not in self._factors:
            self._factors[device] = _factors(device)
        return self._factors[device]


def _factors(device: torch.device) -> Tensor:
    """Odd numbers without a pattern, int64 of shape ``(_CHUNK,)``; the same on every device."""
    x = torch.arange(1, _CHUNK + 1, dtype=torch.int64, device=device) * _STEP
    x = (x ^ (x >> 29)) * _MIX
    return (x ^ (x >> 32)) | 1


def _bits(data: Tensor) -> Tensor:
    flat = torch.view_as_real(data).view(-1) if data.is_complex() else data
    return flat.view(_INTEGERS[flat.element_size()])


def _hash(bits: Tensor, factors: Tensor) -> Tensor:
    """Scalar int64; products and sums wrap round at 2**64."""
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for part in torch.split(bits, _CHUNK):
        total = total * _FOLD + (part.to(torch.int64) * factors[: part.numel()]).sum()
    return total


def _fold(hashes: Sequence[int]) -> int:
    total = len(hashes)
    for value in hashes:
        total = (total * (_FOLD % _MODULUS) + value) % _MODULUS
    return total


def _halves(number: int) -> list[float]:
    """A number below 2**64 as two that float64 holds exactly."""
    return [float(number >> 32), float(number & 0xFFFFFFFF)]


def _difference(name: str, values: Sequence[int], window: int) -> ReplicasDifferError:
    most, count = Counter(values).most_common(1)[0]
    usual = most if count > 1 else values[0]
    rank = next(r for r, value in enumerate(values) if value != usual)
    other = next(r for r, value in enumerate(values) if value == usual)
    return ReplicasDifferError(
        f"after window {window}, parameter {name!r} of rank {rank} is not that of rank {other} "
        f"(hashes {values[rank] % _MODULUS:016x} and {usual % _MODULUS:016x}). Ranks that start "
        "alike and apply the same averages stay alike, so something else has written to the "
        "weights of one rank, an optimizer steps by rank-dependent rules, or its memory is "
        "faulty. Remedy: change weights on all ranks alike or not at all, and go on from the "
        "last checkpoint",
        rank=rank,
        parameter=name,
        window=window,
    )
