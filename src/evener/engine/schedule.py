"""Learning rates that follow the team's global progress, never a rank's own step count."""

import copy
import math
import struct
import zlib
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


#: Learning rates by optimizer and parameter group.
Rates = list[list[float]]


def rates_of(optimizers: Sequence[Optimizer]) -> Rates:
    """Return the learning rates as they are now; those kept in tensors, too."""
    return [[float(group["lr"]) for group in o.param_groups] for o in optimizers]


def set_rates(optimizers: Sequence[Optimizer], rates: Rates) -> None:
    """Set every learning rate to what ``rates_of`` returned, perhaps on another rank."""
    for optimizer, values in zip(optimizers, rates, strict=True):
        for group, value in zip(optimizer.param_groups, values, strict=True):
            _set_rate(group, value)


def digest_of(rates: Rates) -> float:
    """Return 32 bits that tell learning rates apart; exact in float64."""
    flat = [rate for group in rates for rate in group]
    return float(zlib.crc32(struct.pack(f"<{len(flat)}d", *flat)))


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
        if [len(groups) for groups in theirs] != [len(groups) for groups in mine]:
            raise UsageError(
                f"optimizers have {sum(map(len, mine))} parameter groups on rank {first} and "
                f"{sum(map(len, theirs))} on rank {rank}; add the same groups on every rank"
            )
        for number, values in enumerate(mine):
            for group, value in enumerate(values):
                if not math.isclose(theirs[number][group], value, rel_tol=1e-6):
                    whose = f" of optimizer {number}" if len(mine) > 1 else ""
                    raise UsageError(
                        f"learning rates differ: that of parameter group {group}{whose} is "
                        f"{value:.6g} on rank {first} and {theirs[number][group]:.6g} on rank "
                        f"{rank}. Ranks go round the loop a different number of times, so neither "
                        "a local counter nor scheduler.step() in the loop may set it; compute it "
                        "from ddp.window, or give the scheduler to Ddp.setup"
                    )
    return mine


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
                group.setdefault("initial_lr", float(group["lr"]))
        self._places = [_place(s) for s in self._schedulers]
        self.agreed_rates: Rates = []
        #: What was set here last; ``None`` where whatever is found is taken.
        self._known: Rates | None = None

    def before_update(self, progress: Progress) -> None:
        """Sets the rates for the update that follows ``progress``.

        Raises:
            UsageError: A scheduler of ``Ddp.setup`` was stepped by the user, or a learning rate
                that it sets was set by the user.
        """
        for scheduler, expected in zip(self._schedulers, self._places, strict=True):
            if _place(scheduler) != expected:
                raise UsageError(
                    f"{type(scheduler).__name__}.step() was called in the loop, but it was given "
                    "to Ddp.setup, which steps it after each window; remove one of the two"
                )
        if self._factor is not None:
            self._refuse_changes(
                "the function given to Ddp.setup as scheduler sets it before every update; remove "
                "one of the two"
            )
            factor = self._factor(progress)
            for group in self._groups():
                _set_rate(group, float(group["initial_lr"]) * factor)
            self._known = rates_of(self._optimizers)

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

        Raises:
            UsageError: A learning rate was set in the user's loop.
        """
        self.refuse_setting_by_hand()
        self.before_update(progress)
        if self._schedulers and self._agreed is None:
            self._agreed = (copy.deepcopy(self.state_dict()), self._settings())
        while self._num_ahead < num_steps:
            self._step_all()
            self._num_ahead += 1
        self.accept()

    def accept(self) -> None:
        """Take the rates as they are, as between epochs, where all ranks are at one place."""
        self._known = rates_of(self._optimizers)

    def refuse_setting_by_hand(self) -> None:
        """Refuse a learning rate that was set inside a window of local steps.

        Raises:
            UsageError: Names the parameter group, and what it was set to.
        """
        self._refuse_changes(
            "ranks make a different number of local steps in a window, so a rate set by hand would "
            "mean something else on each; give it to Ddp.setup as a factor of the base learning "
            "rate, scheduler=lambda progress: f(progress.steps), or use policy 'sync'"
        )

    def _refuse_changes(self, why: str) -> None:
        before, now = self._known, rates_of(self._optimizers)
        if before is None:
            return
        for old, new in zip(before, now, strict=True):
            for group, (was, value) in enumerate(zip(old, new, strict=False)):
                if not math.isclose(was, value, rel_tol=1e-6):
                    raise UsageError(
                        f"the learning rate of parameter group {group} was set from {was:.6g} to "
                        f"{value:.6g} in the loop, but {why}"
                    )

    def agree(self, progress: Progress, num_steps: int) -> None:
        """Sets the rates that all ranks have after a window, whatever each has run ahead.

        Args:
            progress: The team's.
            num_steps: Optimizer steps of the team since the last call.
        """
        self.refuse_setting_by_hand()
        if self._agreed is not None:
            states, settings = self._agreed
            self.load_state_dict(states)
            self._apply(settings)
            self.accept()
        self._agreed, self._num_ahead = None, 0
        for _ in range(num_steps):
            self._step_all()
        self.before_update(progress)
        self.accept()
        self.agreed_rates = rates_of(self._optimizers)

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
        self._known = None  # a checkpoint brings learning rates along


def _set_rate(group: dict[str, Any], rate: float) -> None:
    """Set a group's learning rate; in place where it is a tensor, which a graph may have kept."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def _place(scheduler: LRScheduler) -> object:
    """Changes with each step; a chain of schedulers has no count of its own."""
    return getattr(scheduler, "last_epoch", None)
