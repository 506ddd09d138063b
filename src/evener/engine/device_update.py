"""An update whose numbers the host reads when it closes the next window, so that it runs ahead."""

import math
from copy import copy
from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import Any, ClassVar, final

import torch

from evener.averaging.gradients import GradientAverager
from evener.averaging.norms import Reading
from evener.comm.flat import FlatBuffers
from evener.devices import DeviceQueue
from evener.engine.results import Progress, WindowResult
from evener.engine.share import Share, Stopwatch
from evener.planning.plans import WindowPlan
from evener.planning.report import LOSS


@final
class DeviceUpdate:
    """The update of one rank that a device makes while the host continues.

    The host waits for the device before it reads loss or norm, and before the window is committed.
    If a number is not finite then, the update has been made all the same, and the team stops.

    Args:
        share: The rank's share, which is the whole window.
        averager: Averages the gradients, which are still sums.
        flat: Holds the gradients.
        queue: Queue of the device that the gradients are on.
        update: Time of the previous update, which counts as compute of this window.
        before: The team's progress before it.

    Attributes:
        plan: The plan of its window; after ``apply``.
        before: The team's progress before it.
    """

    def __init__(
        self,
        share: Share,
        averager: GradientAverager,
        flat: FlatBuffers,
        queue: DeviceQueue,
        update: Stopwatch | None,
        before: Progress,
    ) -> None:
        self._share, self._averager, self._update = share, averager, update
        self._losses, norms = share.losses(), averager.gather(each=True)
        self._numbers = flat.with_gradients()
        self._reading = Reading([*self._losses.values, *norms], queue)
        every = torch.cat([part.reshape(-1) for part in (*self._losses.values, *norms)])
        self._norm = torch.linalg.vector_norm(every[len(self._losses.values) :])
        self._factor = share.scale_of() / self._losses.divisor
        self.plan, self.before = WindowPlan(0, 0, 0, 0, ()), before

    def apply(self, plan: WindowPlan, max_norm: float | None) -> None:
        """Divide the gradients by their divisor, and clip them; set ``plan``."""
        self.plan = plan
        self._averager.multiply(self._factor)
        if max_norm is not None:
            clip = max_norm / (self._norm * self._factor + 1e-6)
            self._averager.multiply(clip.clamp(max=1.0))

    @cached_property
    def _values(self) -> tuple[float, list[float]]:
        """Return Σ weight · loss, and the norm of each gradient."""
        read, num_losses = self._reading.read(), len(self._losses.values)
        return self._losses.sum_of(read[:num_losses]), list(chain(*read[num_losses:]))

    @property
    def non_finite(self) -> int:
        """Return what is not finite, as in ``Report``; waits for the device."""
        loss_sum, norms = self._values
        bad = (i + 1 for i, n in zip(self._numbers, norms, strict=True) if not math.isfinite(n))
        return next(bad, 0) if math.isfinite(loss_sum) else LOSS

    @property
    def loss(self) -> float:
        """Return the mean loss per unit of weight."""
        return self._values[0] / self._share.weight

    @property
    def own_norm(self) -> float:
        """Return the 2-norm of the gradients as they were summed."""
        return math.sqrt(sum(norm * norm for norm in self._values[1]))

    @property
    def grad_norm(self) -> float:
        """Return the 2-norm of the mean gradient, before clipping."""
        return self.own_norm * self._factor

    def show(self, result: WindowResult) -> WindowResult:
        """Return the window's result, whose late numbers are read when they are asked for."""
        made = object.__new__(LateResult)
        vars(made).update(vars(result), update=self)
        return made

    def complete(self, result: WindowResult) -> WindowResult:
        """Return the window's result with the numbers that its report lacks."""
        share = self._share
        update_s = 0.0 if self._update is None else self._update.seconds
        own = result.ranks[0]._replace(
            loss_sum=self._values[0],
            own_norm=self.own_norm,
            non_finite=self.non_finite,
            compute_s=share.compute_s + update_s,
            update_s=update_s,
            warmup_s=share.warmup_s,
        )
        return replace(result, ranks=(own,))


@final
class LateResult(WindowResult):
    """The result of a window whose numbers a device is computing.

    Attributes:
        update: The update.
    """

    update: ClassVar[DeviceUpdate]  # of each instance: no field

    def __new__(cls, **values: Any) -> WindowResult:  # type: ignore[misc]
        """Make a plain result of values, as where ``dataclasses.replace`` has read them."""
        return WindowResult(**values)

    @property
    def loss(self) -> float:
        """See ``DeviceUpdate``."""
        return self.update.loss

    @property
    def grad_norm(self) -> float:
        """See ``DeviceUpdate``."""
        return self.update.grad_norm

    def __reduce__(self) -> Any:
        """Return plain values, for pickle."""
        return copy, (replace(self),)
