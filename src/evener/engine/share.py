"""This rank's part of a window while it is being computed: micro-batches, weight, loss, time.

``WindowSpans`` measures how the time of a whole window is spent.
"""

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple, SupportsFloat, final

from torch import Tensor

from evener.devices import DeviceQueue, Milestone
from evener.engine.emulate import Slowdown
from evener.engine.memory import explain
from evener.engine.team import Team
from evener.errors import UsageError

LARGEST_WEIGHT: Final = 2.0**53
"""Counts up to here are exact in float64. Beyond, and below its inverse, gradients may overflow or
vanish while they are multiplied by it."""


class Lap(NamedTuple):
    """Compute between two points: milestones of a device's queue, or times of this thread.

    Attributes:
        start: Where it began; a time is in seconds.
        stop: Where it ended.
        added_s: Seconds that the emulation of a slow rank has added.
    """

    start: Milestone | float
    stop: Milestone | float
    added_s: float = 0.0

    @property
    def seconds(self) -> float:
        """Return its duration; waits until the device has passed both points."""
        if isinstance(self.start, Milestone):
            assert isinstance(self.stop, Milestone)
            return self.start.seconds_to(self.stop) + self.added_s
        assert isinstance(self.stop, float)
        return self.stop - self.start + self.added_s


class Stopwatch:
    """Measures this rank's compute, from when it is made.

    Args:
        slowdown: Stretches compute on a rank that is emulated slower.
        queue: Measures what the device does with what this thread queues, if it has milestones. By
            default, and without them, what this thread does.
    """

    def __init__(self, slowdown: Slowdown, queue: DeviceQueue | None = None) -> None:
        self._slow = (slowdown, slowdown.start()) if slowdown.factor > 1 else None
        self._queue = queue if queue is not None and queue.has_milestones else None
        self._started = self._now()

    def stop(self) -> Lap:
        """Return the time since then, what the emulation adds included."""
        if self._slow is None:
            return Lap(self._started, self._now())
        slowdown, start = self._slow
        if self._queue is not None:
            self._queue.finish()  # the emulation sleeps in proportion to compute
        stopped = self._now()
        return Lap(self._started, stopped, slowdown.after(start))

    def _now(self) -> Milestone | float:
        return time.perf_counter() if self._queue is None else self._queue.mark()


class OwnWork(NamedTuple):
    """The work of a rank in a window, until it meets the others.

    Attributes:
        began_s: When it asked for the first data; ``None`` before, and where it had no work.
        data_s: Seconds for which it waited for data.
    """

    began_s: float | None = None
    data_s: float = 0.0


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
        self._applied_s = time.perf_counter()
        self._sent_bytes = 0
        self._work = OwnWork()
        #: Completed work of a window that is not over: in ASYNC, work of the next one has begun.
        self._finished: OwnWork | None = None
        self._wait_s = self._sync_s = self._applied_s

    def restart(self) -> None:
        """Begin with a window now: the first one of an epoch."""
        self._applied_s, self._work, self._finished = time.perf_counter(), OwnWork(), None

    @property
    def elapsed_s(self) -> float:
        """Return the seconds since a window was applied, or the epoch was begun."""
        return time.perf_counter() - self._applied_s

    def receive(self, asked_s: float) -> None:
        """Note that data is here for which this rank has waited since ``asked_s``."""
        began_s, data_s = self._work
        waited_s = time.perf_counter() - asked_s
        self._work = OwnWork(asked_s if began_s is None else began_s, data_s + waited_s)

    def work_at_once(self) -> float:
        """Begin with the work when the previous window was applied; return that time."""
        self._work = OwnWork(self._applied_s)
        return self._applied_s

    def finish_work(self) -> None:
        """Count what follows for the next window, but for waiting and averaging."""
        self._finished, self._work = self._work, OwnWork()

    def begin_wait(self) -> None:
        """Begin to wait for the other ranks; where that happens again, the last time counts."""
        self._wait_s = self._sync_s = time.perf_counter()

    def begin_sync(self, waited_s: float = 0.0) -> None:
        """Begin to average, now or so many seconds after the wait began."""
        self._sync_s = self._wait_s + waited_s if waited_s else time.perf_counter()

    def apply(self) -> dict[str, Any]:
        """End the window, which has been applied; return fields of the report that tell of it."""
        now_s, before_s = time.perf_counter(), self._applied_s
        if self._finished is None:
            self.finish_work()
        work, self._finished, self._applied_s = self._finished or OwnWork(), None, now_s
        sent_bytes = self._team.sent_bytes
        sent_before, self._sent_bytes = self._sent_bytes, sent_bytes
        return {
            "elapsed_s": now_s - before_s,
            "data_s": work.data_s,
            "sent_bytes": sent_bytes - sent_before,
            "work_ago_s": 0.0 if work.began_s is None else now_s - work.began_s,
            "wait_ago_s": now_s - self._wait_s,
            "sync_ago_s": max(0.0, now_s - self._sync_s),
        }


