"""A rank's local steps in one window: its optimizers stepped on its own gradients, and counted."""

import math
import time
from dataclasses import replace
from operator import add
from typing import final

from evener.averaging.gradients import GradientAverager
from evener.comm.base import Communicator
from evener.engine.engine_options import EngineOptions
from evener.engine.results import Progress
from evener.engine.share import Share, Stopwatch
from evener.engine.training_state import TrainingState
from evener.planning.clock import WindowClock
from evener.planning.plans import LocalPlan
from evener.planning.report import LOSS, NOTHING, Report


@final
class LocalSteps:
    """Makes local steps, each at its learning rate, and keeps account of them.

    Args:
        training: What it trains with; the parameters are laid out for one rank, so that gradients
            stay where autograd puts them.
        options: The options; ``lr_factor`` multiplies the learning rate for the length of a step.

    Attributes:
        optimizers: The rank's own.
        batch_weight: Weight of the last batch; 0 before the first.
    """

    def __init__(self, training: TrainingState, options: EngineOptions) -> None:
        self.optimizers = training.optimizers
        self.batch_weight = 0.0
        self._rank = 0
        self._flat = training.flat
        self._schedule = training.schedule
        self._options = options
        self._guards = options.guards
        self._lr_factor = options.lr_factor
        self._averager = GradientAverager(self._flat, Communicator())
        self._clock = WindowClock()
        self._work = NOTHING
        self._plan: LocalPlan | None = None
        self._since_s = 0.0

    @property
    def lr(self) -> float:
        """Return the learning rate of the first parameter group, as it is applied."""
        return float(self.optimizers[0].param_groups[0]["lr"]) * self._lr_factor

    @property
    def num_done(self) -> int:
        """Return the steps of the window so far, skipped ones included."""
        return self._work.steps

    def wants_another(self) -> bool:
        """Return whether to start another step now."""
        return not self._work.non_finite and self._clock.wants_another(time.perf_counter())

    def resume_clock(self) -> None:
        """Continue measuring after an exchange: what came before was not this rank's own work."""
        self._since_s = time.perf_counter()

    def next_window(self, most: int) -> Report:
        """Begin a window of at most ``most`` steps; return the work of the previous one."""
        done, self._work = self._work, NOTHING
        self._clock.open(most)
        return done

    def follow(self, plan: LocalPlan, rank: int) -> None:
        """Continue by a plan, as the rank of that number; its time runs from now."""
        self._plan, self._rank = plan, rank
        deadline_s = time.perf_counter() + plan.window_s
        self._clock.limit(plan.most[rank], deadline_s, least=plan.least)
        self.resume_clock()

    def finish(
        self, share: Share, in_flight: LocalPlan | None, progress: Progress, batch_size: int
    ) -> bool:
        """Make the step of a batch whose last micro-batch has been computed.

        Args:
            share: The batch.
            in_flight: The plan of a window whose average has not landed.
            progress: What the team has applied.
            batch_size: Samples of a usual batch.

        Returns:
            Whether it was made. A step that is not finite, or has no weight, is left out.
        """
        watch = Stopwatch(self._options.slowdown, share.queue)
        norms = self._averager.gather()
        gathering = watch.stop()
        loss_sum, code = share.losses().judge(self._averager, norms)
        watch = Stopwatch(self._options.slowdown)
        if not code and share.weight > 0:
            what, scale, divisor = "a local step", share.scale_of(), share.losses().divisor
            max_norm = self._options.max_grad_norm
            norm = self._averager.average(scale, divisor, what=what, max_norm=max_norm)
            code = 0 if math.isfinite(norm) else LOSS
        made = not code and share.weight > 0
        overflowed = False
        if made:
            self.batch_weight = share.weight
            self._run_ahead(in_flight, progress, batch_size)
            self._update()
        elif code:
            overflowed = self._options.loss_scale.shrink()
            if overflowed or self._options.non_finite == "skip":
                code = 0
        self._flat.zero_()
        compute_s = share.compute_s + gathering.seconds + watch.stop().seconds
        now_s = time.perf_counter()
        busy_s, self._since_s = now_s - self._since_s, now_s
        warms_up = share.warmup_samples > 0
        self._clock.count_step(None if warms_up else busy_s)
        step = Report(
            steps=1,
            samples=share.samples,
            micro_batches=share.micro_batches,
            weight=share.weight * made,
            loss_sum=loss_sum if made else 0.0,
            skipped=not made,
            overflows=overflowed,
            non_finite=code - self._work.non_finite,  # the last step's code counts, not the sum
            compute_s=compute_s,
            busy_s=busy_s,
            warmup_steps=warms_up,
            warmup_samples=share.samples * warms_up,
            warmup_s=compute_s * warms_up,
            warmup_busy_s=busy_s * warms_up,
        )
        self._work = Report(*map(add, self._work, step))
        return made

    def _run_ahead(self, in_flight: LocalPlan | None, progress: Progress, batch_size: int) -> None:
        """Set the learning rates for what the team is predicted to have done by now.

        That is what it has applied, plus the planned total times this rank's own way through the
        window.
        """
        plan, steps = self._plan, 0.0
        assert plan is not None, "a step follows a plan"
        if own := plan.steps[self._rank]:
            steps = plan.total_steps * min(1.0, self._work.steps / own)
        if in_flight is not None:
            steps += in_flight.total_steps
        mean_weight = progress.weight / progress.steps if progress.weight else batch_size
        predicted = replace(
            progress,
            steps=progress.steps + int(steps),
            samples=progress.samples + int(steps * batch_size),
            weight=progress.weight + steps * mean_weight,
        )
        self._schedule.run_ahead(predicted, int(steps))

    def _update(self) -> None:
        # Schedulers compute from what is in the groups, so the factor is there only for a moment.
        # Without a factor, rates are not written: if one is a tensor, a graph may have kept it.
        groups = [g for o in self.optimizers for g in o.param_groups if self._lr_factor != 1.0]
        rates = [group["lr"] for group in groups]
        self._flat.mask_untouched()
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate * self._lr_factor
        try:
            self._guards.step(self.optimizers)
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate
        self._flat.attach_data()
