"""Guards of optimizers and gradients: ignore or refuse habits of plain loops inside a window.

A window's gradients are unfinished sums until every rank has added its part. A plain loop may act
on them in between. evener ignores such an act if its absence does what the user means. It refuses
the act with the remedy if it would work on numbers that the user does not expect. It also refuses a
model in two teams, and an optimizer with parameters that its team does not average.
"""

import gc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Final
from weakref import WeakValueDictionary

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils.hooks import RemovableHandle

from evener.comm.flat import FlatBuffers
from evener.engine.loss_graph import find_grad_scale, has_sum
from evener.errors import ConfigError, UsageError

LOOKED_AT: Final = 8
"""Losses that are looked at on each rank."""

#: Leaves optimizers their own parameters.
_PLAIN: Final = nullcontext()

#: The guards of each model that is in a team, by the model's ``id``.
_teams: WeakValueDictionary[int, "OptimizerGuards"] = WeakValueDictionary()


def refuse_second_team(models: Sequence[nn.Module]) -> None:
    """Refuse models that are in a team already.

    Raises:
        ConfigError: Names the model.
    """
    for model in models:
        if id(model) in _teams:
            gc.collect()  # a team is gone if neither it nor its optimizers are referenced any more
        if id(model) in _teams:
            raise ConfigError(
                f"this {type(model).__name__} is in a team already: Ddp.setup was called with it "
                "before, and its gradients would be averaged twice; close that team first "
                "(ddp.close(), or with Ddp.setup(...) as ddp), continue with it, or make the model "
                "and its optimizers again"
            )


def _is_hooked(optimizer: Optimizer) -> bool:
    """Return whether a step has hooks beside ours, or was replaced other than by a scheduler."""
    hooks = len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)
    step = vars(optimizer).get("step")
    # ``functools.wraps`` copies the scheduler's mark to what the user wraps around it.
    inner = getattr(step, "__wrapped__", None)
    is_of_scheduler = getattr(step, "_wrapped_by_lr_sched", False)
    return hooks > 1 or not (step is None or (is_of_scheduler and inner is type(optimizer).step))


