"""An update that a device makes or skips by itself, while the host runs ahead."""

import math
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, Final, NamedTuple, final

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from evener.averaging.gradients import GradientAverager, Reading
from evener.comm.flat import FlatBuffers
from evener.devices import DeviceQueue
from evener.engine.engine import EngineOptions
from evener.engine.parking import ParkingEngine
from evener.engine.results import Progress, Round, WindowResult
from evener.engine.share import Lap, Share, Stopwatch
from evener.engine.state import TrainingState
from evener.engine.team import Team
from evener.planning.plans import WindowPlan
from evener.planning.report import LOSS, Report

_TAKING: Final = (Adam, AdamW, Adagrad, SGD)
"""Optimizers whose fused kernels leave an update out where ``found_inf`` is 1."""

_UNLEARNT: Final = 32
"""Windows kept for the policy to learn of; it remembers fewer."""


class Values(NamedTuple):
    """The numbers of an update that the host has read.

    Attributes:
        loss_sum: Σ weight · loss.
        norm: 2-norm of the gradients as they were summed.
        non_finite: See ``Report``.
    """

    loss_sum: float
    norm: float
    non_finite: int


@final
class LateUpdate:
    """The update of one rank whose numbers the host reads when it closes the next window.

    Loss and norm are computed on the device, where they decide by ``found_inf`` whether the update
    is made. Reading one of the numbers waits for the device. A norm above 1.8e19 counts as not
    finite where gradients are in float32 or narrower, as the sum of their squares overflows.

    Args:
        share: The rank's share, which is the whole window.
        averager: Averages the gradients, which are still sums.
        flat: Holds the gradients.
        queue: Queue of the device that the gradients are on.
        update: Time of the previous update, which counts as compute of this window.
        scale: The loss scale that the share was computed with.

    Attributes:
        found_inf: Shape ``()``, float32: 1 if the update must be skipped, else 0.
        plan: The plan of its window; after ``apply``.
        before: The team's progress before it.
        scale: As given.
    """

    def __init__(
        self,
        share: Share,
        averager: GradientAverager,
        flat: FlatBuffers,
        queue: DeviceQueue,
        update: Lap | None,
        scale: float,
    ) -> None:
        self._share, self._averager, self._update, self.scale = share, averager, update, scale
        losses, norms = share.losses_of(), averager.gather(each=True)
        self._num_losses, self._numbers = len(losses), flat.with_gradients()
        self._reading = Reading([*losses, *norms], queue)
        every = torch.cat([part.reshape(-1) for part in (*losses, *norms)])
        self.found_inf = every.isfinite().all().logical_not().to(torch.float32)
        self._norm = torch.linalg.vector_norm(every[len(losses) :])
        self._weight, self._factor = share.weight, 1.0
        self.plan, self.before = WindowPlan(0, 0, 0, 0, ()), Progress()

    def apply(self, plan: WindowPlan, before: Progress, max_norm: float | None) -> None:
        """Divide the gradients by their divisor, and clip them; set ``plan`` and ``before``."""
        self.plan, self.before = plan, before
        self._factor = self._share.scale_of() / self._share.divisor_of()
        self._averager.multiply(self._factor)
        if max_norm is not None:
            clip = max_norm / (self._norm * self._factor + 1e-6)
            self._averager.multiply(clip.clamp(max=1.0))

    @contextmanager
    def deciding(self, optimizers: Sequence[Optimizer]) -> Iterator[None]:
        """Give fused optimizers ``found_inf`` in a block, as ``GradScaler`` does."""
        for optimizer in optimizers:
            vars(optimizer)["found_inf"] = self.found_inf
        try:
            yield
        finally:
            for optimizer in optimizers:
                del vars(optimizer)["found_inf"]

    @cached_property
    def _values(self) -> Values:
        read = self._reading.read()
        losses, norms = read[: self._num_losses], read[self._num_losses :]
        loss_sum = self._share.loss_sum_of(None, (value for (value,) in losses))
        squares, non_finite = 0.0, 0
        for number, norm in zip(self._numbers, (n for own in norms for n in own), strict=True):
            squares += norm * norm
            if not (non_finite or math.isfinite(norm)):
                non_finite = number + 1
        non_finite = non_finite if all(math.isfinite(value) for (value,) in losses) else LOSS
        return Values(loss_sum, math.sqrt(squares), non_finite)

    @property
    def non_finite(self) -> int:
        """Return what is not finite, as in ``Report``; waits for the device."""
        return self._values.non_finite

    @property
    def loss(self) -> float:
        """Return the mean loss per unit of weight."""
        return self._values.loss_sum / self._weight

    @property
    def grad_norm(self) -> float:
        """Return the 2-norm of the mean gradient, before clipping; ``nan`` for a skipped update."""
        return math.nan if self.skipped else self._values.norm * self._factor

    @property
    def skipped(self) -> bool:
        """Return whether the update was skipped."""
        return self._values.non_finite != 0

    def show(self, result: WindowResult, progress: Progress) -> WindowResult:
        """Return the window's result, whose late numbers are read when they are asked for."""
        made = object.__new__(LateResult)
        vars(made).update(vars(result), progress=progress, late=self)
        return made

    def left_out(self, progress: Progress) -> Progress:
        """Return the team's progress without this update, which it has counted."""
        steps, skipped = progress.steps - 1, progress.skipped + 1
        return replace(progress, steps=steps, skipped=skipped, weight=self.before.weight)

    def complete(self, result: WindowResult) -> WindowResult:
        """Return the window's result with the numbers that its report lacks."""
        share, values = self._share, self._values
        update_s = 0.0 if self._update is None else self._update.seconds
        own = result.ranks[0]._replace(
            loss_sum=values.loss_sum,
            own_norm=values.norm,
            non_finite=values.non_finite,
            compute_s=share.compute_s + update_s,
            update_s=update_s,
            warmup_s=share.warmup_s,
        )
        return replace(result, ranks=(own,))


