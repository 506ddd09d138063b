"""Averages what a window has accumulated, and steps the optimizers: together, or one by one."""

import math
import time
from collections.abc import Sequence

from torch.optim import Optimizer

from evener.averaging.buffers import BufferAverager
from evener.averaging.gradients import GradientAverager
from evener.averaging.weights import combine, power_of_two_near
from evener.comm.base import Communicator
from evener.comm.flat import FlatBuffers
from evener.engine.engine import EngineOptions
from evener.engine.finite import overflow
from evener.engine.results import Progress, RankRecord, WindowResult
from evener.engine.share import Share
from evener.planning.plan import WindowPlan, WindowReport


class Updater:
    """Applies windows on one rank.

    A *part* is the number of one optimizer, which is then stepped alone on the gradients of its own
    parameters; ``None`` stands for all optimizers together.

    Args:
        flat: Gradients and parameters; each optimizer's are a part.
        buffers: Keeps the model's buffers equal.
        optimizers: In the order of their parts.
        comm: Joins the ranks.
        options: What the engine was told.

    Attributes:
        expected_weight: Weight of the last applied window, the guess for the next; 0 for none.
        update_s: Seconds that the last update took on this rank.
        own_norm: 2-norm of this rank's own gradient, divided by ``scale``, at the last ``gather``.
    """

    def __init__(
        self,
        flat: FlatBuffers,
        buffers: BufferAverager,
        optimizers: Sequence[Optimizer],
        comm: Communicator,
        options: EngineOptions,
    ) -> None:
        self.flat = flat
        self.buffers = buffers
        self.optimizers = optimizers
        self.expected_weight = 0.0
        self.update_s = 0.0
        self.own_norm = 0.0
        self._options = options
        self._averagers: dict[int | None, GradientAverager] = {None: GradientAverager(flat, comm)}
        if len(optimizers) > 1:
            for part in range(len(optimizers)):
                self._averagers[part] = GradientAverager(flat, comm, part)

    def use(self, comm: Communicator) -> None:
        """Goes on with other ranks."""
        for averager in self._averagers.values():
            averager.comm = comm
        self.buffers.comm = comm

    def gather(self, part: int | None = None) -> int | None:
        """Makes this rank's gradients ready; see ``GradientAverager.gather``."""
        bad = self._averagers[part].gather()
        self.own_norm = self._averagers[part].own_norm or 0.0
        return bad

    def scale(self, samples: int) -> float:
        """What to divide weights by: a power of two near the next window's weight.

        Args:
            samples: Of that window, where no window has been applied yet.
        """
        expected = self.expected_weight or float(samples)
        return power_of_two_near(expected) / self._options.loss_scale.value

    def apply(
        self,
        plan: WindowPlan,
        reports: Sequence[WindowReport],
        share: Share,
        progress: Progress,
        *,
        buffers_changed: bool,
        part: int | None = None,
    ) -> tuple[WindowResult, float]:
        """Averages and updates; all ranks call it together.

        Returns:
            The result, and the seconds of the exchange.

        Raises:
            NonFiniteGradientError: The sum over ranks overflowed.
        """
        total_weight, loss = combine(reports) or (0.0, math.nan)
        what = f"window {plan.window}"
        norm, sync_s = math.nan, 0.0
        skipped = total_weight == 0 or any(r.non_finite for r in reports)
        if not skipped:
            started_s = time.perf_counter()
            norm = self._averagers[part].average(
                share.scale_of(part), total_weight, what=what, max_norm=self._options.max_grad_norm
            )
            if buffers_changed:
                self.agree_on_buffers(share, total_weight, what)
            sync_s = time.perf_counter() - started_s
            skipped = self._overflowed(norm, plan, progress, part)
        elif buffers_changed:
            self.buffers.restore()
        started_s, slow_start = time.perf_counter(), self._options.slowdown.start()
        self._options.before_update(progress)
        lr = float(self.optimizers[part or 0].param_groups[0]["lr"])
        if not skipped:
            self._update(part, what)
        # Also of a window left out: it may have overflowed because another weight was expected.
        self.expected_weight = total_weight or self.expected_weight
        if total_weight:
            self._options.loss_scale.update(overflowed=skipped)
        self.flat.zero_(part)
        elapsed_s = time.perf_counter() - started_s
        self.update_s = elapsed_s + self._options.slowdown.after(slow_start)
        return WindowResult(
            window=plan.window,
            epoch=plan.epoch,
            start=plan.start,
            size=plan.size,
            loss=loss,
            weight=total_weight,
            grad_norm=norm,
            lr=lr,
            skipped=skipped,
            progress=progress.after(plan.size, 0.0 if skipped else total_weight, skipped),
            applied_t=time.time(),
            ranks=tuple(RankRecord.of(r) for r in reports),
        ), sync_s

    def agree_on_buffers(self, share: Share, total_weight: float, what: str) -> None:
        """Averages the model's buffers by weight; all ranks call it together.

        A window without weight leaves them as they were.
        """
        if total_weight:
            self.buffers.average(share.weight, total_weight, what=what)
        else:
            self.buffers.restore()

    def may_skip(self, reports: Sequence[WindowReport]) -> bool:
        """Whether what is not finite is to be left out rather than to stop the team."""
        return self._options.non_finite == "skip" or self._options.loss_scale.explains(reports)

    def _overflowed(
        self, norm: float, plan: WindowPlan, progress: Progress, part: int | None
    ) -> bool:
        if math.isfinite(norm):
            return False
        if self.may_skip(()):
            return True
        self.flat.zero_(part)
        raise overflow(plan, progress.steps + 1)

    def _update(self, part: int | None, what: str) -> None:
        self.flat.mask_untouched(part)
        with self._options.habits.stepping():
            for optimizer in self.optimizers if part is None else [self.optimizers[part]]:
                optimizer.step()
        self.flat.attach_data()
        if self._options.unlike_devices:
            self._averagers[part].unify(what=f"parameters of {what}")
        self._options.after_update(None if part is None else self.optimizers[part])
