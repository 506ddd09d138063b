"""The outer optimizer of CADENCE and ASYNC: it steps the consensus on the average difference.

The difference of a rank is the consensus less what the rank has made of it, so it has the direction
of a gradient. Plain averaging is a step with a learning rate of 1 and no momentum.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

OuterFactory = Callable[[Sequence[Tensor]], Optimizer]
"""Makes an outer optimizer of the parameters that it steps, as the classes of torch.optim do."""

OUTER_MOMENTUM: Final = 0.9
"""Momentum of ``"nesterov"``, unless another is given."""


class OuterSGD(Optimizer):
    """SGD with Nesterov momentum whose operations are each rounded exactly once.

    ``torch.optim.SGD`` fuses a multiplication with an addition, which devices of different kinds
    round differently. Here all ranks get the same bits.

    Args:
        params: What to step.
        lr: Learning rate; with 1 and without momentum, the gradient is subtracted as it is.
        momentum: Momentum; 0 keeps no state.
    """

    def __init__(
        self, params: Iterable[Tensor], *, lr: float = 1.0, momentum: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # returns no loss
        """Make a step; a closure is not called."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, group["lr"], group["momentum"])

    def _step(self, parameter: Tensor, lr: float, momentum: float) -> None:
        update = parameter.grad
        assert update is not None
        if momentum:
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            buffer = state["momentum_buffer"].mul_(momentum).add_(update)
            update = (buffer * momentum).add_(update)
        parameter.sub_(update if lr == 1.0 else update * lr)


def make_outer(
    outer: Literal["average", "nesterov"] | OuterFactory, lr: float, momentum: float | None
) -> OuterFactory:
    """Return what makes the outer optimizer of a configuration.

    Args:
        outer: Its name, or a factory of the user's.
        lr: Learning rate of ``"nesterov"``.
        momentum: Momentum of ``"nesterov"``; ``None`` for the default.
    """
    if outer == "average":
        return OuterSGD
    if outer == "nesterov":
        momentum = OUTER_MOMENTUM if momentum is None else momentum
        return lambda params: OuterSGD(params, lr=lr, momentum=momentum)
    return outer
