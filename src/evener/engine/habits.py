"""Habits of plain training loops: ignore or refuse them inside a window.

A window's gradients are unfinished sums until every rank has added its part. A plain loop may act
on them in between. evener ignores such an act if its absence does what the user means. It refuses
the act with the remedy if it would work on numbers that the user does not expect. It also refuses a
model in two teams, and an optimizer with parameters that its team does not average.
"""

import gc
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Final

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils.hooks import RemovableHandle

from evener.comm.flat import FlatBuffers
from evener.engine.loss_graph import LossWatch
from evener.engine.share import Share
from evener.errors import ConfigError, UsageError
from evener.planning.report import Report

_ZERO_GRAD = (
    "zero_grad() inside a window is ignored: ddp.step() drops gradients when a window has been "
    "applied; you can remove the call"
)

#: Leaves optimizers their own parameters.
_PLAIN: Final = nullcontext()

#: The watch over each model that is in a team.
_owners: weakref.WeakKeyDictionary[nn.Module, "weakref.ref[Habits]"] = weakref.WeakKeyDictionary()


def refuse_second_team(models: Sequence[nn.Module]) -> None:
    """Refuse models that are in a team already.

    Raises:
        ConfigError: Names the model.
    """
    for model in models:
        if _is_taken(model):
            gc.collect()  # a team is gone if neither it nor its optimizers are referenced any more
        if _is_taken(model):
            raise ConfigError(
                f"this {type(model).__name__} is in a team already: Ddp.setup was called with it "
                "before, and its gradients would be averaged twice; close that team first "
                "(ddp.close(), or with Ddp.setup(...) as ddp), continue with it, or make the model "
                "and its optimizers again"
            )


def _is_taken(model: nn.Module) -> bool:
    habits = owner() if (owner := _owners.get(model)) else None
    return habits is not None and habits.is_active


def _has_own_step(optimizer: Optimizer) -> bool:
    """Return whether ``step`` was replaced on the instance, otherwise than by a scheduler."""
    step = vars(optimizer).get("step")
    if step is None:
        return False
    # ``functools.wraps`` copies the scheduler's mark to what the user wraps around it.
    inner = getattr(step, "__wrapped__", None)
    return not (getattr(step, "_wrapped_by_lr_sched", False) and inner is type(optimizer).step)


