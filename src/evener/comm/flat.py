"""Flat buffers: parameters and gradients of one device and dtype side by side in memory.

``.data`` and ``.grad`` of each trainable parameter become views into two buffers per group, so that
one collective moves a whole group and nothing is concatenated per step.
"""

import hashlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.parameter import UninitializedParameter
from torch.utils.dlpack import from_dlpack
from torch.utils.hooks import RemovableHandle

from evener.errors import ConfigError, UsageError

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
        first_index: Number of the first of them among all of ``FlatBuffers.parameters``.
        offsets: Start of each view, in elements.
        data: ``(N,)``; the parameters. ``N`` is a multiple of ``world_size``.
        grad: ``(N + T,)``; what ranks exchange: the gradients, then the ``touched`` flags, then
            padding to a multiple of ``world_size``.
        grad_values: ``(N,)``; the front of ``grad``: what to scale and to take the norm of.
        touched: ``(len(parameters),)``; part of ``grad``: 1 where this rank had a gradient since
            ``zero_``; after an all_reduce, on how many ranks.
    """

    parameters: tuple[Parameter, ...]
    names: tuple[str, ...]
    first_index: int
    offsets: tuple[int, ...]
    data: Tensor
    grad: Tensor
    grad_values: Tensor
    touched: Tensor

    def spans(self) -> list[tuple[int, int]]:
        """First and last-plus-one element of each view."""
        return [(o, o + p.numel()) for o, p in zip(self.offsets, self.parameters, strict=True)]


@final
class FlatBuffers:
    """Flat buffers of all trainable parameters.

    The life of a window: ``zero_()``; ``attach_grads()`` before each backward and once more before
    the exchange; exchange ``group.grad`` of each group; ``mask_untouched()``; ``optimizer.step()``.

    Views keep a parameter's shape and, where its memory is dense, its strides (so also
    ``channels_last``). ``state_dict``, ``copy.deepcopy``, safetensors and optimizers see ordinary,
    disjoint tensors.

    Attributes:
        groups: One for each device and dtype, in the order in which they first occur.
        parameters: Trainable parameters of all groups, in flat order.
        names: Their names.
    """

    def __init__(self, parameters: Sequence[tuple[str, Parameter]], world_size: int) -> None:
        """Move the trainable ones of ``parameters`` into flat buffers.

        Args:
            parameters: ``(name, parameter)`` in the model's order, as from ``named_parameters()``;
                frozen ones are left alone, a parameter that occurs twice (tied) is taken once.
            world_size: Buffers are padded so that as many ranks can share them in equal parts.

        Raises:
            ConfigError: A parameter has no shape yet, or two of them overlap in memory.
        """
        if world_size < 1:
            raise ConfigError(f"world_size is {world_size}: it is the number of ranks, 1 or more")
        chosen = _choose(parameters)
        _refuse_overlap(chosen)
        by_kind: dict[tuple[torch.device, torch.dtype], list[tuple[str, Parameter]]] = {}
        for name, parameter in reversed(chosen):
            by_kind.setdefault((parameter.device, parameter.dtype), []).append((name, parameter))
        groups: list[FlatGroup] = []
        for members in by_kind.values():
            groups.append(_build(members, sum(len(g.parameters) for g in groups), world_size))
        self.groups = tuple(groups)
        self.parameters = tuple(p for g in groups for p in g.parameters)
        self.names = tuple(name for g in groups for name in g.names)
        self._index = {name: i for i, name in enumerate(self.names)}
        self._slots = [_Slot(g, k) for g in groups for k in range(len(g.parameters))]
        # Hooks run for each parameter in each backward: they set one byte here, and attach_grads
        # carries the bytes to the (perhaps CUDA) flags in one copy.
        self._seen = bytearray(len(self.parameters))
        self._written = bytes(len(self.parameters))
        self._hooks: list[RemovableHandle] = [
            p.register_post_accumulate_grad_hook(_marker(self._seen, i))  # type: ignore[no-untyped-call]  # torch leaves it untyped
            for i, p in enumerate(self.parameters)
        ]
        self.attach_grads()

    def index_of(self, name: str) -> int:
        """Flat number of the parameter ``name``; ``KeyError`` where it is not trainable."""
        return self._index[name]

    def zero_(self) -> None:
        """Set gradients and ``touched`` flags to zero, and drop a ``.grad`` that is not a view."""
        for group in self.groups:
            group.grad.zero_()
        for slot in self._slots:
            if slot.lost_grad():
                slot.attach_grad(keep=False)
        self._seen[:] = self._written = bytes(len(self.parameters))

    def attach_grads(self) -> int:
        """Make ``.grad`` and ``.data`` views again where the user broke them; write the flags.

        To be called before each backward and before the exchange. A parameter without ``.grad``
        (``zero_grad(set_to_none=True)``) gets its view back, with what it has accumulated; a
        ``.grad`` or ``.data`` that was assigned is copied into the view.

        Returns:
            How many gradients had no longer been views.

        Raises:
            UsageError: A gradient is sparse, or a parameter was moved to another device or dtype.
        """
        broken = 0
        for slot in self._slots:
            if slot.parameter.data_ptr() != slot.data_ptr:
                slot.attach_data()
            if slot.lost_grad():
                slot.attach_grad(keep=True)
                broken += 1
        if self._seen != self._written:
            self._write_touched()
        return broken

    def mask_untouched(self) -> None:
        """Set ``.grad = None`` where no rank had a gradient, so that optimizers skip it.

        To be called after the exchange and before ``optimizer.step()``; ``attach_grads`` undoes it.
        """
        for group in self.groups:
            for parameter, count in zip(group.parameters, group.touched.tolist(), strict=True):
                if not count:
                    parameter.grad = None

    def first_non_finite(self) -> int | None:
        """Flat number of the first parameter whose gradient holds an inf or a NaN, if any."""
        for group in self.groups:
            # A sum with an inf or a NaN among its terms is not finite. The reverse does not hold (a
            # sum of large finite terms may overflow), so only the views decide.
            if _sum_is_finite(group.grad_values):
                continue
            for i, (start, stop) in enumerate(group.spans()):
                if not _is_finite(group.grad[start:stop]):
                    return group.first_index + i
        return None

    def state_hash(self) -> str:
        """Hash of the bits of all parameters, in flat order; copies those that are not on the CPU.

        It does not depend on ``world_size`` or device, but on how parameters fall into groups.
        """
        digest = hashlib.blake2b(digest_size=16)
        for group in self.groups:
            # The padding that depends on world_size comes after the last view.
            digest.update(group.data[: group.spans()[-1][1]].cpu().view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def close(self) -> None:
        """Remove the hooks; parameters and gradients stay where they are."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _write_touched(self) -> None:
        self._written = bytes(self._seen)
        for group in self.groups:
            stop = group.first_index + len(group.parameters)
            flags = torch.tensor(list(self._written[group.first_index : stop]))
            group.touched.copy_(flags)


