"""Averages gradients by the one weight rule: Σ weight · ∇loss over ranks, divided by Σ weight."""

import torch

from evener.averaging.weights import correction
from evener.comm.base import Communicator
from evener.comm.flat import FlatBuffers


class GradientAverager:
    """Sums the ranks' flat gradient buffers and divides them by the window's total weight.

    Each rank accumulates ``weight / scale · ∇loss`` into its buffer. ``scale`` is a power of two
    near the weight that is expected of the whole window, the same on every rank, so that sums
    neither overflow in half precision nor lose bits. After the exchange one multiplication by
    ``scale / Σ weight`` gives the gradient of the mean loss. No other scaling exists.
    """

    def __init__(self, flat: FlatBuffers, comm: Communicator) -> None:
        self._flat = flat
        self.comm = comm

    def average(self, scale: float, total_weight: float, *, what: str) -> float:
        """Replaces the gradients by the weighted mean over ranks; all ranks call it together.

        Args:
            scale: What each rank's weights were divided by before backward.
            total_weight: Σ weight over ranks and micro-batches; larger than 0.
            what: Names the exchange in errors.

        Returns:
            The 2-norm of the averaged gradient, over all parameters. Not finite when the sum
            over ranks overflowed.
        """
        factor = correction(scale, total_weight)
        squares = 0.0
        for group in self._flat.groups:
            if self.comm.world_size > 1:
                self.comm.all_reduce(group.grad, what=f"gradients of {what}")
            values = group.grad_values
            if factor != 1.0:
                values.mul_(factor)
            squares += (
                float(torch.linalg.vector_norm(values, dtype=_norm_dtype(values)).item()) ** 2
            )
        return float(squares**0.5)

    def clip(self, norm: float, max_norm: float) -> None:
        """Scales the averaged gradients down to ``max_norm``, as ``clip_grad_norm_`` does.

        Clipping acts after averaging, on the mean, hence the same on every rank.
        """
        factor = max_norm / (norm + 1e-6)
        if factor < 1.0:
            for group in self._flat.groups:
                group.grad_values.mul_(factor)

    @torch.no_grad()
    def unify(self, *, what: str) -> None:
        """Gives every rank the same bits of the parameters; all ranks call it together.

        Unlike devices round an update differently, so that replicas would drift apart. Each rank
        owns an equal part of every buffer and the others copy it.
        """
        for group in self._flat.groups:
            if group.data.numel() % self.comm.world_size == 0:
                self.comm.all_gather_parts(group.data, what=what)
            else:  # ranks are parked, and the buffer was padded for the whole team
                self.comm.broadcast(group.data, 0, what=what)


def _norm_dtype(values: torch.Tensor) -> torch.dtype:
    return torch.float32 if values.dtype in (torch.float16, torch.bfloat16) else values.dtype
