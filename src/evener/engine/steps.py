"""A rank's local steps in one window: done, timed, counted, each at its learning rate."""

import time
from dataclasses import dataclass, replace
from typing import final

from evener.engine.emulate import Slowdown
from evener.engine.local_update import LocalUpdate
from evener.engine.loss_scale import LocalLossScale
from evener.engine.results import Progress
from evener.engine.schedule import Schedule
from evener.engine.share import Share
from evener.planning.clock import WindowClock
from evener.planning.local import LocalPlan


@dataclass(slots=True, kw_only=True)
class Work:
    """What this rank has done in the window so far; see ``LocalReport``."""

    weight: float = 0.0
    loss_sum: float = 0.0
    compute_s: float = 0.0
    busy_s: float = 0.0
    micro_batches: int = 0
    samples: int = 0
    steps: int = 0
    skipped: int = 0
    overflows: int = 0
    non_finite: int = 0
    warmup_steps: int = 0
    warmup_samples: int = 0
    warmup_s: float = 0.0
    warmup_busy_s: float = 0.0


@final
class LocalSteps:
    """Makes local steps and keeps account of them.

    Args:
        rank: This rank.
        update: Applies gradients.
        schedule: Sets learning rates.
        slowdown: Stretches compute on a rank that is emulated slower.
        scale: The loss scale of fp16.
        skip: Leave out steps that are not finite, instead of reporting them.

    Attributes:
        work: The window so far.
        clock: Says when it is over.
        batch_weight: Weight of the last batch; 0 before the first.
        mean_weight: Weight of a step of the last window, over all ranks; 0 before the first.
    """

    def __init__(
        self,
        rank: int,
        update: LocalUpdate,
        schedule: Schedule,
        slowdown: Slowdown,
        scale: LocalLossScale,
        *,
        skip: bool,
    ) -> None:
        self.work = Work()
        self.clock = WindowClock()
        self.batch_weight = 0.0
        self.mean_weight = 0.0
        self._rank = rank
        self._update = update
        self._schedule = schedule
        self._slowdown = slowdown
        self._scale = scale
        self._skip = skip
        self._since_s = 0.0

    def resume_clock(self) -> None:
        """Goes on measuring after an exchange: what came before was not this rank's own work."""
        self._since_s = time.perf_counter()

    def next_window(self, most: int) -> Work:
        """Begins a window of at most ``most`` steps; returns the work of the one before."""
        done, self.work = self.work, Work()
        self.clock.open(most)
        return done

    def follow(self, plan: LocalPlan) -> None:
        """Goes on by a plan, whose time runs from now."""
        deadline_s = time.perf_counter() + plan.window_s
        self.clock.limit(plan.most[self._rank], deadline_s, least=plan.least)
        self.resume_clock()

    def finish(
        self,
        share: Share,
        plan: LocalPlan,
        in_flight: LocalPlan | None,
        progress: Progress,
        batch_size: int,
    ) -> bool:
        """Makes the step of a batch whose last micro-batch has been computed.

        Args:
            share: The batch.
            plan: The plan in force.
            in_flight: That of a window whose average has not landed.
            progress: What the team has applied.
            batch_size: Samples of a usual batch.

        Returns:
            Whether it was made. A step that is not finite, or has no weight, is left out.
        """
        started_s, slow_start = time.perf_counter(), self._slowdown.start()

        def set_rates() -> None:
            steps, ahead = self._ahead(plan, in_flight, progress, batch_size)
            self._schedule.run_ahead(ahead, steps)

        loss_sum = share.loss_sum
        code = self._update.apply(share, set_rates)
        work = self.work
        work.steps += 1
        work.samples += share.samples
        work.micro_batches += share.micro_batches
        made = not code and share.weight > 0
        if not made:
            overflowed = bool(code) and self._scale.shrink()
            work.skipped += 1
            work.overflows += overflowed
            work.non_finite = 0 if self._skip or overflowed else code
        else:
            work.weight += share.weight
            work.loss_sum += loss_sum
            self.batch_weight = share.weight
        elapsed_s = time.perf_counter() - started_s
        compute_s = share.compute_s + elapsed_s + self._slowdown.after(slow_start)
        now_s = time.perf_counter()
        busy_s, self._since_s = now_s - self._since_s, now_s
        work.compute_s += compute_s
        work.busy_s += busy_s
        if share.warmup.samples:
            work.warmup_steps += 1
            work.warmup_samples += share.samples
            work.warmup_s += compute_s
            work.warmup_busy_s += busy_s
        self.clock.count_step(None if share.warmup.samples else busy_s)
        return made

    def _ahead(
        self,
        plan: LocalPlan,
        in_flight: LocalPlan | None,
        progress: Progress,
        batch_size: int,
    ) -> tuple[int, Progress]:
        """What the team is predicted to have done by now: steps since the average, and progress.

        Committed, plus the planned total times this rank's own way through the window.
        """
        own = plan.steps[self._rank]
        steps = plan.total_steps * min(1.0, self.work.steps / own) if own else 0.0
        if in_flight is not None:
            steps += in_flight.total_steps
        return int(steps), replace(
            progress,
            steps=progress.steps + int(steps),
            samples=progress.samples + int(steps * batch_size),
            weight=progress.weight + steps * (self.mean_weight or batch_size),
        )
