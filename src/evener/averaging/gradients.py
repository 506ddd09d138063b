"""Averages gradients by the one weight rule: Σ weight · ∇loss over ranks, divided by Σ weight.

In the *replicated* update every rank gets all of the mean, and steps all parameters. In the
*sharded* update each rank owns an equal part of every flat buffer: gradients are summed up where
they are needed, each rank's optimizer steps the *pieces* of parameters that lie in its part, and
all ranks copy the result. So the optimizer's state exists once in the team, and parameters have the
same bits on all ranks, however their devices round: only the owner computes, the others copy.
"""

import math
from collections.abc import Sequence

import torch

from evener.averaging.norms import clip, norm_of, norms_of, root
from evener.averaging.overlap import OverlappedExchange
from evener.comm.base import Communicator
from evener.comm.flat import FlatBuffers


class GradientAverager:
    """Sums the ranks' gradients and divides them by the window's total weight.

    Each rank accumulates ``weight / scale · ∇loss``. ``scale`` is a power of two near the expected
    weight of the whole window, the same on every rank. So sums neither overflow in half precision
    nor lose bits. After the exchange one multiplication by ``scale / Σ weight``, in the same pass
    as clipping, gives the gradient of the mean loss. No other scaling exists.

    Buckets leave in the order that ``flat`` gives them.

    Args:
        flat: The ranks' buffers.
        comm: The ranks.
        overlap: What may have begun the exchange during backward.

    Attributes:
        own_norm: 2-norm of this rank's gradients, as ``judge`` has found it; 0 without any.
        has_measured: Whether they were looked at, so that no rank brings what is not finite.
    """

    def __init__(
        self, flat: FlatBuffers, comm: Communicator, overlap: OverlappedExchange | None = None
    ) -> None:
        self._flat = flat
        self._overlap = OverlappedExchange(flat) if overlap is None else overlap
        self.use(comm)
        self.own_norm = 0.0
        self.has_measured = True

    def use(self, comm: Communicator) -> None:
        """Continue with other ranks, or with the same ones in another generation."""
        self.comm = comm
        self._overlap.feedback.clear()  # also of a rank whose communicator stays, as it is parked
        self._overlap.feedback.use(comm)

    def gather(
        self, part: int | None = None, *, each: bool = False, unmeasured: bool = False
    ) -> list[torch.Tensor]:
        """Make this rank's gradients ready for ``average``.

        Args:
            part: The part of ``flat`` that is averaged, here and below; all of it by default.
            each: On one rank, return one norm for each parameter that has a gradient.
            unmeasured: Return no norms: what is not finite shows in the mean.

        Returns:
            Norms of gradients, one tensor for each group that has some, on the group's device.
            ``judge`` takes their values: the caller reads them together with others.
        """
        self.has_measured = not unmeasured
        if self._overlap.has_begun:
            return self._overlap.flush()
        if not self._flat.gather(part) or unmeasured:
            return []
        return [
            norms_of(tensors, each=each)
            for group in self._flat.groups_of(part)
            if (tensors := self._flat.gradients(group))
        ]

    def judge(self, norms: Sequence[Sequence[float]], part: int | None = None) -> int | None:
        """Return what is not finite in this rank's gradients, if anything.

        Args:
            norms: The values of what ``gather`` returned.
            part: As in ``gather``.

        Returns:
            Flat number of the first parameter whose gradient holds an inf or a NaN, if any.
        """
        # One pass yields both: with one rank this norm is the one that average returns.
        self.own_norm = root(norms)
        if self._overlap.has_begun:
            return self._overlap.judge(norms)
        if not math.isfinite(self.own_norm):
            self.own_norm = self._norm(part)
        return None if math.isfinite(self.own_norm) else self._flat.first_non_finite(part)

    def average(
        self,
        scale: float,
        divisor: float,
        part: int | None = None,
        *,
        what: str,
        max_norm: float | None = None,
    ) -> float:
        """Replace the gradients by the weighted mean over ranks; all ranks call it together.

        Clipping acts after averaging, on the mean, hence the same on every rank.

        Args:
            scale: What each rank's weights were divided by before backward.
            divisor: Σ weight over ranks and micro-batches, larger than 0; 1 if the losses are sums,
                for the sum instead of the mean.
            part: As in ``gather``.
            what: Names the exchange in errors.
            max_norm: Scale the mean down to this 2-norm, as ``clip_grad_norm_`` does.

        Returns:
            The 2-norm of the averaged gradient, over all parameters, before clipping. Not finite
            when the sum over ranks overflowed; the gradients are then of no use.
        """
        factor = scale / divisor
        if self._overlap.has_begun:
            self._overlap.finish()
        elif self.comm.world_size > 1:
            tensors, losses = [], []
            for group, bucket in self._flat.buckets_of(part):
                name = f"gradients of {what}" + (f": {bucket.label}" if bucket.label else "")
                where = slice(bucket.start, bucket.stop)
                tensors.append((name, group.grad[where]))
                lost = self._overlap.feedback.of(group.grad)
                losses.append(None if lost is None else lost[where])
            self.comm.all_reduce_each(tensors, lost=losses)
        is_known = self.comm.world_size == 1 and self.has_measured
        norm = factor * (self.own_norm if is_known else self._norm(part))
        if math.isfinite(norm):
            self.multiply(clip(factor, norm, max_norm), part)
        return norm

    @torch.no_grad()
    def multiply(self, factor: float | torch.Tensor, part: int | None = None) -> None:
        """Multiply the gradients; a tensor of shape ``()`` is one that a device computes."""
        if isinstance(factor, float) and factor == 1.0:
            return
        for group in self._flat.groups_of(part):
            if tensors := self._flat.gradients(group):
                own = factor if isinstance(factor, float) else factor.to(tensors[0].dtype)
                torch._foreach_mul_(tensors, own)

    def _norm(self, part: int | None) -> float:
        return norm_of([self._flat.gradients(group) for group in self._flat.groups_of(part)])

    @torch.no_grad()
    def unify(self, part: int | None, *, what: str, have_met: bool = False) -> None:
        """Give every rank the same bits of the parameters; all ranks call it together.

        Unlike devices round an update differently, so that replicas would drift apart. Each rank
        owns an equal part of every buffer and the others copy it.

        Args:
            part: As in ``gather``.
            what: Names the exchange in errors.
            have_met: See ``Communicator.all_gather_parts``.
        """
        for group in self._flat.groups_of(part):
            if group.data.numel() % self.comm.world_size == 0:
                self.comm.all_gather_parts(group.data, what=what, have_met=have_met)
            else:  # ranks are parked, the buffer was padded for all: the lowest present rank gives
                self.comm.broadcast(group.data, 0, what=what)