class Share:
    """Accounts for the micro-batches of one rank in one window.

    The clock runs from the moment a micro-batch is handed out to ``end_micro_batch``, so it counts
    the user's loop and never a wait for data or for other ranks.

    Losses for all optimizers together count for the part ``None``; where optimizers take turns,
    those for one of them count for the part of its number.

    Args:
        planned: Micro-batches of the share.
        scale: What weights are divided by before backward; see ``GradientAverager``. ``None``
            takes the weight itself, where this one micro-batch is the whole window: then nothing is
            multiplied, and its gradient is used as it is.
        slowdown: Stretches compute on a rank that is emulated slower.
        queue: Of the device that the rank computes on, if it has one.
        known_sizes: Sizes of micro-batches that this rank has computed before; those of this share
            are added. The first one of a size pays for what is set up once (caches, autotuning,
            compiling), and tells nothing of the rank's speed.

    Attributes:
        queue: As given.
        samples: Samples computed.
        micro_batches: Micro-batches computed.
        warmup_samples: How many of the samples were in the first micro-batch of a size.
        warmup_micro_batches: The number of these micro-batches.
        in_micro_batch: Whether a micro-batch was handed out and not yet ended.
        open_samples: Samples of the micro-batch that is being computed; 0 outside of one.
        turns: How often an optimizer has been stepped alone.
    """

    def __init__(
        self,
        planned: int,
        scale: float | None,
        slowdown: Slowdown,
        queue: DeviceQueue | None,
        known_sizes: set[int],
    ) -> None:
        self.samples = self.micro_batches = self.turns = self.open_samples = 0
        self.warmup_samples = self.warmup_micro_batches = 0
        self.in_micro_batch = False
        self._planned = planned
        self._scale = scale
        self._slowdown = slowdown
        self.queue = queue
        self._known_sizes = known_sizes
        self._weights: dict[int | None, float] = {}
        self._losses: list[tuple[int | None, float, Tensor]] = []
        #: By part, the weight of the micro-batch that is being computed.
        self._open_weights: dict[int | None, float] = {}
        #: Whether the losses of a part are sums.
        self._summed: dict[int | None, bool] = {}
        self._laps: list[Lap] = []
        self._warmup_laps: list[Lap] = []
        self._first_lap = 0
        self._watch = Stopwatch(slowdown, queue)

    @property
    def micro_batch_weight(self) -> float:
        """Return the weight of the present micro-batch; 0 before its backward."""
        return next(iter(self._open_weights.values()), 0.0)

    @property
    def weight(self) -> float:
        """Return the weight of the micro-batches so far, of the first turn if there are several."""
        return next(iter(self._weights.values()), 0.0)

    def weight_of(self, part: int | None) -> float:
        """Return the weight of the losses of a part."""
        return self._weights.get(part, 0.0)

    def scale_of(self, part: int | None = None) -> float:
        """Return what the weights of a part were divided by.

        A power of two, or the divisor of the only micro-batch.
        """
        return self._scale if self._scale is not None else self.divisor_of(part) or 1.0

    def is_summed(self, part: int | None = None) -> bool:
        """Return whether the losses of a part are sums."""
        return self._summed.get(part, False)

    def divisor_of(self, part: int | None = None) -> float:
        """Return what the part's gradient would be divided by if no other rank had a share."""
        return 1.0 if self.is_summed(part) else self.weight_of(part)

    @property
    def compute_s(self) -> float:
        """Return the seconds that the micro-batches took; waits for the device."""
        return sum(lap.seconds for lap in self._laps)

    @property
    def warmup_s(self) -> float:
        """Return how many of these seconds the first micro-batches of their sizes took."""
        return sum(lap.seconds for lap in self._warmup_laps)

    def losses_of(self, part: int | None = None) -> list[Tensor]:
        """Return the losses of a part, shape ``()`` each; a device may still compute them."""
        return [loss.reshape(()) for of, _, loss in self._losses if of == part]

    def loss_sum_of(self, part: int | None, losses: Iterable[float]) -> float:
        """Return Σ weight · loss of a part; ``losses`` are the values of ``losses_of``.

        The weight is not a factor of losses that are sums already.
        """
        weights = [weight for of, weight, _ in self._losses if of == part]
        total = 0.0
        for weight, value in zip(weights, losses, strict=True):
            total += weight * value
        return total

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

    def count_since(self, began_s: float) -> None:
        """Count what the user's own loop has done since then: fetching data, the forward pass."""
        self._laps.append(Lap(began_s, time.perf_counter()))

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
        units = float(self.open_samples) if weight is None else checked_weight(weight)
        if (None in self._weights) != (part is None) and self._weights:
            raise UsageError(
                "ddp.backward was called with and without optimizer= in one window; name the "
                "optimizer for every loss, or for none"
            )
        if self._summed.setdefault(part, summed) != summed:
            raise UsageError(
                "ddp.backward was called with reduction='sum' and without it in one window; make "
                "both losses sums, or both means, or add them up before one call"
            )
        known = self._open_weights.get(part)
        if known is None:
            known = self._open_weights[part] = units
            self._weights[part] = self.weight_of(part) + units
        elif weight is not None and units != known:
            raise UsageError(
                f"second ddp.backward on one micro-batch with weight {units}, the first had "
                f"{known}; losses of one micro-batch share one weight: scale the loss instead"
            )
        if known == 0 or self._planned == 0:
            return  # a void one: tensors that its forward has kept may have been overwritten
        factor = 1.0 if summed else known
        self._losses.append((part, factor, loss.detach()))
        factor /= self.scale_of(part)
        scaled = loss if factor == 1.0 else loss * factor
        try:
            scaled.backward(inputs=inputs)  # type: ignore[no-untyped-call]
        except Exception as error:
            refuse_loss(loss)
            explain(error, self.open_samples)
            raise

    def not_ended(self) -> UsageError:
        """Return the error of a loop that continues without ``ddp.step()``."""
        return UsageError(
            "the loop asked for the next batch without ddp.step() on this one; call "
            "ddp.backward(loss) and ddp.step() once for every batch of the loader. To evaluate, "
            "use ddp.eval_loader, which asks for neither"
        )

    def start_turn(self, part: int) -> None:
        """Count a step of one optimizer alone, if that acts on the whole share.

        Raises:
            UsageError: It would not; says what is missing.
        """
        if part not in self._open_weights:
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
        self.turns += 1

    def pause(self) -> None:
        """Stop the clock while ranks exchange in mid-batch; ``resume`` restarts it."""
        self._laps.append(self._watch.stop())

    def resume(self) -> None:
        """Restart the clock after ``pause``."""
        self._watch = Stopwatch(self._slowdown, self.queue)

    def end_micro_batch(self) -> bool:
        """Stop the clock; return whether it was the last micro-batch of the share."""
        if not self._open_weights:
            raise UsageError(
                "ddp.step() without ddp.backward(loss) on this micro-batch; call backward first "
                "(with weight=0 to leave a batch out)"
            )
        if None not in self._open_weights and not self.turns:
            raise UsageError(
                "ddp.step() after ddp.backward(loss, optimizer=...); call ddp.step(optimizer) for "
                "each optimizer in its turn, or leave optimizer= out to step all together"
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


def checked_weight(weight: object) -> float:
    """Return a weight as a number; one of NumPy's, or a tensor with one element, will do.

    Raises:
        UsageError: It is not 0, and not a number of units either.
    """
    is_bool = isinstance(weight, bool) or str(getattr(weight, "dtype", "")).endswith("bool")
    units = None if is_bool else _as_number(weight)
    if units is None or not (units == 0 or 1 / LARGEST_WEIGHT <= units <= LARGEST_WEIGHT):
        raise UsageError(
            f"weight is {weight!r}; give the number of samples or tokens that the loss is the mean "
            "of, or 0 to leave it out"
        )
    return units


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
    """Refuse a loss that is not a tensor, such as that of ``loss.item()``.

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
    """Say why a backward has failed, where the loss itself is the cause.

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


def needs_plans() -> UsageError:
    """Return the error of a window without a plan, where the policy needs one."""
    return UsageError(
        "windows of local steps need ddp.loader over a map-style data set, whose samples can "
        "be queued for each rank; use one, or policy 'sync'"
    )
