"""Looks whether all ranks hold the same: a hash of each tensor, formed where it lies."""

import struct
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from evener.averaging.buffers import BufferAverager
from evener.comm.base import Communicator
from evener.comm.flat import FlatBuffers
from evener.errors import ProtocolError, ReplicasDifferError

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: Elements that are hashed at once: with their factors they fit into a core's cache.
_CHUNK = 1 << 17
_MODULUS = 1 << 64
# Odd numbers near 2**64 divided by the golden ratio, and others without a pattern, as int64.
_STEP, _MIX, _FOLD = -7046029254386353131, -4658895280553007687, 1181783497276652981
_WHY_PARAMETER = (
    "Ranks that start alike and apply the same averages stay alike, so something else has written "
    "to the weights of one rank, an optimizer steps by rank-dependent rules, or its memory is "
    "faulty. Remedy: change weights on all ranks alike or not at all"
)
_WHY_BUFFER = (
    "A buffer that PyTorch marks as written is averaged at the end of the window, so something has "
    "written to this one without a mark (through .data, or F.batch_norm on statistics of one's own "
    "without a counter), or memory is faulty. Remedy: write to buffers in place, or assign them"
)


class ReplicaCheck:
    """Compares by hashes what all ranks should hold alike: trainable parameters, and buffers.

    A tensor's hash is Σ bits · factor modulo 2**64 over its elements, with an odd factor for each
    place: integers only, so that it does not depend on the device or the order of summing. Any
    difference in a single element changes it; differences in several leave it as it is by chance
    alone, once in 2**64. It guards against faults, not against forgery.

    Args:
        model: Its order is that in which differences are looked for.
        flat: Its trainable parameters.
        buffers: Those of its buffers that are made equal.
        every: Windows after which to compare; 0 for never.

    Attributes:
        every: As given.
    """

    def __init__(
        self, model: nn.Module, flat: FlatBuffers, buffers: BufferAverager, *, every: int = 0
    ) -> None:
        self._flat = flat
        self._buffers = buffers
        self.every = every
        self._places = {name: place for place, name in enumerate(_in_order(model))}
        self._factors: dict[torch.device, Tensor] = {}

    def is_due(self, window: int) -> bool:
        """Return whether to compare after this window, wherever in an epoch it is."""
        return self.every > 0 and (window + 1) % self.every == 0

    def compare(
        self,
        comm: Communicator,
        window: int,
        parameters: Sequence[Tensor] | None = None,
        buffers: Sequence[Tensor] | None = None,
    ) -> None:
        """Compare hashes over ranks; all ranks call it together.

        Eight bytes a tensor travel from each rank.

        Args:
            comm: The ranks.
            window: The window that was applied last, for messages; -1 before the first.
            parameters: Instead of the model's, what is laid out as ``FlatGroup.data`` of each
                group.
            buffers: Instead of ``BufferAverager.committed``, tensors in its order.

        Raises:
            ReplicasDifferError: On every rank: the first parameter or buffer, in the order of the
                model, that is not the same on all of them.
            ProtocolError: Ranks compare different numbers of tensors.
        """
        if comm.world_size == 1:
            return
        own = self.hashes(parameters, buffers)
        what = f"hash of parameters and buffers {_after(window)}"
        packed = comm.all_gather_bytes(struct.pack(f"={len(own)}q", *own), what=what)
        if len(set(packed)) == 1:
            return
        table = [struct.unpack(f"={len(p) // 8}q", p) for p in packed]
        if len({len(hashes) for hashes in table}) > 1:
            counts = ", ".join(str(len(hashes)) for hashes in table)
            raise ProtocolError(
                f"ranks compare different numbers of parameters and buffers ({counts}): some have "
                "been made trainable, or added, on some ranks only"
            )
        names = [*self._flat.names, *self._buffers.names]
        for index in sorted(range(len(names)), key=lambda i: self._places[names[i]]):
            found = [hashes[index] for hashes in table]
            if len(set(found)) > 1:
                is_buffer = index >= len(self._flat.names)
                holders = dict(zip(comm.numbers, found, strict=True))
                raise _difference(names[index], holders, window, is_buffer=is_buffer)

    @torch.no_grad()
    def hashes(
        self,
        parameters: Sequence[Tensor] | None = None,
        buffers: Sequence[Tensor] | None = None,
    ) -> list[int]:
        """Return a 64-bit hash of each parameter's bits, in flat order, then of each buffer's.

        They are formed where the tensors lie; one transfer from each device.

        Args:
            parameters: As in ``compare``.
            buffers: As in ``compare``.
        """
        groups, pieces = self._flat.groups, []
        for group, data in zip(groups, parameters or [g.data for g in groups], strict=True):
            bits = _bits(data)
            wide = bits.numel() // max(1, data.numel())  # a complex number is two
            pieces += [bits[wide * a : wide * b] for a, b in group.spans()]
        chosen = self._buffers.committed() if buffers is None else buffers
        pieces += [_bits(buffer.contiguous().view(-1)) for buffer in chosen]
        result = [0] * len(pieces)
        for device in {piece.device for piece in pieces}:
            numbers = [n for n, piece in enumerate(pieces) if piece.device == device]
            if device not in self._factors:
                self._factors[device] = _factors(device)
            factors = self._factors[device]
            found = torch.stack([_hash(pieces[n], factors) for n in numbers]).tolist()
            for number, value in zip(numbers, found, strict=True):
                result[number] = value
        return result


def _factors(device: torch.device) -> Tensor:
    """Return odd int64 numbers without a pattern, ``(_CHUNK,)``; equal on every device."""
    x = torch.arange(1, _CHUNK + 1, dtype=torch.int64, device=device) * _STEP
    x = (x ^ (x >> 29)) * _MIX
    return (x ^ (x >> 32)) | 1


def _bits(data: Tensor) -> Tensor:
    flat = torch.view_as_real(data).view(-1) if data.is_complex() else data
    return flat.view(_INTEGERS[flat.element_size()])


def _hash(bits: Tensor, factors: Tensor) -> Tensor:
    """Return a scalar int64; products and sums wrap round at 2**64."""
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for part in torch.split(bits, _CHUNK):
        total = total * _FOLD + (part.to(torch.int64) * factors[: part.numel()]).sum()
    return total


def _in_order(model: nn.Module) -> list[str]:
    """Return the names of parameters and buffers, module by module; all names of a shared one."""
    return [
        f"{prefix}.{key}" if prefix else key
        for prefix, module in model.named_modules()
        for key in (*module._parameters, *module._buffers)
    ]


def _after(window: int) -> str:
    return f"after window {window}" if window >= 0 else "before the first window"


def _difference(
    name: str, values: Mapping[int, int], window: int, *, is_buffer: bool
) -> ReplicasDifferError:
    """Return the error; ``values`` are the hashes by rank."""
    most, count = Counter(values.values()).most_common(1)[0]
    usual = most if count > 1 else next(iter(values.values()))
    rank = next(r for r, value in values.items() if value != usual)
    other = next(r for r, value in values.items() if value == usual)
    return ReplicasDifferError(
        f"{_after(window)}, {'buffer' if is_buffer else 'parameter'} {name!r} of rank {rank} is "
        f"not that of rank {other} (hashes {values[rank] % _MODULUS:016x} and "
        f"{usual % _MODULUS:016x}). {_WHY_BUFFER if is_buffer else _WHY_PARAMETER}, and resume "
        "from the last checkpoint",
        rank=rank,
        parameter=name,
        window=window,
    )
