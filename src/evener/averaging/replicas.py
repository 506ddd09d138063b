"""Averages and copies tensors over replicas of a model: several in a process, in many processes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch.nn import Parameter

from evener.comm.base import Communicator

#: Flat buffers of as many layouts are kept: a GAN's two networks frozen in turns, a growing model.
_MAX_STAGES = 4
_ALIGNMENT = 16  # elements; complex views need an even start

#: One tensor of a layout: name, shape, dtype.
Entry = tuple[str, tuple[int, ...], torch.dtype]


@final
@dataclass(frozen=True, slots=True, eq=False)
class _Stage:
    """Flat buffers for one layout.

    Attributes:
        buffers: One for each dtype on the wire.
        views: A view into a buffer for each tensor, of its shape.
        flags: ``(len(views),)``, part of the first buffer: on how many processes a tensor counts.
    """

    buffers: tuple[Tensor, ...]
    views: tuple[Tensor, ...]
    flags: Tensor


@final
class ReplicaAverager:
    """Exchanges the tensors of replicas.

    Replicas of one process are added up first, then the processes exchange one flat buffer for
    each dtype. Sums are formed in float32, for float64 and complex128 in float64; half precision
    so loses nothing on the way. The buffers are kept by layout, and made anew for a model
    that has changed its size.
    """

    def __init__(self, comm: Communicator, device: torch.device) -> None:
        """Makes no exchange yet.

        Args:
            comm: Joins the processes.
            device: Where this process adds up and exchanges.
        """
        self.comm = comm
        self._device = device
        self._stages: dict[tuple[str, tuple[Entry, ...]], _Stage] = {}

    @torch.no_grad()
    def sum_gradients(
        self,
        replicas: Sequence[Mapping[str, Parameter]],
        layout: tuple[Entry, ...],
        factors: Sequence[float],
        *,
        what: str,
    ) -> "Averaged":
        """Forms Σ factor · gradient over all replicas; all processes call it together.

        The gradients themselves stay as they are until ``Averaged.hand_out``.

        Args:
            replicas: Trainable parameters by name, a mapping for each replica of this process.
            layout: Their names, shapes and dtypes, in one order on every process.
            factors: One for each replica; with 0 its gradients are not looked at.
            what: Names the exchange in errors.
        """
        stage = self._stage("sum", layout)
        for buffer in stage.buffers:
            buffer.zero_()
        counts = [0.0] * len(layout)
        for parameters, factor in zip(replicas, factors, strict=True):
            if factor == 0:
                continue
            for number, (name, _, _) in enumerate(layout):
                gradient = parameters[name].grad
                if gradient is not None:
                    view = stage.views[number]
                    view.add_(gradient.to(view.device, view.dtype), alpha=factor)
                    counts[number] += 1
        stage.flags.copy_(torch.tensor(counts))
        for buffer in stage.buffers:
            self.comm.all_reduce(buffer, what=what)
        return Averaged(stage, layout)

    @torch.no_grad()
    def copy_from_first(
        self,
        replicas: Sequence[Mapping[str, Tensor]],
        layout: tuple[Entry, ...],
        *,
        what: str,
    ) -> None:
        """Gives every replica the tensors of the first one, bit for bit; all call it together."""
        sources = [replicas[0][name].detach() for name, _, _ in layout]
        if self.comm.world_size > 1:
            stage = self._stage("copy", layout)
            if self.comm.rank == 0:
                for view, source in zip(stage.views, sources, strict=True):
                    view.copy_(source)
            for buffer in stage.buffers:
                self.comm.broadcast(buffer, 0, what=what)
            sources = list(stage.views)
        for number, tensors in enumerate(replicas):
            if number or self.comm.rank:
                for (name, _, _), source in zip(layout, sources, strict=True):
                    tensors[name].copy_(source)

    def _stage(self, purpose: str, layout: tuple[Entry, ...]) -> _Stage:
        key = (purpose, layout)
        stage = self._stages.pop(key, None) or _build(purpose, layout, self._device)
        self._stages[key] = stage  # at the end: the one used last
        while len(self._stages) > _MAX_STAGES:
            del self._stages[next(iter(self._stages))]
        return stage


@final
class Averaged:
    """A sum over all replicas that has not been handed out yet."""

    def __init__(self, stage: _Stage, layout: tuple[Entry, ...]) -> None:
        self._stage = stage
        self._layout = layout

    def is_finite(self) -> bool:
        """Whether it is, with the same answer on every process."""
        # An inf or a NaN makes the sum not finite; a sum of large terms may overflow without one.
        return all(
            bool(torch.isfinite(buffer.sum())) or bool(torch.isfinite(buffer).all())
            for buffer in self._stage.buffers
        )

    @torch.no_grad()
    def hand_out(self, replicas: Sequence[Mapping[str, Parameter]]) -> None:
        """Writes it to ``.grad`` of every replica; ``None`` where no replica had a gradient."""
        stage = self._stage
        counts = stage.flags.tolist()
        for parameters in replicas:
            for (name, _, _), view, count in zip(self._layout, stage.views, counts, strict=True):
                parameter = parameters[name]
                if not count:
                    parameter.grad = None
                    continue
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
                parameter.grad.copy_(view)


def _build(purpose: str, layout: tuple[Entry, ...], device: torch.device) -> _Stage:
    wires = [_wire(dtype) if purpose == "sum" else dtype for _, _, dtype in layout]
    sizes: dict[torch.dtype, int] = {}
    places: list[tuple[torch.dtype, int, int]] = []
    for (_, shape, dtype), wire in zip(layout, wires, strict=True):
        numel = torch.Size(shape).numel() * (2 if dtype.is_complex and wire != dtype else 1)
        offset = sizes.get(wire, 0)
        places.append((wire, offset, numel))
        sizes[wire] = -(-(offset + numel) // _ALIGNMENT) * _ALIGNMENT
    num_flags = len(layout) if purpose == "sum" else 0
    first = next(iter(sizes), torch.float32)
    flags_at = sizes.setdefault(first, 0)
    sizes[first] += num_flags
    buffers = {dtype: torch.zeros(n, dtype=dtype, device=device) for dtype, n in sizes.items()}
    views = []
    for (_, shape, dtype), (wire, offset, numel) in zip(layout, places, strict=True):
        part = buffers[wire][offset : offset + numel]
        if dtype.is_complex and wire != dtype:
            views.append(torch.view_as_complex(part.view(*shape, 2)))
        else:
            views.append(part.view(shape))
    flags = buffers[first][flags_at : flags_at + num_flags]
    return _Stage(tuple(buffers.values()), tuple(views), flags)


def _wire(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32
