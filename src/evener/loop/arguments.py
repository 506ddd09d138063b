"""Check the models, optimizers and schedulers of ``Ddp.setup``, and bring them into one form."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from evener.engine.schedule import ProgressSchedule
from evener.errors import ConfigError

#: What ``Ddp.setup`` takes for ``model``.
Models = nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module]
#: What it takes for ``scheduler``.
Schedulers = LRScheduler | Sequence[LRScheduler] | ProgressSchedule | None

_WRAPPED = (
    "would average gradients a second time; give Ddp.setup the plain module, which is in its "
    "attribute 'module'"
)

#: Kinds of models, optimizers and schedulers that a window cannot train with, and why.
_UNFIT: Final = {
    nn.DataParallel: _WRAPPED,
    nn.parallel.DistributedDataParallel: _WRAPPED,
    torch.optim.LBFGS: (
        "evaluates the loss several times in one step, which a window of unequal shares cannot "
        "repeat; use another optimizer, such as AdamW"
    ),
    ReduceLROnPlateau: (
        "follows a metric, not progress; leave it out of Ddp.setup and call "
        "scheduler.step(ddp.weighted_mean(metric, weight)) on every rank, then "
        "ddp.register('scheduler', scheduler)"
    ),
}


@contextmanager
def in_evaluation(model: nn.Module) -> Iterator[None]:
    """Put a model into ``eval()`` mode, without gradients, during the block."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def check_arguments(model: object, optimizer: object, scheduler: object) -> list[Optimizer]:
    """Refuse arguments in another order or of another type than ``Ddp.setup`` takes.

    Call it before ranks are started, so that a mistake is reported at once.

    Returns:
        The optimizers.

    Raises:
        ConfigError: Names the argument and the correct call. Also for a wrapped model, an
            optimizer that a window cannot step, or a scheduler that cannot follow one.
    """
    given: dict[str, tuple[object, Any]] = {
        "model": (model, nn.Module),
        "optimizer": (optimizer, Optimizer),
        "scheduler": (scheduler, LRScheduler | Callable | None),
    }
    for name, (value, kind) in given.items():
        for one in several(value) or [None]:
            if not isinstance(one, kind):
                what = f"the class {one.__name__}" if isinstance(one, type) else type(one).__name__
                raise ConfigError(
                    f"{name} is {what}; each rank makes its own model and optimizer and passes "
                    "them in this order: Ddp.setup(model, torch.optim.AdamW(model.parameters()), "
                    "scheduler). Ddp.builder(model_fn, optim_fn, train_fn) takes functions"
                )
    models, optimizers, schedulers = several(model), several(optimizer), several(scheduler)
    modules = chain.from_iterable(one.modules() for one in models)
    for one in (*modules, *optimizers, *schedulers):
        if why := next((why for kind, why in _UNFIT.items() if isinstance(one, kind)), None):
            raise ConfigError(f"{type(one).__name__} {why}")
        if isinstance(one, LRScheduler) and one.optimizer not in optimizers:
            raise ConfigError(
                f"{type(one).__name__} belongs to an optimizer that was not given to Ddp.setup; "
                "make it with one of those"
            )
    return optimizers


def several(given: object) -> list[Any]:
    """Return the values of a mapping or sequence; otherwise the value itself in a list."""
    if isinstance(given, Mapping):
        return [*given.values()]
    return [*given] if isinstance(given, Sequence) and not isinstance(given, str) else [given]


def combine_models(models: Models) -> tuple[nn.Module, tuple[nn.Module, ...]]:
    """Return one module that holds all, and those whose ``forward`` the user calls."""
    if isinstance(models, nn.Module):
        plain = unwrap_compiled(models)
        return plain, (plain,)
    pairs = models.items() if isinstance(models, Mapping) else enumerate(models)
    together = nn.ModuleDict({str(name): unwrap_compiled(part) for name, part in pairs})
    return together, tuple(together.values())


def unwrap_compiled(model: nn.Module) -> nn.Module:
    """Return the module behind ``torch.compile(model)``, whose names lack ``_orig_mod.``."""
    inner: nn.Module = getattr(model, "_orig_mod", model)
    return inner


def parts_of(optimizers: Sequence[Optimizer], model: nn.Module) -> dict[int, int]:
    """Return, by ``id`` of a parameter, the number of the optimizer that holds it.

    An optimizer must not update parameters that are not averaged: replicas would diverge.

    Raises:
        ConfigError: Two optimizers hold the same parameter, or one holds a trainable parameter of
            another model.
    """
    owner: dict[int, int] = {}
    averaged = set(map(id, model.parameters()))
    for number, optimizer in enumerate(optimizers):
        for parameter in chain.from_iterable(group["params"] for group in optimizer.param_groups):
            shape, first = tuple(parameter.shape), owner.setdefault(id(parameter), number)
            if first != number:
                raise ConfigError(
                    f"optimizer {number} holds a parameter of shape {shape} that optimizer {first} "
                    "holds, too; give each parameter to one of them"
                )
            if parameter.requires_grad and id(parameter) not in averaged:
                raise ConfigError(
                    f"optimizer {number} holds a trainable parameter of shape {shape} that is not "
                    "the model's, so its gradient would not be averaged; make it a parameter of "
                    "the model, or give Ddp.setup every model: [generator, discriminator]"
                )
    return owner