class Habits:
    """Watches one rank's optimizers and gradients.

    Args:
        flat: Knows the gradients.
        optimizers: Those of ``Ddp.setup``.
        warn: Tells the user something.
        speaks: Whether this rank warns for the team.
    """

    def __init__(
        self,
        flat: FlatBuffers,
        optimizers: Sequence[Optimizer],
        *,
        warn: Callable[[str], None],
        speaks: bool,
    ) -> None:
        self._flat = flat
        self._warn = warn
        self._speaks = speaks
        self._stepping = False
        self._told: set[str] = set()
        self._share: Share | None = None
        self._stamps: Sequence[int] = []
        self._losses = LossWatch(self.tell_once)
        self._optimizers = optimizers
        #: How many parameters each optimizer had when all of them were known to be averaged.
        self._checked = [len(_parameters(optimizer)) for optimizer in optimizers]
        self._hooks: list[RemovableHandle] = []
        for optimizer in optimizers:
            self._hooks.append(optimizer.register_step_pre_hook(self._before_step))
            # On the instance, as torch's schedulers wrap ``step``; not part of what is pickled.
            vars(optimizer)["zero_grad"] = partial(self._zero_grad, optimizer)

    @property
    def is_active(self) -> bool:
        """Return whether the team is still open."""
        return bool(self._hooks)

    def claim(self, models: Sequence[nn.Module]) -> None:
        """Mark models as in this team, for ``refuse_second_team``."""
        for model in models:
            _owners[model] = weakref.ref(self)

    @property
    def are_hooked(self) -> bool:
        """Return whether an optimizer's step has hooks of the user, or was replaced."""
        if _global_optimizer_pre_hooks or _global_optimizer_post_hooks:
            return True
        return any(
            len(one._optimizer_step_pre_hooks) > 1
            or one._optimizer_step_post_hooks
            or _has_own_step(one)
            for one in self._optimizers
        )

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
        for optimizer in optimizers:
            self._check_parameters(optimizer)
        self._stepping = True
        try:
            with within:
                for optimizer in optimizers:
                    optimizer.step()
        finally:
            self._stepping = False

    def before_backward(
        self,
        share: Share,
        loss: Tensor,
        weight: float | None,
        reduction: str | None,
    ) -> None:
        """Look at the gradients and at the loss before they are added to.

        Raises:
            UsageError: The gradients were written by something else than ``ddp.backward``, or the
                loss would give wrong ones; see ``LossWatch``.
        """
        if self.before_step(share):
            self._flat.attach_grads()
            self.tell_once(_ZERO_GRAD)
        self._losses.look(
            loss,
            window=share,
            samples=share.open_samples,
            weight=weight,
            reduction=reduction,
        )

    def after_window(self, reports: Sequence[Report]) -> None:
        """Look at what the ranks have reported of a window."""
        self._losses.follow(reports)

    def after_backward(self, share: Share) -> None:
        """Remember the gradients as they are now."""
        self._flat.attach_grads()
        self._share, self._stamps = share, self._flat.stamps()

    def before_step(self, share: Share) -> bool:
        """Look at the gradients before they are averaged; return whether some were dropped.

        Raises:
            UsageError: They were written by something else than ``ddp.backward``.
        """
        index, dropped = self._flat.find_write(self._stamps if share is self._share else [])
        if index is None:
            return dropped
        raise UsageError(
            f"the gradient of {self._flat.names[index]!r} was written outside of ddp.backward, "
            "inside a window: by loss.backward(), clip_grad_norm_, clip_grad_value_, "
            "GradScaler.unscale_ or the like. It is an unfinished sum there, and another one on "
            "every rank. Remedy: call ddp.backward(loss) for every loss; clip with "
            "DdpConfig(max_grad_norm=...), or do it in optimizer.register_step_pre_hook(fn), which "
            "runs on averaged gradients; for fp16 use precision= instead of a GradScaler"
        )

    def after_update(self, share: Share) -> None:
        """Remember that gradients have been dropped, those of one optimizer perhaps."""
        self._share, self._stamps = share, self._flat.stamps()

    def close(self) -> None:
        """Restore the optimizers; idempotent."""
        while self._hooks:
            self._hooks.pop().remove()
        for optimizer in self._optimizers:
            vars(optimizer).pop("zero_grad", None)

    def speak(self, *, for_all: bool) -> None:
        """Set whether ``notice`` warns on this rank; it does on one rank of the team."""
        self._speaks = for_all

    def notice(self, text: str) -> None:
        """Warn the user about the team: the main process does it for all."""
        if self._speaks:
            self._warn(text)

    def tell_once(self, text: str) -> None:
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

    def _check_parameters(self, optimizer: Optimizer) -> None:
        number = next(n for n, one in enumerate(self._optimizers) if one is optimizer)
        if sum(len(group["params"]) for group in optimizer.param_groups) == self._checked[number]:
            return
        parameters = _parameters(optimizer)
        averaged = set(map(id, self._flat.parameters))
        for parameter in parameters:
            if parameter.requires_grad and id(parameter) not in averaged:
                raise UsageError(
                    f"optimizer {number} was given a trainable parameter of shape "
                    f"{tuple(parameter.shape)} that the model did not have when the team was set "
                    "up, so its gradient is not averaged; add layers before Ddp.setup"
                )
        self._checked[number] = len(parameters)

    def _zero_grad(self, optimizer: Optimizer, set_to_none: bool = True) -> None:
        if not self._flat.stamps():
            type(optimizer).zero_grad(optimizer, set_to_none)
        elif any(parameter.grad is not None for parameter in _parameters(optimizer)):
            self.tell_once(_ZERO_GRAD)


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
