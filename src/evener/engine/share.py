"""This rank's part of a window while it is being computed: micro-batches, weight, loss, time."""

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import SupportsFloat

import torch
from torch import Tensor

from evener.engine.emulate import Slowdown, Started
from evener.engine.memory import explain
from evener.errors import UsageError


@dataclass(slots=True)
class _MicroBatch:
    samples: int
    started_s: float
    slow_start: Started
    spent_before_s: float
    weights: dict[int | None, float] = field(default_factory=dict)


@dataclass(slots=True)
class _Sum:
    """What losses for the same optimizers amount to."""

    weight: float = 0.0
    losses: list[tuple[float, Tensor]] = field(default_factory=list)


@dataclass(slots=True)
class Warmup:
    """What of a share tells nothing of the rank's speed; see ``WindowReport``."""

    samples: int = 0
    micro_batches: int = 0
    seconds: float = 0.0


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
        known_sizes: Sizes of micro-batches that this rank has computed before; those of this share
            are added. The first one of a size pays for what is set up once (caches, autotuning,
            compiling), and tells nothing of the rank's speed.

    Attributes:
        samples: Samples computed.
        micro_batches: Micro-batches computed.
        compute_s: Seconds they took.
        warmup: How much of these three belongs to first micro-batches of a size.
        turns: How often an optimizer has been stepped alone.
        dropped: The rest of the share goes through for nothing, as its window was abandoned.
    """

    def __init__(
        self,
        planned: int,
        *,
        scale: float | None,
        slowdown: Slowdown,
        known_sizes: set[int] | None = None,
    ) -> None:
        self.dropped = False
        self.warmup = Warmup()
        self._known_sizes: set[int] = set() if known_sizes is None else known_sizes
        self._scale = scale
        self.samples = 0
        self.micro_batches = 0
        self.compute_s = 0.0
        self._planned = planned
        self._slowdown = slowdown
        self._sums: dict[int | None, _Sum] = {}
        self.turns = 0
        self._open: _MicroBatch | None = None

    @property
    def in_micro_batch(self) -> bool:
        """Whether a micro-batch was handed out and not yet ended."""
        return self._open is not None

    @property
    def open_samples(self) -> int:
        """Samples of the micro-batch that is being computed; 0 outside of one."""
        return self._open.samples if self._open is not None else 0

    @property
    def micro_batch_weight(self) -> float:
        """Weight of the micro-batch that is being computed; 0 before its backward."""
        return next(iter(self._open.weights.values()), 0.0) if self._open is not None else 0.0

    @property
    def weight(self) -> float:
        """Weight of the micro-batches so far; where optimizers take turns, of the first turn."""
        return next(iter(self._sums.values())).weight if self._sums else 0.0

    @property
    def scale(self) -> float:
        """What weights were divided by; a power of two, or the weight of the only micro-batch."""
        return self.scale_of(None)

    def scale_of(self, part: int | None) -> float:
        """The same for the losses of one optimizer."""
        return self._scale if self._scale is not None else self.weight_of(part) or 1.0

    def weight_of(self, part: int | None) -> float:
        """Weight of the losses of one optimizer; of all together for ``None``."""
        return self._sums[part].weight if part in self._sums else 0.0

    @property
    def loss_sum(self) -> float:
        """Σ weight · loss of the micro-batches so far; waits for the device."""
        return self.loss_sum_of(None)

    def loss_sum_of(self, part: int | None) -> float:
        """The same for the losses of one optimizer."""
        losses = self._sums[part].losses if part in self._sums else []
        if len(losses) > 1:  # one transfer for all
            values = torch.stack([v.reshape(()) for _, v in losses]).tolist()
        else:
            values = [loss.item() for _, loss in losses]
        total = 0.0
        for (weight, _), value in zip(losses, values, strict=True):
            total += weight * value
        return total

    def start_micro_batch(self, samples: int) -> None:
        """Starts the clock on a micro-batch."""
        if self.micro_batches and samples not in self._known_sizes:
            # Or a GPU would do what is left of the ones before in the time of this one.
            started_s, slow_start = time.perf_counter(), self._slowdown.start()
            self._wait_for_device()
            self._count(started_s, slow_start)
        started_s = time.perf_counter()
        self._open = _MicroBatch(samples, started_s, self._slowdown.start(), self.compute_s)

    def backward(
        self,
        loss: Tensor,
        weight: float | None,
        part: int | None = None,
        inputs: Sequence[Tensor] | None = None,
    ) -> None:
        """Adds ``weight / scale · ∇loss`` to the gradients; see ``Ddp.backward``.

        Args:
            loss: The mean over ``weight`` units.
            weight: Units; the micro-batch's samples for ``None``.
            part: Number of the optimizer that the loss is for; all together for ``None``.
            inputs: That optimizer's parameters: no other gets a gradient.
        """
        micro = self._open
        if micro is None:
            raise UsageError(
                "ddp.backward(loss) was called outside a micro-batch; iterate over "
                "loader.epoch(n) and call it once per batch"
            )
        units = float(micro.samples) if weight is None else checked_weight(weight)
        if (None in self._sums) != (part is None) and self._sums:
            raise UsageError(
                "ddp.backward was called with and without optimizer= in one window; name the "
                "optimizer for every loss, or for none"
            )
        known = micro.weights.get(part)
        total = self._sums.setdefault(part, _Sum())
        if known is None:
            micro.weights[part] = units
            total.weight += units
        elif weight is not None and units != known:
            raise UsageError(
                f"second ddp.backward on one micro-batch with weight {units}, the first had "
                f"{known}; losses of one micro-batch share one weight: scale the loss instead"
            )
        units = micro.weights[part]
        if units == 0:
            return
        total.losses.append((units, loss.detach()))
        factor = units / self.scale_of(part)
        scaled = loss if factor == 1.0 else loss * factor
        try:
            scaled.backward(inputs=inputs)  # type: ignore[no-untyped-call]
        except Exception as error:
            refuse_loss(loss)
            explain(error, micro.samples)
            raise

    def not_ended(self) -> UsageError:
        """The error of a loop that goes on without ``ddp.step()``."""
        return UsageError(
            "the loop asked for the next batch without ddp.step() on this one; call "
            "ddp.backward(loss) and ddp.step() once for every batch of the loader. To evaluate, "
            "use ddp.eval_loader, which asks for neither"
        )

    def check_part(self, part: int) -> None:
        """Refuses to step one optimizer alone where that would not act on the whole share.

        Raises:
            UsageError: Says what is missing.
        """
        if self._open is None or part not in self._open.weights:
            raise UsageError(
                "ddp.step(optimizer) without ddp.backward(loss, optimizer=optimizer) on this "
                "micro-batch; say for every loss which optimizer it is for"
            )
        if self._planned != 1:
            raise UsageError(
                f"ddp.step(optimizer) on one of {self._planned} micro-batches of a window: an "
                "optimizer can be stepped alone only on all of a rank's samples at once; pass "
                "micro_batch_size='share' to ddp.loader, or step all optimizers together with "
                "ddp.step()"
            )

    def pause(self) -> None:
        """Stops the clock while ranks exchange in mid-batch; ``resume`` lets it go on."""
        assert self._open is not None
        self._count(self._open.started_s, self._open.slow_start)

    def resume(self) -> None:
        """Lets the clock go on after ``pause``."""
        assert self._open is not None
        self._open.started_s, self._open.slow_start = time.perf_counter(), self._slowdown.start()

    def end_micro_batch(self) -> bool:
        """Stops the clock; True when it was the last micro-batch of the share."""
        micro = self._open
        if micro is None or not micro.weights:
            raise UsageError(
                "ddp.step() without ddp.backward(loss) on this micro-batch; call backward first "
                "(with weight=0 to leave a batch out)"
            )
        if None not in micro.weights and not self.turns:
            raise UsageError(
                "ddp.step() after ddp.backward(loss, optimizer=...); call ddp.step(optimizer) for "
                "each optimizer in its turn, or leave optimizer= out to step all together"
            )
        self._open = None
        self.micro_batches += 1
        self.samples += micro.samples
        last = self.micro_batches == self._planned
        is_first = micro.samples not in self._known_sizes
        if last or is_first:
            self._wait_for_device()
        self._count(micro.started_s, micro.slow_start)
        if is_first:
            self._known_sizes.add(micro.samples)
            self.warmup.samples += micro.samples
            self.warmup.micro_batches += 1
            self.warmup.seconds += self.compute_s - micro.spent_before_s
        return last

    def _wait_for_device(self) -> None:
        """Waits until a GPU has done its work, so that all of it is inside the clock."""
        losses = next(iter(self._sums.values())).losses if self._sums else []
        if losses and losses[-1][1].device.type != "cpu":
            losses[-1][1].item()  # reading a loss waits for all that was queued before

    def _count(self, started_s: float, slow_start: Started) -> None:
        elapsed_s = time.perf_counter() - started_s
        self.compute_s += elapsed_s + self._slowdown.after(slow_start)


def checked_weight(weight: object) -> float:
    """Return a weight as a number; one of NumPy's, or a tensor with one element, will do.

    Raises:
        UsageError: It is not a finite number of at least 0.
    """
    units = None if isinstance(weight, bool) else _as_number(weight)
    if units is None or not (math.isfinite(units) and units >= 0):
        raise UsageError(
            f"weight is {weight!r}; give the number (>= 0) of samples or tokens that the loss is "
            "the mean of"
        )
    return units


def checked_value(value: object) -> float:
    """Return a rank's own mean as a number; it may be infinite or not a number.

    Raises:
        UsageError: It is something else, such as text or a tensor with several elements.
    """
    number = _as_number(value)
    if number is None:
        raise UsageError(
            f"the value to be averaged is {value!r}; give a number or a tensor with one element"
        )
    return number


def _as_number(value: object) -> float | None:
    if isinstance(value, SupportsFloat):
        with suppress(TypeError, ValueError, RuntimeError):  # a tensor of several elements
            return float(value)
    return None


def refuse_number(loss: object) -> None:
    """Refuses a loss that is not a tensor, such as that of ``loss.item()``.

    Raises:
        UsageError: Says what it is.
    """
    if not isinstance(loss, Tensor):
        raise UsageError(
            f"the loss given to ddp.backward is {loss!r}, a {type(loss).__name__} without a graph, "
            "of which no gradient can be computed; give the tensor that the model's output led to, "
            "without .item(), float() or .numpy()"
        )


def refuse_loss(loss: Tensor) -> None:
    """Says why a backward has failed, where the loss itself is the cause.

    Raises:
        UsageError: It is no scalar, or hangs on nothing that is trained.
    """
    if loss.numel() != 1:
        raise UsageError(
            f"the loss given to ddp.backward has shape {tuple(loss.shape)}, and a gradient needs "
            "one number; give the mean over the micro-batch, as loss.mean() or the default "
            "reduction of torch's losses, and the number of its units as weight"
        )
    if not loss.requires_grad:
        raise UsageError(
            f"the loss given to ddp.backward is {loss.item():g} without a graph: nothing that is "
            "trained has gone into it, or it was computed under torch.no_grad() or detached; "
            "compute it from the model's output, with gradients on, or give weight=0 to leave the "
            "micro-batch out"
        )