@final
class LateResult(WindowResult):
    """The result of a window whose update a device makes or skips.

    Attributes:
        late: The update.
    """

    late: ClassVar[LateUpdate]  # of each instance: no field

    def __new__(cls, **values: Any) -> WindowResult:  # type: ignore[misc]
        """Make a plain result of values, as where ``dataclasses.replace`` has read them."""
        return WindowResult(**values)

    @property
    def loss(self) -> float:
        """See ``LateUpdate``."""
        return self.late.loss

    @property
    def grad_norm(self) -> float:
        """See ``LateUpdate``."""
        return self.late.grad_norm

    @property
    def skipped(self) -> bool:
        """See ``LateUpdate``."""
        return self.late.skipped

    def __reduce__(self) -> Any:
        """Return plain values, for pickle."""
        return copy, (replace(self),)


class LateEngine(ParkingEngine):
    """The part of SYNC in which a device decides about updates."""

    def __init__(self, team: Team, training: TrainingState, options: EngineOptions) -> None:
        super().__init__(team, training, options)
        #: The update of this window, and that of the previous one, if the device decides.
        self._late: LateUpdate | None = None
        self._undecided: LateUpdate | None = None
        #: Time of the last update, which is part of this rank's cost of a window.
        self._update_lap: Lap | None = None
        self._sync_s = 0.0
        #: Windows that the policy has not learnt from.
        self._unlearnt: deque[tuple[list[Report], WindowPlan, float]] = deque(maxlen=_UNLEARNT)

    @abstractmethod
    def _average_buffers(
        self, found: Round, weight: float, what: str, unless: Tensor | None = None
    ) -> None:
        """Average the model's buffers by weight; leave them as before where ``unless`` is 1."""

    def _let_decide(self, queue: DeviceQueue) -> bool:
        """Let the device decide about the update of this window; return whether it can.

        Not with several ranks: they hear of one another's numbers before they exchange gradients.
        Optimizers must be exactly torch's, and fused. SGD must not have momentum: where its first
        update is left out, torch leaves the momentum uninitialised.
        """
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        can_decide = (
            self.world_size == 1
            and queue.has_milestones
            and self.slowdown.factor == 1
            and self.share.weight > 0
            and all(type(optimizer) in _TAKING for optimizer in self.optimizers)
            and all(group.get("fused") and not group.get("momentum") for group in groups)
            and len({group.data.device for group in self.flat.groups}) == 1
        )
        if can_decide:
            self._late = LateUpdate(
                self.share,
                self._averager,
                self.flat,
                queue,
                self._update_lap,
                self._scale.value,
            )
        return can_decide

    def _apply_late(self, found: Round, plan: WindowPlan, late: LateUpdate) -> WindowResult:
        """Queue the update of one rank, which the device skips if it is not finite."""
        started_s, weight = time.perf_counter(), found.verdict.weight
        late.apply(plan, self.progress, self.options.max_grad_norm)
        self._average_buffers(found, weight, f"window {plan.window}", late.found_inf)
        self._sync_s = time.perf_counter() - started_s
        watch = Stopwatch(self.slowdown, self.queue)
        if not self._schedule.is_empty:
            self._schedule.before_update(self.progress)
        lr = float(self.optimizers[0].param_groups[0]["lr"])
        self.habits.step(self.optimizers, late.deciding(self.optimizers))
        self.flat.attach_data()
        self._expected_weight = weight
        self.flat.zero_()
        self._update_lap = watch.stop()
        return self._result_of(
            found, plan, start=plan.start, size=plan.size, grad_norm=math.nan, lr=lr, skipped=False
        )

    def _undo(self, *, failed: bool) -> None:
        """Correct the progress, because the device has skipped the previous window's update."""
        late, applied = self._undecided, self._applied
        assert late is not None
        assert applied is not None
        self.progress = late.before if failed else late.left_out(self.progress)
        result = replace(applied.result, progress=self.progress)
        self._applied = None if failed else applied._replace(result=result)
        if failed:
            self.drop_share()
            self._drop_plans()

    def _learn_late(self, late: LateUpdate) -> None:
        """Complete the result of the previous window, and learn from it."""
        applied, self._undecided = self._applied, None
        assert applied is not None
        result = late.complete(applied.result)
        self._applied = applied._replace(result=result)
        if applied.leases:
            self._unlearnt.append((list(result.ranks), late.plan, math.nan))
        if not (result.skipped or self._schedule.is_empty):
            self._schedule.after_update()
        self._scale.update(overflowed=result.skipped, used=late.scale)
