"""Learning rates that follow the team's global progress, never a rank's own step count."""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from evener.errors import UsageError
from evener.run.windows.results import Progress

#: A factor of the base learning rate, from what the team has applied so far.
ProgressSchedule = Callable[[Progress], float]


def refuse_other_rates(rates: Mapping[int, float]) -> None:
    """Checks that every rank has the same learning rates.

    Args:
        rates: Sum of them by rank.

    Raises:
        UsageError: On every rank; names two that differ, and the usual cause.
    """
    (first, mine), *others = rates.items()
    for rank, theirs in others:
        if not math.isclose(theirs, mine, rel_tol=1e-6):
            raise UsageError(
                f"learning rates differ: they sum to {mine:.6g} on rank {first} and to "
                f"{theirs:.6g} on rank {rank}. Ranks go round the loop a different number of "
                "times, so scheduler.step() must not be called there; give the scheduler to "
                "Ddp.setup, or step it once an epoch"
            )


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
        self._agreed: tuple[list[dict[str, Any]], list[dict[str, Any]]] | None = None
        self._num_ahead = 0
        if isinstance(scheduler, LRScheduler):
            self._schedulers = [scheduler]
        elif isinstance(scheduler, Sequence):
            self._schedulers = list(scheduler)
        elif scheduler is not None:
            self._factor = scheduler
            for group in self._groups():
                group.setdefault("initial_lr", group["lr"])
        self._places = [_place(s) for s in self._schedulers]
        #: Sum of all learning rates at the last ``agree``.
        self.agreed_rates = 0.0

    def before_update(self, progress: Progress) -> None:
        """Sets the rates for the update that follows ``progress``.

        Raises:
            UsageError: A scheduler of ``Ddp.setup`` was stepped by the user.
        """
        for scheduler, expected in zip(self._schedulers, self._places, strict=True):
            if _place(scheduler) != expected:
                raise UsageError(
                    f"{type(scheduler).__name__}.step() was called in the loop, but it was given "
                    "to Ddp.setup, which steps it after each window; remove one of the two"
                )
        if self._factor is not None:
            factor = self._factor(progress)
            for group in self._groups():
                group["lr"] = group["initial_lr"] * factor

    def after_update(self, optimizer: Optimizer | None = None) -> None:
        """Moves torch schedulers on by one step: those of one optimizer, or all."""
        for number, scheduler in enumerate(self._schedulers):
            if optimizer is None or scheduler.optimizer is optimizer:
                scheduler.step()
                self._places[number] = _place(scheduler)

    # ── inside a window of local steps ───────────────────────────────────────────────────────────

    def run_ahead(self, progress: Progress, num_steps: int) -> None:
        """Sets the rates for a local step, at the progress that the team is predicted to have.

        Args:
            progress: The predicted one, for a function of ``Progress``.
            num_steps: Optimizer steps of the team since the last ``agree``, for torch schedulers;
                they never go back.
        """
        self.before_update(progress)
        if self._schedulers and self._agreed is None:
            self._agreed = (copy.deepcopy(self.state_dict()), self._settings())
        while self._num_ahead < num_steps:
            self._step_all()
            self._num_ahead += 1

    def agree(self, progress: Progress, num_steps: int) -> None:
        """Sets the rates that all ranks have after a window, whatever each has run ahead.

        Args:
            progress: The team's.
            num_steps: Optimizer steps of the team since the last call.
        """
        if self._agreed is not None:
            states, settings = self._agreed
            self.load_state_dict(states)
            self._apply(settings)
        self._agreed, self._num_ahead = None, 0
        for _ in range(num_steps):
            self._step_all()
        self.before_update(progress)
        self.agreed_rates = sum(float(group["lr"]) for group in self._groups())

    @contextmanager
    def as_agreed(self) -> Iterator[None]:
        """Shows the rates of the last ``agree`` in the optimizers for the length of the block."""
        if self._agreed is None:
            yield
            return
        now = self._settings()
        self._apply(self._agreed[1])
        try:
            yield
        finally:
            self._apply(now)

    def _step_all(self) -> None:
        for optimizer in self._optimizers:
            if self._schedulers and not getattr(optimizer, "_opt_called", True):
                # A rank may have had no step of its own so far, others had: nothing to warn of.
                optimizer._opt_called = True  # type: ignore[attr-defined]
        self.after_update()

    def _settings(self) -> list[dict[str, Any]]:
        return [{k: v for k, v in g.items() if k != "params"} for g in self._groups()]

    def _apply(self, settings: list[dict[str, Any]]) -> None:
        for group, values in zip(self._groups(), settings, strict=True):
            group.update(values)

    def _groups(self) -> list[dict[str, Any]]:
        # Asked for every time: loading an optimizer's state makes new groups.
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    def state_dict(self) -> list[dict[str, object]]:
        """State of the torch schedulers, in order; inside a window, as all ranks have agreed."""
        if self._agreed is not None:
            return list(self._agreed[0])
        return [s.state_dict() for s in self._schedulers]

    def load_state_dict(self, states: Sequence[dict[str, object]]) -> None:
        """Restores ``state_dict``."""
        for scheduler, state in zip(self._schedulers, states, strict=True):
            scheduler.load_state_dict(state)
        self._places = [_place(s) for s in self._schedulers]


def _place(scheduler: LRScheduler) -> object:
    """Changes with each step; a chain of schedulers has no count of its own."""
    return getattr(scheduler, "last_epoch", None)