class OptimizerGuards:
    """Watches one rank's optimizers and gradients.

    Args:
        flat: Knows the gradients.
        optimizers: Those of ``Ddp.setup``.
        warn: Shows the user a warning.
    """

    def __init__(
        self,
        flat: FlatBuffers,
        optimizers: Sequence[Optimizer],
        *,
        warn: Callable[[str], None],
    ) -> None:
        self._flat = flat
        self._warn = warn
        self._speaks = False
        self._stepping = False
        self._told: set[str] = set()
        self._optimizers = optimizers
        #: How many parameters optimizers had when all of them were known to be averaged.
        self._num_checked = len(_parameters(*optimizers))
        self._num_losses = 0
        self._claimed: list[int] = []
        self._hooks: list[RemovableHandle] = []
        for optimizer in optimizers:
            self._hooks.append(optimizer.register_step_pre_hook(self._before_step))
            # On the instance, as torch's schedulers wrap ``step``; not part of what is pickled.
            vars(optimizer)["zero_grad"] = partial(self._zero_grad, optimizer)

    def claim(self, models: Sequence[nn.Module]) -> None:
        """Mark models as in this team, for ``refuse_second_team``."""
        self._claimed = [id(model) for model in models]
        _teams.update(dict.fromkeys(self._claimed, self))

    @property
    def are_hooked(self) -> bool:
        """Return whether an optimizer's step has hooks of the user, or was replaced."""
        everywhere = _global_optimizer_pre_hooks or _global_optimizer_post_hooks
        return bool(everywhere) or any(map(_is_hooked, self._optimizers))

    def step(
        self, optimizers: Sequence[Optimizer], within: AbstractContextManager[None] = _PLAIN
    ) -> None:
        """Step optimizers, which the user's loop may not.

        Args:
            optimizers: Those to step.
            within: Shows them what to step, in place of their parameters.

        Raises:
            UsageError: One was given a parameter that is not averaged.
        """
        self._check_parameters()
        self._stepping = True
        try:
            with within:
                for optimizer in optimizers:
                    optimizer.step()
        finally:
            self._stepping = False

    def before_backward(self, loss: Tensor, samples: int, reduction: str | None) -> None:
        """Look at the gradients before they are added to, and at the first losses.

        Args:
            loss: As it was given to ``ddp.backward``.
            samples: Those of the micro-batch.
            reduction: If it was given, only the scale of a ``GradScaler`` is looked for.

        Raises:
            UsageError: The gradients were written by something else than ``ddp.backward``, or the
                loss would give wrong ones.
        """
        self.check_gradients()
        self._num_losses += 1
        if self._num_losses <= LOOKED_AT:
            self._check_loss(loss, samples, reduction)

    def check_gradients(self) -> None:
        """Restore gradients that ``zero_grad()`` has dropped inside a window.

        Raises:
            UsageError: Some were written by something else than ``ddp.backward``.
        """
        name = self._flat.check_grads()
        if name is None:
            return
        raise UsageError(
            f"the gradient of {name!r} was written outside of ddp.backward, "
            "inside a window: by loss.backward(), clip_grad_norm_, clip_grad_value_, "
            "GradScaler.unscale_ or the like. It is an unfinished sum there, and another one on "
            "every rank. Remedy: call ddp.backward(loss) for every loss; clip with "
            "DdpConfig(max_grad_norm=...), or do it in optimizer.register_step_pre_hook(fn), which "
            "runs on averaged gradients; for fp16 use precision= instead of a GradScaler"
        )

    def close(self) -> None:
        """Restore the optimizers, and free the models; idempotent."""
        while self._hooks:
            self._hooks.pop().remove()
        for optimizer in self._optimizers:
            vars(optimizer).pop("zero_grad", None)
        while self._claimed:
            _teams.pop(self._claimed.pop(), None)

    def speak(self, *, for_all: bool) -> None:
        """Set whether ``notice`` warns on this rank; it does on one rank of the team."""
        self._speaks = for_all

    def notice(self, text: str) -> None:
        """Warn the user about the team: the main process does it for all."""
        if self._speaks:
            self._warn(text)

    def warn_once(self, text: str) -> None:
        """Warn the user about the team, once for each text."""
        if text not in self._told:
            self._told.add(text)
            self.notice(text)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._stepping:
            raise UsageError(
                f"{type(optimizer).__name__}.step() was called in the loop, where gradients are "
                "not averaged yet; remove it: ddp.step() steps the optimizers when a window has "
                "been averaged. With a GradScaler: remove that too, and use precision="
            )

    def _check_loss(self, loss: Tensor, samples: int, reduction: str | None) -> None:
        if (scale := find_grad_scale(loss)) is not None:
            raise UsageError(
                f"the loss given to ddp.backward is {scale:g} times too large: a GradScaler has "
                "scaled it, and ddp.step() would not undo that. Remove the GradScaler and call "
                "ddp.backward(loss); with precision='fp16' evener scales losses by itself"
            )
        if reduction is not None:
            return
        if samples > 1 and has_sum(loss, samples):
            raise UsageError(
                f"the loss given to ddp.backward is a sum over the {samples} samples of its "
                "micro-batch, or has one in it, which would count as their mean: the gradient "
                "depends on how the batch is split over ranks and micro-batches. Remedy: "
                "ddp.backward(loss, reduction='sum') has the gradient of the sum over the whole "
                "batch, as one process has it (Ddp.builder: reduction='sum'). If it is a mean "
                "after all, give reduction='mean'"
            )

    def _check_parameters(self) -> None:
        parameters = _parameters(*self._optimizers)
        if len(parameters) == self._num_checked:
            return
        averaged = set(map(id, self._flat.parameters))
        for parameter in parameters:
            if parameter.requires_grad and id(parameter) not in averaged:
                raise UsageError(
                    "an optimizer was given a trainable parameter of shape "
                    f"{tuple(parameter.shape)} that the model did not have when the team was set "
                    "up, so its gradient is not averaged; add layers before Ddp.setup"
                )
        self._num_checked = len(parameters)

    def _zero_grad(self, optimizer: Optimizer, set_to_none: bool = True) -> None:
        if not self._flat.with_gradients():
            type(optimizer).zero_grad(optimizer, set_to_none)


def _parameters(*optimizers: Optimizer) -> list[Tensor]:
    return [
        p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]
    ]
