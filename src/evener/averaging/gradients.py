"""Averages gradients by the one weight rule: Σ weight · ∇loss over ranks, divided by Σ weight."""

import math
from collections.abc import Iterable, Iterator, Sequence

import torch

from evener.comm.base import Communicator
from evener.comm.flat import FlatBuffers
from evener.devices import DeviceQueue, float64_device
from evener.errors import UsageError
from evener.protocol.machine import check_weight

_HALF = (torch.float16, torch.bfloat16)


class Reading:
    """Numbers that devices compute, to be read by the host when they are due.

    Args:
        parts: Tensors of at most one dimension.
        queue: The queue of the device on which all of them are, if it has milestones. The copy into
            host memory is queued at once. So reading waits for what was queued before, and not for
            what comes after.
    """

    def __init__(self, parts: Sequence[torch.Tensor], queue: DeviceQueue | None = None) -> None:
        self._parts = list(parts)
        self._arrival = None
        if queue is not None and parts:
            whole = torch.cat([part.reshape(-1) for part in parts])
            # Into page-locked memory, which torch keeps for the next one.
            host = whole.to("cpu", non_blocking=True)
            self._parts = list(torch.split(host, [part.numel() for part in parts]))
            self._arrival = queue.mark()

    def read(self) -> list[list[float]]:
        """Return the numbers of each part; wait until they are there."""
        if self._arrival is not None:
            self._arrival.wait()
        numbers: dict[torch.device, Iterator[float]] = {}
        for device in {part.device for part in self._parts}:
            own = [part.reshape(-1) for part in self._parts if part.device == device]
            numbers[device] = iter(torch.cat(own).tolist())  # one transfer
        return [[next(numbers[part.device]) for _ in range(part.numel())] for part in self._parts]


class GradientAverager:
    """Sums the ranks' gradients and divides them by the window's total weight.

    Each rank accumulates ``weight / scale · ∇loss``. ``scale`` is a power of two near the weight
    that is expected of the whole window, the same on every rank, so that sums neither overflow in
    half precision nor lose bits. After the exchange one multiplication by ``scale / Σ weight``, in
    the same pass as clipping, gives the gradient of the mean loss. No other scaling exists.

    Buckets leave in the order that ``flat`` gives them.

    Args:
        flat: The ranks' buffers.
        comm: The ranks.

    Attributes:
        own_norm: 2-norm of this rank's gradients, as ``judge`` has found it; 0 without any.
    """

    def __init__(self, flat: FlatBuffers, comm: Communicator) -> None:
        self._flat = flat
        self.comm = comm
        self.own_norm = 0.0
        self._is_known = False

    def use(self, comm: Communicator) -> None:
        """Go on with other ranks."""
        self.comm = comm

    def gather(self, part: int | None = None) -> list[torch.Tensor]:
        """Make this rank's gradients ready for ``average``.

        Args:
            part: The part of ``flat`` that is averaged, here and below; all of it by default.

        Returns:
            Norms of gradients, one tensor for each group that has some, on the group's device.
            ``judge`` takes their values: the caller reads them together with others.
        """
        self._is_known = False
        if not self._flat.gather(part):
            return []
        return [
            _norms(tensors)
            for group in self._flat.groups_of(part)
            if (tensors := self._flat.gradients(group))
        ]

    def judge(self, norms: Iterable[Iterable[float]], part: int | None = None) -> int | None:
        """Say whether this rank's gradients are finite.

        Args:
            norms: The values of what ``gather`` returned.
            part: As in ``gather``.

        Returns:
            Flat number of the first parameter whose gradient holds an inf or a NaN, if any.
        """
        # One pass tells both: with one rank this norm is the one that average returns.
        self.own_norm, self._is_known = _root(norms), True
        if math.isfinite(self.own_norm):
            return None
        self.own_norm = self._exact_norm(part)
        return None if math.isfinite(self.own_norm) else self._flat.first_non_finite(part)

    def average(
        self,
        scale: float,
        total_weight: float,
        part: int | None = None,
        *,
        what: str,
        max_norm: float | None = None,
    ) -> float:
        """Replace the gradients by the weighted mean over ranks; all ranks call it together.

        Clipping acts after averaging, on the mean, hence the same on every rank.

        Args:
            scale: What each rank's weights were divided by before backward.
            total_weight: Σ weight over ranks and micro-batches; larger than 0.
            part: As in ``gather``.
            what: Names the exchange in errors.
            max_norm: Scale the mean down to this 2-norm, as ``clip_grad_norm_`` does.

        Returns:
            The 2-norm of the averaged gradient, over all parameters, before clipping. Not finite
            when the sum over ranks overflowed; the gradients are then of no use.

        Raises:
            UsageError: The total is not finite or not above 0: such a window is not applied.
        """
        if not 0.0 < total_weight < math.inf:
            check_weight(total_weight, owner="the window")
            raise UsageError("a window of weight 0 has no mean gradient: it must not be applied")
        factor = scale / total_weight
        if self.comm.world_size > 1:
            self.comm.all_reduce_each(
                [
                    (
                        f"gradients of {what}" + (f": {bucket.label}" if bucket.label else ""),
                        group.grad[bucket.start : bucket.stop],
                    )
                    for group, bucket in self._flat.buckets_of(part)
                ]
            )
            self._is_known = False
        norm = factor * (self.own_norm if self._is_known else self._norm(part))
        self._is_known = False
        if math.isfinite(norm):
            if max_norm is not None:
                factor *= min(1.0, max_norm / (norm + 1e-6))
            if factor != 1.0:
                with torch.no_grad():
                    for group in self._flat.groups_of(part):
                        if tensors := self._flat.gradients(group):
                            torch._foreach_mul_(tensors, factor)
        return norm

    def _norm(self, part: int | None) -> float:
        """2-norm of the gradients as they are; finite whenever they are."""
        norm = norm_of([self._flat.gradients(group) for group in self._flat.groups_of(part)])
        return norm if math.isfinite(norm) else self._exact_norm(part)

    def _exact_norm(self, part: int | None) -> float:
        """Return it from sums in float64, which do not overflow."""
        groups = [self._flat.gradients(group) for group in self._flat.groups_of(part)]
        return norm_of(groups, torch.float64)

    @torch.no_grad()
    def unify(self, part: int | None, *, what: str) -> None:
        """Give every rank the same bits of the parameters; all ranks call it together.

        Unlike devices round an update differently, so that replicas would drift apart. Each rank
        owns an equal part of every buffer and the others copy it.
        """
        for group in self._flat.groups_of(part):
            if group.data.numel() % self.comm.world_size == 0:
                self.comm.all_gather_parts(group.data, what=what)
            else:  # ranks are parked, the buffer was padded for all: the lowest present rank gives
                self.comm.broadcast(group.data, 0, what=what)


def norm_of(groups: Sequence[list[torch.Tensor]], dtype: torch.dtype | None = None) -> float:
    """2-norm of groups of tensors, each group of one device and dtype; half ones in float32."""
    norms = [_norms(tensors, dtype) for tensors in groups if tensors]
    return _root(Reading(norms).read())


def _norms(tensors: list[torch.Tensor], dtype: torch.dtype | None = None) -> torch.Tensor:
    """2-norm of each tensor; all of one device and dtype."""
    own = tensors[0].dtype
    if dtype is torch.float64:
        tensors = [t.to(float64_device(t.device)) for t in tensors]
    wide = dtype or (torch.float32 if own in _HALF else own)
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=wide))


def _root(norms: Iterable[Iterable[float]]) -> float:
    """Return the 2-norm of all together; NaN where one of them is."""
    squares = 0.0
    for values in norms:
        for norm in values:
            squares += norm * norm
    return math.sqrt(squares)
