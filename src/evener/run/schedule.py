"""Learning rates that follow the team's global progress, never a rank's own step count."""

from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from evener.run.results import Progress

#: A factor of the base learning rate, from what the team has applied so far.
ProgressSchedule = Callable[[Progress], float]


class Schedule:
    """Sets learning rates once per optimizer step of the team.

    A torch scheduler is stepped after each applied window, on every rank alike. A function of
    ``Progress`` gives the factor of each parameter group's base rate before the update.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        scheduler: LRScheduler | Sequence[LRScheduler] | ProgressSchedule | None,
    ) -> None:
        self._optimizers = optimizers
        self._factor: ProgressSchedule | None = None
        self._schedulers: list[LRScheduler] = []
        if isinstance(scheduler, LRScheduler):
            self._schedulers = [scheduler]
        elif isinstance(scheduler, Sequence):
            self._schedulers = list(scheduler)
        elif scheduler is not None:
            self._factor = scheduler
            for group in self._groups():
                group.setdefault("initial_lr", group["lr"])

    def before_update(self, progress: Progress) -> None:
        """Sets the rates for the update that follows ``progress``."""
        if self._factor is not None:
            factor = self._factor(progress)
            for group in self._groups():
                group["lr"] = group["initial_lr"] * factor

    def after_update(self) -> None:
        """Moves torch schedulers on by one step."""
        for scheduler in self._schedulers:
            scheduler.step()

    def _groups(self) -> list[dict[str, Any]]:
        # Asked for every time: loading an optimizer's state makes new groups.
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    def state_dict(self) -> list[dict[str, object]]:
        """State of the torch schedulers, in order."""
        return [s.state_dict() for s in self._schedulers]

    def load_state_dict(self, states: Sequence[dict[str, object]]) -> None:
        """Restores ``state_dict``."""
        for scheduler, state in zip(self._schedulers, states, strict=True):
            scheduler.load_state_dict(state)
