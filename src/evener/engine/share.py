"""This rank's part of a window while it is being computed: micro-batches, weight, loss, time.

``WindowSpans`` measures how the time of a whole window is spent.
"""

import math
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, Self, final

from torch import Tensor

from evener.averaging.gradients import GradientAverager
from evener.averaging.norms import Reading
from evener.devices import DeviceQueue, Milestone
from evener.engine.emulate import Slowdown
from evener.engine.team import Team
from evener.errors import UsageError
from evener.planning.report import LOSS

LARGEST_WEIGHT: Final = 2.0**53
"""Counts up to here are exact in float64. Beyond, and below its inverse, gradients may overflow or
vanish while they are multiplied by it."""


class Stopwatch:
    """Measures this rank's compute, from when it is made.

    Args:
        slowdown: Stretches compute on a rank that is emulated slower.
        queue: Measures what the device does with what this thread queues, if it has milestones. By
            default, and without them, what this thread does.

    Attributes:
        added_s: Seconds that count beside those between start and stop.
    """

    def __init__(self, slowdown: Slowdown, queue: DeviceQueue | None = None) -> None:
        self._slowdown, self._before = slowdown, slowdown.start()
        self._queue = queue if queue is not None and queue.has_milestones else None
        self.added_s = 0.0
        self._started: Any = self._now()
        self._stopped = self._started

    def stop(self) -> Self:
        """End the measurement, and sleep as long as the emulation of a slow rank demands."""
        if self._slowdown.factor > 1 and self._queue is not None:
            self._queue.finish()  # the emulation sleeps in proportion to compute
        self._stopped = self._now()
        self.added_s += self._slowdown.after(self._before)
        return self

    @property
    def ahead_s(self) -> float:
        """Return how many seconds this thread is ahead of the slower device that it emulates."""
        return self._slowdown.ahead_s(self._before)

    @property
    def seconds(self) -> float:
        """Return what was measured, the sleep included; waits until the device has stopped, too."""
        if self._queue is not None:
            return float(self._started.seconds_to(self._stopped)) + self.added_s
        return float(self._stopped - self._started) + self.added_s

    def _now(self) -> Milestone | float:
        return time.perf_counter() if self._queue is None else self._queue.mark()


@final
class WindowSpans:
    """Records when the spans of a window begin on this rank, and how long they take.

    All times are on the clock of ``time.perf_counter``. Of a span in several pieces, such as a wait
    for data before each micro-batch, the first piece counts as its begin.

    Args:
        team: The ranks to which this rank sends.
    """

    def __init__(self, team: Team) -> None:
        self._team = team
        self._sent_bytes = 0
        self.restart()

    def restart(self) -> None:
        """Begin with a window now: the first one of an epoch."""
        self._applied_s = self._wait_s = self._sync_s = time.perf_counter()
        #: When this rank asked for the first data of its work, if it has any, and its wait for it.
        self._began_s: float | None = None
        self._data_s = 0.0
        #: The same of a window that is not over: in ASYNC, work of the next one has begun.
        self._finished: tuple[float | None, float] | None = None

    @property
    def elapsed_s(self) -> float:
        """Return the seconds since a window was applied, or the epoch was begun."""
        return time.perf_counter() - self._applied_s

    def receive(self, asked_s: float) -> None:
        """Note that data is here for which this rank has waited since ``asked_s``."""
        self._began_s = asked_s if self._began_s is None else self._began_s
        self._data_s += time.perf_counter() - asked_s

    def work_at_once(self) -> float:
        """Begin with the work when the previous window was applied; return that time."""
        self._began_s, self._data_s = self._applied_s, 0.0
        return self._applied_s

    def finish_work(self) -> None:
        """Count what follows for the next window, but for waiting and averaging."""
        self._finished = (self._began_s, self._data_s)
        self._began_s, self._data_s = None, 0.0

    def begin_wait(self) -> None:
        """Begin to wait for the other ranks; where that happens again, the last time counts."""
        self._wait_s = self._sync_s = time.perf_counter()

    def begin_sync(self, waited_s: float = 0.0) -> None:
        """Begin to average, now or so many seconds after the wait began."""
        self._sync_s = self._wait_s + waited_s if waited_s else time.perf_counter()

    def apply(self) -> dict[str, Any]:
        """End the window, which has been applied; return the fields of the report about it."""
        now_s, before_s, sent_before = time.perf_counter(), self._applied_s, self._sent_bytes
        if self._finished is None:
            self.finish_work()
        assert self._finished is not None
        began_s, data_s = self._finished
        self._finished, self._applied_s = None, now_s
        self._sent_bytes = self._team.sent_bytes
        return {
            "elapsed_s": now_s - before_s,
            "data_s": data_s,
            "sent_bytes": self._sent_bytes - sent_before,
            "work_ago_s": 0.0 if began_s is None else now_s - began_s,
            "wait_ago_s": now_s - self._wait_s,
            "sync_ago_s": max(0.0, now_s - self._sync_s),
        }


