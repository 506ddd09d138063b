"""The models, optimizers and schedulers of ``Ddp.setup``: checked, and brought into one form."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

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

_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)


@contextmanager
def in_evaluation(model: nn.Module) -> Iterator[None]:
    """Put a model into ``eval()``, without gradients, for the length of the block."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


_CALL = "Ddp.setup(model, torch.optim.AdamW(model.parameters()), scheduler)"


def check_arguments(model: object, optimizer: object, scheduler: Any) -> list[Optimizer]:
    """Refuse arguments in another order or of another kind than ``Ddp.setup`` takes.

    Call it before ranks are started, so that a mistake costs nothing.

    Returns:
        The optimizers.

    Raises:
        ConfigError: Names the argument and the call that is right. Also for an optimizer that a
            window cannot step, or a scheduler that cannot follow one.
    """
    if not isinstance(model, nn.Module | Sequence | Mapping) or isinstance(model, str):
        raise _misplaced("model", model)
    is_list = isinstance(optimizer, Sequence) and not isinstance(optimizer, str)
    optimizers: Any = optimizer if is_list else [optimizer]
    if not optimizers:
        raise ConfigError("no optimizer was given; pass at least one torch.optim optimizer")
    for one in optimizers:
        if not isinstance(one, Optimizer):
            raise _misplaced("optimizer", one)
        if isinstance(one, torch.optim.LBFGS):
            raise ConfigError(
                "LBFGS evaluates the loss several times in one step, which a window of unequal "
                "shares cannot repeat; use an optimizer that steps on gradients, such as AdamW"
            )
    if isinstance(scheduler, Optimizer | nn.Module | type):
        raise _misplaced("scheduler", scheduler)
    _check_schedulers(scheduler, optimizers)
    return list(optimizers)


def _misplaced(name: str, value: object) -> ConfigError:
    """Return the error for an argument of another kind, or in the place of another."""
    what = f"{value!r}"
    if isinstance(value, type):
        what = f"the class {value.__name__}"
    elif callable(value) or isinstance(value, Optimizer):
        what = f"a {type(value).__name__}"
    return ConfigError(
        f"{name} is {what}; each rank makes its own model and optimizer and passes them in this "
        f"order: {_CALL}. Ddp.builder(model_fn, optim_fn, train_fn) takes functions"
    )


def combine_models(models: Models) -> tuple[nn.Module, tuple[nn.Module, ...]]:
    """Return one module that holds all, and those whose ``forward`` the user calls.

    Raises:
        ConfigError: None was given, or one is wrapped for data-parallel training already.
    """
    several = [models] if isinstance(models, nn.Module) else models
    pairs = several.items() if isinstance(several, Mapping) else enumerate(several)
    named = {str(name): unwrap_compiled(part) for name, part in pairs}
    for part in named.values():
        _check_module(part)
    if not named:
        raise ConfigError("no model was given; pass a module, or a list or dict of modules")
    if dotted := [name for name in named if "." in name or not name]:
        raise ConfigError(f"a model is named {dotted[0]!r}; use names without dots")
    parts = tuple(named.values())
    return (parts[0] if isinstance(models, nn.Module) else nn.ModuleDict(named)), parts


def unwrap_compiled(model: nn.Module) -> nn.Module:
    """Return the module behind ``torch.compile(model)``, whose names lack ``_orig_mod.``."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, nn.Module) else model


def _check_module(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model holds {type(model).__name__}, which is not a torch.nn.Module; give a "
            "module, or a list or dict of modules"
        )
    for name, module in model.named_modules():
        if isinstance(module, _WRAPPERS):
            kind = type(module).__name__
            inside = f" (its part {name!r})" if name else ""
            raise ConfigError(
                f"the model{inside} is wrapped in {kind}, which would average gradients a second "
                f"time; give Ddp.setup the plain module, without {kind}"
            )


def _check_schedulers(scheduler: Schedulers, optimizers: Sequence[Optimizer]) -> None:
    if scheduler is None or (callable(scheduler) and not isinstance(scheduler, LRScheduler)):
        return
    for one in [scheduler] if isinstance(scheduler, LRScheduler) else scheduler:
        if isinstance(one, ReduceLROnPlateau):
            raise ConfigError(
                "ReduceLROnPlateau follows a metric, not progress; leave it out of Ddp.setup and "
                "call scheduler.step(ddp.weighted_mean(metric, weight)) on every rank, then "
                "ddp.register('scheduler', scheduler)"
            )
        if not isinstance(one, LRScheduler):
            raise ConfigError(
                f"scheduler is {type(one).__name__}; give a torch scheduler, a list of them, or a "
                "function of Progress"
            )
        if not any(one.optimizer is optimizer for optimizer in optimizers):
            raise ConfigError(
                f"{type(one).__name__} belongs to an optimizer that Ddp.setup was not given; make "
                "it with one of those"
            )


def parts_of(optimizers: Sequence[Optimizer], model: nn.Module) -> dict[int, int]:
    """Return, by ``id`` of a parameter, the number of the optimizer that holds it.

    An optimizer must not step what is not averaged: replicas would drift apart.

    Raises:
        ConfigError: Two optimizers hold the same parameter, or one holds a trainable parameter of
            another model.
    """
    owner: dict[int, int] = {}
    averaged = set(map(id, model.parameters()))
    for number, optimizer in enumerate(optimizers):
        for parameter in chain.from_iterable(group["params"] for group in optimizer.param_groups):
            shape = tuple(parameter.shape)
            if owner.setdefault(id(parameter), number) != number:
                raise ConfigError(
                    f"optimizers {owner[id(parameter)]} and {number} hold the same parameter "
                    f"of shape {shape}; give each parameter to one of them"
                )
            if parameter.requires_grad and id(parameter) not in averaged:
                raise ConfigError(
                    f"optimizer {number} holds a trainable parameter of shape {shape} that is not "
                    "the model's, so its gradient would not be averaged; make it a parameter of "
                    "the model, or give Ddp.setup every model: [generator, discriminator]"
                )
    return owner
