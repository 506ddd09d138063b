"""Where parameters and gradients lie: groups of one device and dtype, side by side in memory."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, final

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.dlpack import from_dlpack

from evener.comm.base import Communicator
from evener.comm.trainable import is_dense
from evener.devices import kind_of

ALIGNMENT_BYTES = 64
#: With up to so many ranks any number of them can share a buffer in equal parts: 840 is divisible
#: by each of 1 to 8.
_MOST_PARTS: Final = 8

_RUN_BYTES = {"cpu": 2**20}
"""What is moved at once: on a CPU, what its cache still holds; elsewhere, few calls count."""


@final
@dataclass(frozen=True, slots=True)
class Bucket:
    """A part of a group's gradients that is exchanged by a call of its own.

    Attributes:
        label: What it belongs to, such as ``"block 3"``; empty where no buckets were asked for.
        number: Its place in the order of exchange, which is the same over all groups.
        start: First element in ``FlatGroup.grad``.
        stop: Last-plus-one element there. The last bucket of a group holds the flags, too.
        sizes: Elements of each of its parameters, by name, in the order of the buffer.
    """

    label: str
    number: int
    start: int
    stop: int
    sizes: Mapping[str, int]


@final
@dataclass(frozen=True, slots=True, eq=False)
class FlatGroup:
    """The trainable parameters of one device and dtype.

    Both buffers have one layout: view ``i`` starts at element ``offsets[i]``, a multiple of 64
    bytes; what lies between views is padding and stays zero.

    Attributes:
        parameters: In the order of the buffers: bucket by bucket, and in each, the last parameter
            of the model first.
        names: Their names.
        part: Which part of the training they belong to; see ``FlatBuffers``.
        indices: Their flat numbers: their places in ``FlatBuffers.parameters``.
        offsets: Start of each view, in elements.
        shapes: Shape of each parameter.
        data: ``(N,)``; the parameters. ``N`` is a multiple of ``world_size``.
        grad: ``(N + T,)``; what ranks exchange: the gradients, then the ``touched`` flags, then
            padding to a multiple of ``world_size``. Empty with one rank, which exchanges nothing.
        grad_values: ``(N,)``; the front of ``grad``: the gradients alone.
        touched: ``(len(parameters),)``; part of ``grad``: 1 where this rank had a gradient; after
            an all_reduce, on how many ranks.
        buckets: What is exchanged at once; together, all of ``grad``.
    """

    parameters: tuple[Parameter, ...]
    names: tuple[str, ...]
    part: int
    indices: range
    offsets: tuple[int, ...]
    shapes: tuple[torch.Size, ...]
    data: Tensor
    grad: Tensor
    grad_values: Tensor
    touched: Tensor
    buckets: tuple[Bucket, ...]

    def runs(self) -> list[range]:
        """Return the flat numbers of parameters whose gradients are moved at once."""
        device = self.grad.device
        most = _RUN_BYTES.get(device.type, 2**25)
        runs, first, size = [], self.indices.start, 0
        for i, parameter in zip(self.indices, self.parameters, strict=True):
            size += parameter.numel() * parameter.element_size()
            if size >= most or i + 1 == self.indices.stop:
                runs.append(range(first, i + 1))
                first, size = i + 1, 0
        return runs

    def with_gradients_in(self, comm: Communicator) -> "FlatGroup":
        """Return the same group with fresh memory of ``comm`` for gradients, all zero."""
        grad = comm.allocate(self.grad.numel(), self.grad.dtype, self.grad.device)
        size = self.data.numel()
        touched = grad[size : size + len(self.parameters)]
        return replace(self, grad=grad, grad_values=grad[:size], touched=touched)

    def spans(self) -> list[tuple[int, int]]:
        """Return the first and last-plus-one element of each view."""
        return [(o, o + p.numel()) for o, p in zip(self.offsets, self.parameters, strict=True)]


def build_group(
    members: Sequence[tuple[str, Parameter]],
    part: int,
    first: int,
    world_size: int,
    labels: Sequence[tuple[int, str]],
    comm: Communicator,
    *,
    shares_data: bool = False,
) -> FlatGroup:
    """Move parameters of one device and dtype into a group of their own; see ``FlatGroup``.

    Args:
        members: Their names and parameters, in the order of the buffers.
        part: See ``FlatGroup``.
        first: Flat number of the first of them.
        world_size: Number of ranks.
        labels: Of each member, number and label of its bucket; the numbers do not fall.
        comm: In whose memory gradients lie.
        shares_data: Whether parameters lie there, too.
    """
    names, parameters = zip(*members, strict=True)
    unit = ALIGNMENT_BYTES // parameters[0].element_size()
    offsets, end = [], 0
    for parameter in parameters:
        offsets.append(end)
        end = _round_up(end + parameter.numel(), unit)
    # In equal parts also for those that remain when ranks are parked, where that costs little.
    most = world_size if world_size > _MOST_PARTS else math.lcm(*range(1, world_size + 1))
    size = _round_up(end, most)
    total = _round_up(size + len(parameters), most)
    dtype, device = parameters[0].dtype, parameters[0].device
    if shares_data:
        data = comm.allocate(size, dtype, device)
    else:
        data = torch.zeros(size, dtype=dtype, device=device)
    grad = comm.allocate(total if world_size > 1 else 0, dtype, device)
    for offset, parameter in zip(offsets, parameters, strict=True):
        move_parameter(parameter, data, offset)
    return FlatGroup(
        parameters=parameters,
        names=names,
        part=part,
        indices=range(first, first + len(parameters)),
        offsets=tuple(offsets),
        shapes=tuple(p.shape for p in parameters),
        data=data,
        grad=grad,
        grad_values=grad[:size],
        touched=grad[size : size + len(parameters)],
        buckets=_cut(names, parameters, offsets, labels, total),
    )


def _cut(
    names: Sequence[str],
    parameters: Sequence[Parameter],
    offsets: Sequence[int],
    labels: Sequence[tuple[int, str]],
    total: int,
) -> tuple[Bucket, ...]:
    """Cut a group of ``total`` elements where the label changes."""
    firsts = [i for i, label in enumerate(labels) if i == 0 or label != labels[i - 1]]
    buckets = []
    for first, stop in zip(firsts, [*firsts[1:], len(names)], strict=True):
        number, label = labels[first]
        sizes = {
            n: p.numel() for n, p in zip(names[first:stop], parameters[first:stop], strict=True)
        }
        end = offsets[stop] if stop < len(names) else total
        buckets.append(Bucket(label, number, offsets[first], end, sizes))
    return tuple(buckets)


def move_parameter(
    parameter: Parameter, buffer: Tensor, offset: int, like: Tensor | None = None
) -> None:
    """Copy a parameter into the buffer, and let it live there.

    Args:
        parameter: The parameter.
        buffer: The buffer.
        offset: Its first element there.
        like: What has the order in memory that it gets; its own by default.
    """
    # Through DLPack it gets a storage object of its own over its part of the buffer. With that of
    # the whole buffer, safetensors.save_model refuses it and torch.save writes all of the buffer.
    part = buffer[offset : offset + parameter.numel()]
    if kind_of(buffer.device).has_addresses:
        part = from_dlpack(part)
    view = view_like(part, 0, parameter if like is None else like)
    view.copy_(parameter.data)
    parameter.data = view


def view_like(buffer: Tensor, offset: int, like: Tensor) -> Tensor:
    """Return a view of ``buffer`` in the shape of ``like``, with its strides where it is dense."""
    if is_dense(like):
        return buffer.as_strided(like.shape, like.stride(), buffer.storage_offset() + offset)
    return buffer[offset : offset + like.numel()].view(like.shape)


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