@dataclass(slots=True)
class Losses:
    """Losses of a share for one optimizer, or for all together.

    Attributes:
        is_summed: Whether they are sums over their units.
        weight: Their weight.
        factors: What each of them is multiplied by in the sum of losses: its weight, or 1 if it is
            a sum already.
        values: The losses, shape ``()`` each; a device may still compute them.
    """

    is_summed: bool = False
    weight: float = 0.0
    factors: list[float] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    @property
    def divisor(self) -> float:
        """Return what the gradient would be divided by if no other rank had a share."""
        return 1.0 if self.is_summed else self.weight

    def sum_of(self, values: Iterable[Sequence[float]]) -> float:
        """Return Σ weight · loss, of ``values`` as they were read."""
        return sum(factor * loss for factor, (loss,) in zip(self.factors, values, strict=True))

    def judge(
        self, averager: GradientAverager, norms: Sequence[Tensor], part: int | None = None
    ) -> tuple[float, int]:
        """Read losses and norms, with one wait for the device.

        Args:
            averager: Has gathered the gradients.
            norms: What it returned then.
            part: As in ``GradientAverager.gather``.

        Returns:
            Σ weight · loss, and what is not finite; see ``Report.non_finite``.
        """
        values = Reading([*self.values, *norms]).read()
        loss_sum = self.sum_of(values[: len(self.values)])
        index = averager.judge(values[len(self.values) :], part)
        if not math.isfinite(loss_sum):
            return loss_sum, LOSS
        return loss_sum, 0 if index is None else index + 1