@final
class _Slot:
    """One parameter's places in the buffers.

    Pointers tell whether it still lies there: ``p.grad.data = x`` and ``model.to(...)`` change the
    tensor behind a view that is the same Python object as before.
    """

    __slots__ = ("_group", "_number", "data_ptr", "grad", "grad_ptr", "parameter")

    def __init__(self, group: FlatGroup, number: int) -> None:
        self._group = group
        self._number = number
        self.parameter = group.parameters[number]
        self.data_ptr = self.parameter.data_ptr()
        self.grad = self._view(group.grad)
        self.grad_ptr = self.grad.data_ptr()

    def lost_grad(self) -> bool:
        """Whether ``.grad`` is no longer the view."""
        return self.parameter.grad is not self.grad or self.grad.data_ptr() != self.grad_ptr

    def attach_grad(self, *, keep: bool) -> None:
        """Make ``.grad`` the view; with ``keep``, holding what was assigned instead of it."""
        foreign = self.parameter.grad
        if foreign is not None and foreign.layout is not torch.strided:
            raise UsageError(
                f"the gradient of {self._group.names[self._number]!r} is sparse: ranks exchange "
                "dense gradients; use sparse=False in its layer"
            )
        held = self.grad  # is foreign itself where its .data was replaced
        if held.data_ptr() != self.grad_ptr or held.stride() != self.parameter.stride():
            self.grad = self._view(self._group.grad)
        if foreign is not None and foreign is not self.grad and keep:
            aliased = foreign.data_ptr() == self.grad_ptr  # the view with other strides
            self.grad.copy_(foreign.detach().clone() if aliased else foreign.detach())
        self.parameter.grad = self.grad

    def attach_data(self) -> None:
        """Copy what was assigned to ``.data`` into the buffer, and make it the view again."""
        now, buffer, name = self.parameter.data, self._group.data, self._group.names[self._number]
        if (now.device, now.dtype) != (buffer.device, buffer.dtype):
            raise UsageError(
                f"parameter {name!r} was on {buffer.device} as {buffer.dtype} when the team was "
                f"set up and is now on {now.device} as {now.dtype}: move and convert the model "
                "before Ddp.setup"
            )
        if now.shape != self.grad.shape:
            raise UsageError(
                f"parameter {name!r} had shape {tuple(self.grad.shape)} when the team was set up "
                f"and has {tuple(now.shape)} now: change the model before Ddp.setup"
            )
        _move(self.parameter, buffer, self._group.offsets[self._number])
        self.attach_grad(keep=True)  # its strides follow the parameter's

    def _view(self, buffer: Tensor) -> Tensor:
        return _view(buffer, self._group.offsets[self._number], self.parameter)


