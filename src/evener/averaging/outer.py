"""The outer optimizer of CADENCE and ASYNC: it steps the consensus on the average difference.

The difference of a rank is the consensus less what the rank has made of it, so it has the direction
of a gradient. Plain averaging is a step with a learning rate of 1 and without momentum.
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal, NamedTuple, final

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from evener.errors import ConfigError

OuterFactory = Callable[[Sequence[Tensor]], Optimizer]
"""Makes an optimizer of the parameters that it steps, as the classes of torch.optim do."""

OUTER_MOMENTUM: Final = 0.5


class Averaged(NamedTuple):
    """What an average is of; all ranks know it alike.

    Attributes:
        num_ranks: Ranks that made steps.
        steps: Local steps of the slowest rank that were planned: the anchor.
    """

    num_ranks: int
    steps: int


def outer_lr(averaged: Averaged) -> float:
    """Return the learning rate of ``"auto"``: 0.7, or 1 for many ranks or steps.

    Steps of more ranks cancel each other out to a larger part, so that their average is shorter,
    and few windows leave momentum little time. With momentum 0.5, 0.7 was the best rate for 2 and 4
    ranks with 16 steps, and 1 for 8 ranks and for 256 steps (docs/experiments.md). The limits lie
    between.
    """
    return 1.0 if averaged.num_ranks > 5 or averaged.steps > 128 else 0.7


class OuterSGD(Optimizer):
    """SGD with Nesterov momentum whose operations are each rounded exactly once.

    ``torch.optim.SGD`` fuses a multiplication with an addition, which devices of different kinds
    round differently. Here all ranks get the same bits.

    Args:
        params: What to step.
        lr: Learning rate; ``"auto"`` is that of ``outer_lr``.
        momentum: Nesterov momentum; 0 keeps no state.

    Attributes:
        averaged: What the next step's average is of.
    """

    averaged = Averaged(num_ranks=1, steps=1)

    def __init__(
        self,
        params: Iterable[Tensor],
        *,
        lr: float | Literal["auto"] = "auto",
        momentum: float = OUTER_MOMENTUM,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # returns no loss
        """Make a step; a closure is not called."""
        for group in self.param_groups:
            lr = outer_lr(self.averaged) if group["lr"] == "auto" else group["lr"]
            for parameter in group["params"]:
                update = parameter.grad
                if update is None:
                    continue
                if group["momentum"]:
                    state = self.state[parameter]
                    if "momentum_buffer" not in state:
                        state["momentum_buffer"] = torch.zeros_like(parameter)
                    buffer = state["momentum_buffer"].mul_(group["momentum"]).add_(update)
                    update = (buffer * group["momentum"]).add_(update)
                parameter.sub_(update * lr)


def make_outer(
    outer: Literal["average", "nesterov"] | OuterFactory,
    lr: float | Literal["auto"],
    momentum: float | None,
) -> OuterFactory | None:
    """Return what makes the outer optimizer of a configuration; ``None`` if it only averages.

    Args:
        outer: Its name, or what makes the user's own.
        lr: Learning rate of ``"nesterov"``.
        momentum: Its momentum; ``None`` for the default.
    """
    if outer == "average":
        return None
    if outer == "nesterov":
        return partial(OuterSGD, lr=lr, momentum=OUTER_MOMENTUM if momentum is None else momentum)
    return outer


def make_checked(make: OuterFactory, parameters: Sequence[Tensor]) -> Optimizer:
    """Return the optimizer that ``make`` makes of the parameters.

    Raises:
        ConfigError: It is not one of exactly these parameters.
    """
    optimizer = make(parameters)
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"outer returned {optimizer!r}, which is not a torch.optim.Optimizer; give a function "
            "that returns an optimizer of the parameters that it gets"
        )
    stepped = [id(one) for group in optimizer.param_groups for one in group["params"]]
    if sorted(stepped) != sorted(map(id, parameters)):
        raise ConfigError(
            f"outer returned a {type(optimizer).__name__} of {len(stepped)} parameters, which are "
            f"not the {len(parameters)} that it was given; give all of these to the optimizer, and "
            "no others: they stand for the model's, in the shapes of those"
        )
    return optimizer


def copy_together(
    optimizer: Optimizer, parameters: Sequence[Parameter]
) -> tuple[Optimizer, list[Parameter]]:
    """Return copies of an optimizer, of all that it keeps, and of the parameters that it steps.

    Raises:
        ConfigError: Something that the user's class keeps cannot be copied.
    """
    # Together: groups of the optimizer may hold the parameters in another order.
    memo: dict[int, Any] = {}
    mine, copies = copy.deepcopy((optimizer, list(parameters)), memo)
    # torch copies state and groups alone, neither other attributes nor hooks.
    for name in vars(optimizer).keys() - optimizer.__getstate__().keys():
        value = vars(optimizer)[name]
        try:
            vars(mine)[name] = copy.deepcopy(value, memo)
        except Exception as error:
            kind = type(optimizer).__name__
            raise ConfigError(
                f"outer returned a {kind} whose attribute {name!r} cannot be copied ({error}): "
                "policy 'async' steps a copy of the optimizer to foresee the average; remove the "
                "attribute, or use policy 'cadence'"
            ) from error
    return mine, copies


@final
class OuterStep:
    """Steps named parameters with an outer optimizer.

    All ranks step alike: from the same parameters, on the same differences.

    Args:
        make: Makes the optimizer.
    """

    def __init__(self, make: OuterFactory) -> None:
        self._make = make
        self._names: list[str] = []
        self._parameters: list[Parameter] = []
        self._optimizer: Optimizer | None = None
        #: State of parameters that are not there yet, like that of ``state_dict``.
        self._waiting: dict[str, dict[str, Any]] = {}

    def add(self, names: Sequence[str], tensors: Sequence[Tensor]) -> None:
        """Step these tensors, too, in place.

        Raises:
            ConfigError: What was made is not an optimizer of them.
        """
        parameters = [Parameter(tensor) for tensor in tensors]
        self._names += names
        self._parameters += parameters
        if self._optimizer is None:
            self._optimizer = make_checked(self._make, parameters)
        else:
            self._optimizer.add_param_group({"params": parameters})
        if self._waiting:
            self._take_waiting()

    @torch.no_grad()
    def step(self, differences: Sequence[Tensor | None], averaged: Averaged) -> None:
        """Step the first parameters, one for each difference.

        Args:
            differences: Average differences, like the parameters; ``None`` leaves one as it is.
            averaged: What they are the average of.
        """
        assert self._optimizer is not None, "no parameters were added"
        _prepare(self._optimizer, self._parameters, differences, averaged)
        self._optimizer.step()
        for parameter in self._parameters:
            parameter.grad = None

    def ahead(self, differences: Sequence[Tensor | None], averaged: Averaged) -> list[Tensor]:
        """Return what ``step`` would make of the parameters; nothing is changed.

        A copy of the optimizer makes that step, with its hooks.

        Raises:
            ConfigError: See ``copy_together``.
        """
        assert self._optimizer is not None, "no parameters were added"
        mine, parameters = copy_together(self._optimizer, self._parameters)
        _prepare(mine, parameters, differences, averaged)
        type(mine).step(mine)  # a scheduler's, in the instance, steps the original
        return [parameter.detach() for parameter in parameters]

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return the state of each parameter by its name, below the optimizer's class.

        It depends on no order.
        """
        optimizer = self._optimizer
        if optimizer is None:
            return self._waiting
        state, names = optimizer.state_dict()["state"], self._numbered()
        known = {names[number]: values for number, values in state.items()}
        return {self.kind: self._waiting_here | known}

    @property
    def kind(self) -> str:
        """Return the optimizer's class, below which ``state_dict`` has its state."""
        return type(self._optimizer).__name__

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Continue from the state of ``state_dict``; what it lacks begins without any.

        So does everything, if that was another class of optimizer; see ``describe_loss``.
        """
        self._waiting = {kind: dict(by_name) for kind, by_name in state.items()}
        if self._optimizer is not None:
            self._optimizer.state.clear()
            self._take_waiting()

    @property
    def _waiting_here(self) -> dict[str, Any]:
        return self._waiting.get(self.kind, {})

    def _take_waiting(self) -> None:
        optimizer = self._optimizer
        assert optimizer is not None, "no parameters were added"
        known = optimizer.state_dict()
        for number, name in enumerate(self._numbered()):
            if name in self._waiting_here:
                known["state"][number] = self._waiting_here.pop(name)
        optimizer.load_state_dict(known)

    def _numbered(self) -> list[str]:
        """Return the names of parameters in the order in which the optimizer numbers them."""
        assert self._optimizer is not None, "no parameters were added"
        pairs = zip(self._parameters, self._names, strict=True)
        names = {id(parameter): name for parameter, name in pairs}
        groups = self._optimizer.param_groups
        return [names[id(parameter)] for group in groups for parameter in group["params"]]


def describe_loss(state: Mapping[str, Mapping[str, Any]], step: OuterStep | None) -> str:
    """Return which state of outer optimizers does not continue; empty if all of it does.

    Args:
        state: Of ``OuterStep.state_dict``, in a checkpoint; empty from a run that averaged.
        step: That of this run; ``None`` if it averages.
    """
    here = None if step is None else step.kind
    parts = [
        f"the checkpoint's state of the outer optimizer {_name(kind)} is dropped, as this run "
        f"has outer={_name(here)}"
        for kind, by_name in state.items()
        if kind != here and by_name
    ]
    if here is not None and here not in state:
        parts.append(
            f"the outer optimizer {_name(here)} begins without state, such as momentum, as the "
            "checkpoint holds none of it"
        )
    return "; ".join(parts)


def _name(kind: str | None) -> str:
    """Return how the option ``outer`` names an optimizer's class; ``None`` for averaging."""
    return {None: "'average'", OuterSGD.__name__: "'nesterov'"}.get(kind, str(kind))


def _prepare(
    optimizer: Optimizer,
    parameters: Sequence[Parameter],
    differences: Sequence[Tensor | None],
    averaged: Averaged,
) -> None:
    """Give an optimizer the differences that it steps on, and what they are the average of."""
    for parameter, difference in zip(parameters, differences, strict=False):
        parameter.grad = difference
    if isinstance(optimizer, OuterSGD):
        optimizer.averaged = averaged
