"""This rank's part of a window while it is being computed: micro-batches, weight, loss, time."""

import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from evener.errors import UsageError
from evener.run.emulate import Slowdown


@dataclass(slots=True)
class _MicroBatch:
    samples: int
    started_s: float
    slow_start: float
    weight: float | None = None


class Share:
    """Accounts for the micro-batches of one rank in one window.

    The clock runs from the moment a micro-batch is handed out to ``end_micro_batch``, so it counts
    the user's loop and never a wait for data or for other ranks.

    Args:
        planned: Micro-batches of the share.
        scale: What weights are divided by before backward; see ``GradientAverager``. ``None``
            takes the weight itself, where this one micro-batch is the whole window: then nothing is
            multiplied, and its gradient is used as it is.
        slowdown: Stretches compute on a rank that is emulated slower.
        timing: The share only times the rank; its gradients will be dropped.

    Attributes:
        samples: Samples computed.
        micro_batches: Micro-batches computed.
        weight: Their weight.
        compute_s: Seconds they took.
    """

    def __init__(
        self, planned: int, *, scale: float | None, slowdown: Slowdown, timing: bool = False
    ) -> None:
        self.timing = timing
        self._scale = scale
        self.samples = 0
        self.micro_batches = 0
        self.weight = 0.0
        self.compute_s = 0.0
        self._planned = planned
        self._slowdown = slowdown
        self._losses: list[tuple[float, Tensor]] = []
        self._open: _MicroBatch | None = None

    @property
    def in_micro_batch(self) -> bool:
        """Whether a micro-batch was handed out and not yet ended."""
        return self._open is not None

    @property
    def micro_batch_weight(self) -> float:
        """Weight of the micro-batch that is being computed; 0 before its backward."""
        return (self._open.weight or 0.0) if self._open is not None else 0.0

    @property
    def scale(self) -> float:
        """What weights were divided by; a power of two, or the weight of the only micro-batch."""
        return self._scale if self._scale is not None else self.weight or 1.0

    @property
    def loss_sum(self) -> float:
        """Σ weight · loss of the micro-batches so far; waits for the device."""
        if len(self._losses) > 1:  # one transfer for all
            values = torch.stack([v.double().reshape(()) for _, v in self._losses]).tolist()
        else:
            values = [loss.item() for _, loss in self._losses]
        total = 0.0
        for (weight, _), value in zip(self._losses, values, strict=True):
            total += weight * value
        return total

    def start_micro_batch(self, samples: int) -> None:
        """Starts the clock on a micro-batch."""
        self._open = _MicroBatch(samples, time.perf_counter(), self._slowdown.start())

    def backward(self, loss: Tensor, weight: float | None) -> None:
        """Adds ``weight / scale · ∇loss`` to the gradients; see ``Ddp.backward``."""
        micro = self._open
        if micro is None:
            raise UsageError(
                "ddp.backward(loss) was called outside a micro-batch; iterate over "
                "loader.epoch(n) and call it once per batch"
            )
        units = float(micro.samples if weight is None else weight)
        if not (math.isfinite(units) and units >= 0):
            raise UsageError(
                f"weight is {units}; give the number (>= 0) of samples or tokens that the loss is "
                "the mean of"
            )
        if micro.weight is None:
            micro.weight = units
            self.weight += units
        elif weight is not None and units != micro.weight:
            raise UsageError(
                f"second ddp.backward on one micro-batch with weight {units}, the first had "
                f"{micro.weight}; losses of one micro-batch share one weight: scale the loss "
                "instead"
            )
        if micro.weight == 0:
            return
        self._losses.append((micro.weight, loss.detach()))
        factor = micro.weight / self.scale
        (loss if factor == 1.0 else loss * factor).backward()  # type: ignore[no-untyped-call]

    def end_micro_batch(self) -> bool:
        """Stops the clock; True when it was the last micro-batch of the share."""
        micro = self._open
        if micro is None or micro.weight is None:
            raise UsageError(
                "ddp.step() without ddp.backward(loss) on this micro-batch; call backward first "
                "(with weight=0 to leave a batch out)"
            )
        self._open = None
        self.micro_batches += 1
        self.samples += micro.samples
        last = self.micro_batches == self._planned
        if last and self._losses and self._losses[-1][1].device.type != "cpu":
            # Reading a loss waits for the device, so that its whole work is inside the clock.
            self._losses[-1][1].item()
        elapsed_s = time.perf_counter() - micro.started_s
        self.compute_s += elapsed_s + self._slowdown.after(micro.slow_start)
        return last