def _choose(parameters: Iterable[tuple[str, Parameter]]) -> list[tuple[str, Parameter]]:
    chosen: dict[int, tuple[str, Parameter]] = {}
    for name, parameter in parameters:
        if parameter.requires_grad and id(parameter) not in chosen:
            if isinstance(parameter, UninitializedParameter) or parameter.is_meta:
                raise ConfigError(
                    f"parameter {name!r} has no values yet (it is lazy, or on the meta device): "
                    "materialise the model, for lazy modules with one batch, before Ddp.setup"
                )
            chosen[id(parameter)] = (name, parameter)
    return list(chosen.values())


def _refuse_overlap(chosen: Sequence[tuple[str, Parameter]]) -> None:
    # Tying by shared memory rather than by one Parameter would come apart here without a word.
    spans = sorted(
        (str(p.device), p.data_ptr(), p.data_ptr() + p.numel() * p.element_size(), name)
        for name, p in chosen
        if p.numel() and _is_dense(p)
    )
    for (device, _, stop, name), (other_device, start, _, other) in itertools.pairwise(spans):
        if device == other_device and start < stop:
            raise ConfigError(
                f"parameters {name!r} and {other!r} share memory without being one Parameter: tie "
                "them by assigning the same Parameter object to both"
            )


def _build(members: Sequence[tuple[str, Parameter]], first: int, world_size: int) -> FlatGroup:
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
    grad = torch.zeros(total, **kind)
    for offset, parameter in zip(offsets, parameters, strict=True):
        _move(parameter, data, offset)
    return FlatGroup(
        parameters=parameters,
        names=names,
        first_index=first,
        offsets=tuple(offsets),
        data=data,
        grad=grad,
        grad_values=grad[:size],
        touched=grad[size : size + len(parameters)],
    )


def _move(parameter: Parameter, buffer: Tensor, offset: int) -> None:
    """Copy a parameter into the buffer, and let it live there."""
    # Through DLPack it gets a storage object of its own over its part of the buffer. With that of
    # the whole buffer, safetensors.save_model refuses it and torch.save writes all of the buffer.
    part = from_dlpack(buffer[offset : offset + parameter.numel()])
    view = _view(part, 0, parameter)
    view.copy_(parameter.data)
    parameter.data = view


def _view(buffer: Tensor, offset: int, like: Tensor) -> Tensor:
    if _is_dense(like):
        return buffer.as_strided(like.shape, like.stride(), offset)
    return buffer[offset : offset + like.numel()].view(like.shape)


def _is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill ``numel`` places of memory, each once, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _is_finite(tensor: Tensor) -> bool:
    return _sum_is_finite(tensor) or bool(torch.isfinite(tensor).all())


def _sum_is_finite(tensor: Tensor) -> bool:
    wide = torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.dtype
    return bool(torch.isfinite(tensor.sum(dtype=wide)))


def _marker(seen: bytearray, index: int) -> Callable[[Tensor], None]:
    def mark(_: Tensor) -> None:
        seen[index] = 1

    return mark


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