@final
class Share:
    """Accounts for the micro-batches of one rank in one window.

    The clock runs from the moment a micro-batch is handed out to ``end_micro_batch``, so it counts
    the user's loop and never a wait for data or for other ranks.

    Losses for all optimizers together count for the part ``None``. If optimizers are stepped one by
    one, the losses of each count for the part of its number.

    Args:
        planned: Micro-batches of the share.
        scale: What weights are divided by before backward; see ``GradientAverager``. ``None``
            takes the weight itself, where this one micro-batch is the whole window: then nothing is
            multiplied, and its gradient is used as it is.
        slowdown: Stretches compute on a rank that is emulated slower.
        queue: Of the device that the rank computes on, if it has one.
        known_sizes: Sizes of micro-batches that this rank has computed before; those of this share
            are added. The first one of a size includes work that is done once (caches, autotuning,
            compiling), so it does not show the rank's speed.

    Attributes:
        queue: As given.
        samples: Samples computed.
        micro_batches: Micro-batches computed.
        warmup_samples: How many of the samples were in the first micro-batch of a size.
        warmup_micro_batches: The number of these micro-batches.
        in_micro_batch: Whether a micro-batch was handed out and not yet ended.
        open_samples: Samples of the micro-batch that is being computed; 0 outside of one.
        single_steps: How many times an optimizer has been stepped alone.
    """

    def __init__(
        self,
        planned: int,
        scale: float | None,
        slowdown: Slowdown,
        queue: DeviceQueue | None,
        known_sizes: set[int],
    ) -> None:
        self.samples = self.micro_batches = self.single_steps = self.open_samples = 0
        self.warmup_samples = self.warmup_micro_batches = 0
        self.in_micro_batch = False
        self.queue = queue
        self._planned = planned
        self._scale = scale
        self._slowdown = slowdown
        self._known_sizes = known_sizes
        self._parts: dict[int | None, Losses] = {}
        #: By part, the weight of the micro-batch that is being computed.
        self._open_weights: dict[int | None, float] = {}
        self._laps: list[Stopwatch] = []
        self._warmup_laps: list[Stopwatch] = []
        self._first_lap = 0
        self._watch = Stopwatch(slowdown, queue)

    @property
    def micro_batch_weight(self) -> float:
        """Return the weight of the present micro-batch; 0 before its backward."""
        return next(iter(self._open_weights.values()), 0.0)

    @property
    def weight(self) -> float:
        """Return the weight of the micro-batches so far; of several parts, that of the first."""
        return self.losses(next(iter(self._parts), None)).weight

    def losses(self, part: int | None = None) -> Losses:
        """Return the losses of a part."""
        return self._parts.get(part) or Losses()

    def scale_of(self, part: int | None = None) -> float:
        """Return what the weights of a part were divided by.

        A power of two, or the divisor of the only micro-batch.
        """
        return self._scale if self._scale is not None else self.losses(part).divisor or 1.0

    @property
    def compute_s(self) -> float:
        """Return the seconds that the micro-batches took; waits for the device."""
        return sum(lap.seconds for lap in self._laps)

    @property
    def warmup_s(self) -> float:
        """Return how many of these seconds the first micro-batches of their sizes took."""
        return sum(lap.seconds for lap in self._warmup_laps)

    def start_micro_batch(self, samples: int) -> None:
        """Start the clock on a micro-batch."""
        self.resume()
        if self.micro_batches and samples not in self._known_sizes:
            # Otherwise the time of this micro-batch would include earlier ones on the device.
            self._wait_for_device()
            self.pause()
            self.resume()
        self.in_micro_batch, self.open_samples = True, samples
        self._first_lap = len(self._laps)
        self._open_weights = {}

    @property
    def is_last(self) -> bool:
        """Return whether the micro-batch under way is the last one of the share."""
        return self.micro_batches + 1 == self._planned

    def ahead_s(self) -> float:
        """Return how many seconds this rank is ahead of the slower device that it emulates."""
        return self._watch.ahead_s

    def count_since(self, began_s: float) -> None:
        """Count what the user's own loop has done since then: fetching data, the forward pass."""
        self._watch.added_s += time.perf_counter() - began_s

    def backward(
        self,
        loss: Tensor,
        weight: float | None,
        part: int | None = None,
        inputs: Sequence[Tensor] | None = None,
        *,
        summed: bool = False,
    ) -> None:
        """Add ``weight / scale · ∇loss`` to the gradients; see ``Ddp.backward``.

        Args:
            loss: The mean over ``weight`` units, or their sum.
            weight: Units; the micro-batch's samples for ``None``.
            part: Number of the optimizer that the loss is for; all together for ``None``.
            inputs: That optimizer's parameters: no other gets a gradient.
            summed: Whether the loss is the sum over the units.
        """
        if not self.in_micro_batch:
            raise UsageError(
                "ddp.backward(loss) was called outside a micro-batch; iterate over "
                "loader.epoch(n) and call it once per batch"
            )
        if self._parts and (None in self._parts) != (part is None):
            raise UsageError(
                "ddp.backward was called with and without optimizer= in one window; name the "
                "optimizer for every loss, or for none"
            )
        units = float(self.open_samples) if weight is None else checked_weight(weight)
        losses = self._parts.setdefault(part, Losses(summed))
        if losses.is_summed != summed:
            raise UsageError(
                "ddp.backward was called with reduction='sum' and without it in one window; make "
                "both losses sums, or both means, or add them up before one call"
            )
        if part not in self._open_weights:
            losses.weight += units
        known = self._open_weights.setdefault(part, units)
        if weight is not None and units != known:
            raise UsageError(
                f"second ddp.backward on one micro-batch with weight {units}, the first had "
                f"{known}; losses of one micro-batch share one weight: scale the loss instead"
            )
        if known == 0 or self._planned == 0:
            return  # a void one: tensors that its forward has kept may have been overwritten
        factor = 1.0 if summed else known
        scale = factor / self.scale_of(part)
        scaled = loss if scale == 1.0 else loss * scale
        scaled.backward(inputs=inputs)  # type: ignore[no-untyped-call]
        losses.factors.append(factor)
        losses.values.append(loss.detach().reshape(()))

    def not_ended(self) -> UsageError:
        """Return the error of a loop that continues without ``ddp.step()``."""
        return UsageError(
            "the loop asked for the next batch without ddp.step() on this one; call "
            "ddp.backward(loss) and ddp.step() once for every batch of the loader. To accumulate "
            "gradients, give ddp.loader the batch_size of an optimizer step and the "
            "micro_batch_size of a backward, and do not divide the loss. To evaluate, use "
            "ddp.eval_loader, which asks for neither"
        )

    def begin_single_step(self, part: int) -> None:
        """Count a step of one optimizer alone, if that acts on the whole share.

        Raises:
            UsageError: It would not; says what is missing.
        """
        if part not in self._open_weights:
            raise UsageError(
                "ddp.step(optimizer) without ddp.backward(loss, optimizer=optimizer) on this "
                "micro-batch; pass optimizer= to every call of ddp.backward"
            )
        if self._planned != 1:
            raise UsageError(
                f"ddp.step(optimizer) on one of {self._planned} micro-batches of a window: an "
                "optimizer can be stepped alone only on all of a rank's samples at once; pass "
                "micro_batch_size='share' to ddp.loader, or step all optimizers together with "
                "ddp.step()"
            )
        self.single_steps += 1

    def pause(self) -> None:
        """Stop the clock, as while ranks exchange in mid-batch; ``resume`` restarts it."""
        self._laps.append(self._watch.stop())

    def resume(self) -> None:
        """Restart the clock after ``pause``."""
        self._watch = Stopwatch(self._slowdown, self.queue)

    def end_micro_batch(self) -> bool:
        """Stop the clock; return whether it was the last micro-batch of the share."""
        if None not in self._open_weights and not self.single_steps:
            raise UsageError(
                "ddp.step() without ddp.backward(loss) on this micro-batch; call backward first "
                "(with weight=0 to leave a batch out), and after ddp.backward(loss, optimizer=...) "
                "ddp.step(optimizer) for that optimizer"
            )
        samples, self.open_samples, self._open_weights = self.open_samples, 0, {}
        self.in_micro_batch = False
        self.micro_batches += 1
        self.samples += samples
        last = self.micro_batches == self._planned
        is_first = samples not in self._known_sizes
        if last or is_first:
            self._wait_for_device()
        self.pause()
        if is_first:
            self._known_sizes.add(samples)
            self.warmup_samples += samples
            self.warmup_micro_batches += 1
            self._warmup_laps += self._laps[self._first_lap :]
        return last

    def _wait_for_device(self) -> None:
        """Wait for a device without milestones, so that its work is inside the lap."""
        if self.queue is not None and not self.queue.has_milestones:
            self.queue.finish()


def checked_weight(weight: Any) -> float:
    """Return a weight as a number; one of NumPy's, or a tensor with one element, will do.

    Raises:
        UsageError: It is not 0, and not a number of units either.
    """
    with suppress(TypeError, ValueError, RuntimeError):  # text, or several elements
        units = float(weight)
        if units == 0 or 1 / LARGEST_WEIGHT <= units <= LARGEST_WEIGHT:
            return units
    raise UsageError(
        f"weight is {weight!r}; give the number of samples or tokens that the loss is the mean "
        "of, or 0 to leave it out"
    )


def check_reduction(reduction: object) -> None:
    """Refuse what is not a reduction.

    Raises:
        UsageError: Names it.
    """
    if reduction not in (None, "mean", "sum"):
        raise UsageError(
            f"reduction is {reduction!r}; give 'sum' if the loss is a sum over its samples or "
            "tokens, or 'mean', the default"
        )


def needs_plans() -> UsageError:
    """Return the error of a window without a plan, where the policy needs one."""
    return UsageError(
        "windows of local steps need ddp.loader over a map-style data set, whose samples can "
        "be queued for each rank; use one, or policy 'sync'"
    )
