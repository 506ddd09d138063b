"""Learning rates that follow the team's global progress, never a rank's own step count."""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from evener.engine.results import Progress
from evener.errors import UsageError

#: A factor of the base learning rate, from what the team has applied so far.
ProgressSchedule = Callable[[Progress], float]

#: Learning rates of all parameter groups, those of the first optimizer first.
Rates = list[float]


def rates_of(optimizers: Sequence[Optimizer]) -> Rates:
    """Return the learning rates as they are now; those kept in tensors, too."""
    return [float(group["lr"]) for group in _groups_of(optimizers)]


def set_rates(optimizers: Sequence[Optimizer], rates: Rates) -> None:
    """Set every learning rate to what ``rates_of`` returned, perhaps on another rank."""
    for group, rate in zip(_groups_of(optimizers), rates, strict=True):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)  # in place, as a graph may have kept it
        else:
            group["lr"] = rate


def agree_on_rates(rates: Mapping[int, Rates]) -> Rates:
    """Return the learning rates of the ranks that have a share of the window.

    Args:
        rates: By rank; at least one.

    Returns:
        Those of the first of these ranks. The others' are the same, but for rounding.

    Raises:
        UsageError: Two ranks differ; names them, the parameter group, and both values.
    """
    (first, mine), *others = rates.items()
    for rank, theirs in others:
        for group, one, other in _differences(mine, theirs):
            raise UsageError(
                f"learning rates differ: that of parameter group {group} is {one:.6g} on "
                f"rank {first} and {other:.6g} on rank {rank}. Ranks run different numbers of "
                "loop iterations, so neither a local counter nor scheduler.step() in the loop may "
                "set it; compute it from ddp.window, or give the scheduler to Ddp.setup"
            )
    return mine


def _groups_of(optimizers: Sequence[Optimizer]) -> list[dict[str, Any]]:
    # Read every time: loading an optimizer's state makes new groups.
    return [group for optimizer in optimizers for group in optimizer.param_groups]


def _differences(some: Rates, others: Rates) -> Iterator[tuple[int, float, float]]:
    """Yield the number of a group, and both rates, if they differ by more than rounding."""
    for group, (one, other) in enumerate(zip(some, others, strict=False)):
        if not math.isclose(one, other, rel_tol=1e-6):
            yield group, one, other


