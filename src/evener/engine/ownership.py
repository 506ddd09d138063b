"""A model belongs to one team, and its optimizers to the parameters that the team averages."""

import gc
import weakref
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from evener.comm.flat import FlatBuffers
from evener.errors import ConfigError, UsageError

#: The guard of each model's team.
_guards: weakref.WeakKeyDictionary[nn.Module, "weakref.ref[OptimizerGuard]"] = (
    weakref.WeakKeyDictionary()
)


def refuse_second_team(models: Sequence[nn.Module]) -> None:
    """Refuses models that are in a team already.

    Raises:
        ConfigError: Names the model.
    """
    if not any(_is_taken(model) for model in models):
        return
    gc.collect()  # a team that nobody holds any more, nor its optimizers, is gone
    for model in models:
        if _is_taken(model):
            raise ConfigError(
                f"this {type(model).__name__} is in a team already: Ddp.setup was called with it "
                "before, and its gradients would be averaged twice; close that team first "
                "(ddp.close(), or with Ddp.setup(...) as ddp), go on with it, or make the model "
                "and its optimizers anew"
            )


def _is_taken(model: nn.Module) -> bool:
    guard = known() if (known := _guards.get(model)) else None
    return guard is not None and guard.is_active


class OptimizerGuard:
    """Marks models as in a team, and refuses the step of optimizers with foreign parameters."""

    def __init__(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], flat: FlatBuffers
    ) -> None:
        self._flat = flat
        self._optimizers = list(optimizers)
        self._checked = [_count(o) for o in optimizers]
        for model in models:
            _guards[model] = weakref.ref(self)
        self._handles = [o.register_step_pre_hook(self._before_step) for o in optimizers]

    @property
    def is_active(self) -> bool:
        """Whether the team is still there."""
        return bool(self._handles)

    def remove(self) -> None:
        """Takes the hooks off the optimizers; idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        number = next(n for n, o in enumerate(self._optimizers) if o is optimizer)
        count = _count(optimizer)
        if count == self._checked[number]:
            return
        averaged = {id(p) for p in self._flat.parameters}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and id(parameter) not in averaged:
                    raise UsageError(
                        f"optimizer {number} was given a trainable parameter of shape "
                        f"{tuple(parameter.shape)} that the model did not have when the team was "
                        "set up, so its gradient is not averaged; add layers before Ddp.setup"
                    )
        self._checked[number] = count


def _count(optimizer: Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)
