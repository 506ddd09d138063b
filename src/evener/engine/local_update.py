"""One optimizer step of one rank, on its own gradients."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import final

from torch.optim import Optimizer

from evener.averaging.gradients import GradientAverager
from evener.comm.base import SingleCommunicator
from evener.comm.flat import FlatBuffers
from evener.engine.finite import LOSS
from evener.engine.share import Share


@final
class LocalUpdate:
    """Applies a rank's own gradients, as a loop on one device would.

    Args:
        flat: The trainable parameters, made for one rank: gradients stay where autograd puts them.
        optimizers: The rank's own.
        max_grad_norm: Clip the gradient of each step to this 2-norm.
        lr_factor: Multiplies the learning rate for the length of a step.

    Attributes:
        optimizers: As given.
    """

    def __init__(
        self,
        flat: FlatBuffers,
        optimizers: Sequence[Optimizer],
        *,
        max_grad_norm: float | None = None,
        lr_factor: float = 1.0,
    ) -> None:
        self._flat = flat
        self.optimizers = optimizers
        self._max_grad_norm = max_grad_norm
        self.lr_factor = lr_factor
        self._averager = GradientAverager(flat, SingleCommunicator())

    @property
    def lr(self) -> float:
        """Learning rate of the first parameter group, as it is applied."""
        return float(self.optimizers[0].param_groups[0]["lr"]) * self.lr_factor

    def apply(self, share: Share, before: Callable[[], None]) -> int:
        """Steps the optimizers on what a share has accumulated, and drops the gradients.

        Args:
            share: Micro-batches of one step. One without weight changes nothing.
            before: Sets the learning rate.

        Returns:
            0, or what is not finite (nothing is applied then): -1 for the loss, k + 1 for the
            gradient of trainable parameter k.
        """
        index = self._averager.gather()
        code = 0 if index is None else index + 1
        if not math.isfinite(share.loss_sum):
            code = LOSS
        if code == 0 and share.weight > 0:
            norm = self._averager.average(
                share.scale, share.weight, what="a local step", max_norm=self._max_grad_norm
            )
            if math.isfinite(norm):
                before()
                self._flat.mask_untouched()
                with self._scaled_rates():
                    for optimizer in self.optimizers:
                        optimizer.step()
                self._flat.attach_data()
            else:
                code = LOSS
        self._flat.zero_()
        return code

    @contextmanager
    def _scaled_rates(self) -> Iterator[None]:
        """Scales learning rates for a moment: schedulers compute from what is in the groups."""
        if self.lr_factor == 1.0:
            yield
            return
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        rates = [group["lr"] for group in groups]
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate * self.lr_factor
        try:
            yield
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate
