"""Holds optimizers to the parameters that the team averages: others would drift apart."""

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from evener.comm.flat import FlatBuffers
from evener.errors import UsageError


class OptimizerGuard:
    """Refuses the step of an optimizer that was given foreign parameters after the set-up."""

    def __init__(self, optimizers: Sequence[Optimizer], flat: FlatBuffers) -> None:
        self._flat = flat
        self._optimizers = list(optimizers)
        self._checked = [_count(o) for o in optimizers]
        self._handles = [o.register_step_pre_hook(self._before_step) for o in optimizers]

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
