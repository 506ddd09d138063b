"""Where parameters and gradients lie: groups of one device and dtype, side by side in memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.dlpack import from_dlpack

from evener.comm.trainable import is_dense

ALIGNMENT_BYTES = 64


@final
@dataclass(frozen=True, slots=True, eq=False)
class FlatGroup:
    """The trainable parameters of one device and dtype.

    Both buffers have one layout: view ``i`` starts at element ``offsets[i]``, a multiple of 64
    bytes; what lies between views is padding and stays zero.

    Attributes:
        parameters: In the order of the buffers: last parameter of the model first.
        names: Their names.
        part: Which part of the training they belong to; see ``FlatBuffers``.
        first_index: Number of the first of them among all of ``FlatBuffers.parameters``.
        offsets: Start of each view, in elements.
        shapes: Shape of each parameter.
        data: ``(N,)``; the parameters. ``N`` is a multiple of ``world_size``.
        grad: ``(N + T,)``; what ranks exchange: the gradients, then the ``touched`` flags, then
            padding to a multiple of ``world_size``. Empty with one rank, which exchanges nothing.
        grad_values: ``(N,)``; the front of ``grad``: the gradients alone.
        touched: ``(len(parameters),)``; part of ``grad``: 1 where this rank had a gradient; after
            an all_reduce, on how many ranks.
    """

    parameters: tuple[Parameter, ...]
    names: tuple[str, ...]
    part: int
    first_index: int
    offsets: tuple[int, ...]
    shapes: tuple[torch.Size, ...]
    data: Tensor
    grad: Tensor
    grad_values: Tensor
    touched: Tensor

    @property
    def indices(self) -> range:
        """Flat numbers of the parameters."""
        return range(self.first_index, self.first_index + len(self.parameters))

    def spans(self) -> list[tuple[int, int]]:
        """First and last-plus-one element of each view."""
        return [(o, o + p.numel()) for o, p in zip(self.offsets, self.parameters, strict=True)]


def build_group(
    members: Sequence[tuple[str, Parameter]], part: int, first: int, world_size: int
) -> FlatGroup:
    """Move parameters of one device and dtype into a group of their own; see ``FlatGroup``."""
    names, parameters = zip(*members, strict=True)
    unit = ALIGNMENT_BYTES // parameters[0].element_size()
    offsets, end = [], 0
    for parameter in parameters:
        offsets.append(end)
        end = _round_up(end + parameter.numel(), unit)
    size = _round_up(end, world_size)
    total = _round_up(size + len(parameters), world_size)
    kind = {"dtype": parameters[0].dtype, "device": parameters[0].device}
    data = torch.zeros(size, **kind)
    grad = torch.zeros(total if world_size > 1 else 0, **kind)
    for offset, parameter in zip(offsets, parameters, strict=True):
        move_parameter(parameter, data, offset)
    return FlatGroup(
        parameters=parameters,
        names=names,
        part=part,
        first_index=first,
        offsets=tuple(offsets),
        shapes=tuple(p.shape for p in parameters),
        data=data,
        grad=grad,
        grad_values=grad[:size],
        touched=grad[size : size + len(parameters)],
    )


def move_parameter(parameter: Parameter, buffer: Tensor, offset: int) -> None:
    """Copy a parameter into the buffer, and let it live there."""
    # Through DLPack it gets a storage object of its own over its part of the buffer. With that of
    # the whole buffer, safetensors.save_model refuses it and torch.save writes all of the buffer.
    part = from_dlpack(buffer[offset : offset + parameter.numel()])
    view = view_like(part, 0, parameter)
    view.copy_(parameter.data)
    parameter.data = view


def view_like(buffer: Tensor, offset: int, like: Tensor) -> Tensor:
    """A view of ``buffer`` with the shape of ``like`` and, where that is dense, its strides."""
    if is_dense(like):
        return buffer.as_strided(like.shape, like.stride(), offset)
    return buffer[offset : offset + like.numel()].view(like.shape)


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
