"""Averages and copies tensors over replicas of a model: several in a process, in many processes."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import final

import torch
from torch import Tensor
from torch.nn import Parameter

from evener.comm.base import Communicator

#: Flat buffers of as many layouts are kept: a GAN's two networks frozen in turns, a growing model.
_MAX_STAGES = 4
#: What is summed in its own precision; all else in float32, or as complex numbers of two.
_WIDE = (torch.float64, torch.complex64, torch.complex128)

#: One tensor of a layout: name, shape, dtype.
Entry = tuple[str, tuple[int, ...], torch.dtype]


@final
class ReplicaAverager:
    """Exchanges the tensors of replicas.

    Replicas of one process are added up first, then the processes exchange one flat buffer for
    each dtype. Sums are formed in float32, for float64 and complex128 in float64; half precision
    so loses nothing on the way. The buffers are kept by layout, and made anew for a model
    that has changed its size.
    """

    def __init__(self, comm: Communicator, device: torch.device) -> None:
        """Make no exchange yet.

        Args:
            comm: Joins the processes.
            device: Where this process adds up and exchanges.
        """
        self.comm = comm
        self._stage = lru_cache(_MAX_STAGES)(partial(_build, device))

    @torch.no_grad()
    def sum_gradients(
        self,
        replicas: Sequence[Mapping[str, Parameter]],
        layout: tuple[Entry, ...],
        factors: Sequence[float],
        *,
        what: str,
    ) -> "Stage":
        """Form Σ factor · gradient over all replicas; all processes call it together.

        The gradients themselves stay as they are until ``Stage.hand_out``.

        Args:
            replicas: Trainable parameters by name, a mapping for each replica of this process.
            layout: Their names, shapes and dtypes, in one order on every process.
            factors: One for each replica; with 0 its gradients are not looked at.
            what: Names the exchange in errors.
        """
        stage = self._stage(layout, wide=True)
        for buffer in stage.buffers:
            buffer.zero_()
        *views, counts = stage.views
        touched = [0.0] * len(layout)
        for parameters, factor in zip(replicas, factors, strict=True):
            for number, (name, view) in enumerate(zip(stage.names, views, strict=True)):
                gradient = parameters[name].grad
                if factor and gradient is not None:
                    view.add_(gradient.to(view.device, view.dtype), alpha=factor)
                    touched[number] += 1
        counts.copy_(torch.tensor(touched))
        self.comm.all_reduce_each([(what, buffer) for buffer in stage.buffers])
        return stage

    @torch.no_grad()
    def copy_from_first(
        self,
        replicas: Sequence[Mapping[str, Tensor]],
        layout: tuple[Entry, ...],
        *,
        what: str,
    ) -> None:
        """Give every replica the tensors of the first one, bit for bit; all call it together."""
        sources = [replicas[0][name].detach() for name, _, _ in layout]
        if self.comm.world_size > 1:
            stage = self._stage(layout, wide=False)
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


@final
@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """Flat buffers for one layout, valid until the next exchange of that layout.

    Attributes:
        names: Of the tensors.
        buffers: One for each dtype that is exchanged.
        views: A view into a buffer for each tensor, of its shape; and for a sum one more: on how
            many replicas each tensor counts.
    """

    names: tuple[str, ...]
    buffers: tuple[Tensor, ...]
    views: tuple[Tensor, ...]

    def is_finite(self) -> bool:
        """Return whether all of it is, with the same answer on every process."""
        # An inf or a NaN makes the sum not finite; a sum of large terms may overflow without one.
        return all(
            bool(torch.isfinite(buffer.sum())) or bool(torch.isfinite(buffer).all())
            for buffer in self.buffers
        )

    @torch.no_grad()
    def hand_out(self, replicas: Sequence[Mapping[str, Parameter]]) -> None:
        """Write a sum to ``.grad`` of every replica; ``None`` where no replica had a gradient."""
        *views, counts = self.views
        for parameters in replicas:
            for name, view, count in zip(self.names, views, counts.tolist(), strict=True):
                parameter = parameters[name]
                if not count:
                    parameter.grad = None
                    continue
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
                parameter.grad.copy_(view)


def _build(device: torch.device, layout: tuple[Entry, ...], *, wide: bool) -> Stage:
    kinds = [(shape, _widened(dtype) if wide else dtype) for _, shape, dtype in layout]
    if wide:
        kinds.append(((len(layout),), torch.float32))
    sizes: Counter[torch.dtype] = Counter()
    for shape, dtype in kinds:
        sizes[dtype] += math.prod(shape)
    buffers = {d: torch.zeros(size, dtype=d, device=device) for d, size in sizes.items()}
    parts = {
        d: iter(torch.split(buffer, [math.prod(shape) for shape, dtype in kinds if dtype == d]))
        for d, buffer in buffers.items()
    }
    views = tuple(next(parts[dtype]).view(shape) for shape, dtype in kinds)
    return Stage(tuple(name for name, _, _ in layout), tuple(buffers.values()), views)


def _widened(dtype: torch.dtype) -> torch.dtype:
    if dtype in _WIDE:
        return dtype
    return torch.complex64 if dtype.is_complex else torch.float32