class Schedule:
    """Sets learning rates once per optimizer step of the team.

    A torch scheduler is stepped after each applied window, on every rank alike. A function of
    ``Progress`` gives the factor of each parameter group's base rate before the update.

    Attributes:
        agreed_rates: Learning rates at the last ``agree``.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        scheduler: LRScheduler | Sequence[LRScheduler] | ProgressSchedule | None,
    ) -> None:
        several = [scheduler] if isinstance(scheduler, LRScheduler) else scheduler
        self._optimizers = optimizers
        self._schedulers = list(several) if isinstance(several, Sequence) else []
        self._factor = None if isinstance(several, Sequence) else several
        self.agreed_rates: Rates = []
        self._places = self._find_places()
        #: The rates that were set here last; ``None`` if any rate is accepted.
        self._known: Rates | None = None
        #: Torch schedulers and rates at the last ``agree``, once a rank has run ahead.
        self._agreed: tuple[list[dict[str, Any]], Rates] | None = None
        self._num_ahead = 0
        for one in self._schedulers:
            # A rank may make no step while others do: torch's warning about that would be wrong.
            vars(one.optimizer)["_opt_called"] = True
        for group in _groups_of(optimizers) if self._factor is not None else ():
            group.setdefault("initial_lr", float(group["lr"]))

    def before_update(self, progress: Progress) -> None:
        """Set the rates for the update that follows ``progress``.

        Raises:
            UsageError: A scheduler of ``Ddp.setup`` was stepped by the user.
        """
        if self._places != self._find_places():
            raise UsageError(
                f"{type(self._schedulers[0]).__name__}.step() was called in the loop, but it was "
                "given to Ddp.setup, which steps it after each window; remove one of the two"
            )
        if self._factor is not None:
            factor = self._factor(progress)
            base = [float(group["initial_lr"]) for group in _groups_of(self._optimizers)]
            set_rates(self._optimizers, [rate * factor for rate in base])

    def after_update(self, optimizer: Optimizer | None = None) -> None:
        """Move torch schedulers on by one step: those of one optimizer, or all."""
        for scheduler in self._schedulers:
            if optimizer is None or scheduler.optimizer is optimizer:
                scheduler.step()
        self._places = self._find_places()

    # ── inside a window of local steps ───────────────────────────────────────────────────────────

    def run_ahead(self, progress: Progress, num_steps: int) -> None:
        """Set the rates for a local step, at the progress that the team is predicted to have.

        Args:
            progress: The predicted one, for a function of ``Progress``.
            num_steps: Optimizer steps of the team since the last ``agree``, for torch schedulers;
                they never go back.

        Raises:
            UsageError: A learning rate was set in the user's loop.
        """
        self.refuse_setting_by_hand()
        self.before_update(progress)
        if self._schedulers and self._agreed is None:
            self._agreed = (copy.deepcopy(self.state_dict()), rates_of(self._optimizers))
        while self._num_ahead < num_steps:
            self._num_ahead += 1
            self.after_update()
        self.accept()

    def accept(self) -> None:
        """Take the rates as they are, as between epochs, where all ranks are at one place."""
        self._known = rates_of(self._optimizers)

    def refuse_setting_by_hand(self) -> None:
        """Refuse a learning rate that was set inside a window of local steps.

        Raises:
            UsageError: Names the parameter group, and what it was set to.
        """
        now = rates_of(self._optimizers)
        for group, was, value in _differences(self._known or now, now):
            raise UsageError(
                f"the learning rate of parameter group {group} was set from {was:.6g} to "
                f"{value:.6g} in the loop, but ranks make a different number of local steps in a "
                "window, so a rate set by hand would mean something else on each; give it to "
                "Ddp.setup as a factor of the base learning rate, "
                "scheduler=lambda progress: f(progress.steps), or use policy 'sync'"
            )

    def agree(self, progress: Progress, num_steps: int) -> None:
        """Set the rates that all ranks have after a window, whatever each has run ahead.

        Args:
            progress: The team's.
            num_steps: Optimizer steps of the team since the last call.
        """
        self.refuse_setting_by_hand()
        if self._agreed is not None:
            states, rates = self._agreed
            self.load_state_dict(states)
            set_rates(self._optimizers, rates)
        self._agreed, self._num_ahead = None, 0
        for _ in range(num_steps):
            self.after_update()
        self.before_update(progress)
        self._known = self.agreed_rates = rates_of(self._optimizers)

    @contextmanager
    def as_agreed(self) -> Iterator[None]:
        """Show the rates of the last ``agree`` in the optimizers for the length of the block."""
        now = rates_of(self._optimizers)
        set_rates(self._optimizers, self._agreed[1] if self._agreed is not None else now)
        try:
            yield
        finally:
            set_rates(self._optimizers, now)

    def _find_places(self) -> list[object]:
        """Return what changes with each step; a chain of schedulers has no count of its own."""
        return [getattr(scheduler, "last_epoch", None) for scheduler in self._schedulers]

    def state_dict(self) -> list[dict[str, object]]:
        """Return the torch schedulers' states, in order; in a window, as all ranks have agreed."""
        if self._agreed is not None:
            return list(self._agreed[0])
        return [s.state_dict() for s in self._schedulers]

    def load_state_dict(self, states: Sequence[dict[str, object]]) -> None:
        """Restore ``state_dict``."""
        for scheduler, state in zip(self._schedulers, states, strict=True):
            scheduler.load_state_dict(state)
        self._places = self._find_places()
        self._known = None  # a checkpoint holds learning rates
