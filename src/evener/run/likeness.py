"""What must be the same on every rank for replicas to stay alike, compared at the start."""

import numbers
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from evener.errors import ConfigError
from evener.planning.policies import ApplyPolicy
from evener.run.models import Schedulers
from evener.run.settings import DdpConfig

#: Options of ``DdpConfig`` that are a rank's own business.
_OWN_OPTIONS = frozenset({"timeout_s", "emulate_slow", "stop_when", "quiet"})
#: Entries of a parameter group that say how to compute, which may follow the device, not what.
_OWN_ENTRIES = frozenset(
    {"params", "param_names", "foreach", "fused", "capturable", "differentiable"}
)


def describe_training(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    scheduler: Schedulers,
    policy: ApplyPolicy,
    config: DdpConfig,
) -> dict[str, Any]:
    """This rank's model, options, optimizers and schedulers as plain JSON types.

    They are for ``check_training``.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    return {
        "parameters": [[n, list(p.shape), str(p.dtype)] for n, p in model.named_parameters()],
        "buffers": [[n, list(b.shape), str(b.dtype)] for n, b in model.named_buffers()],
        "options": {
            "policy": policy.value,
            **{
                f.name: _plain(getattr(config, f.name))
                for f in fields(config)
                if f.name not in _OWN_OPTIONS
            },
        },
        "optimizers": [_describe_optimizer(optimizer, names) for optimizer in optimizers],
        "schedulers": [_describe_scheduler(one) for one in _each(scheduler)],
    }


def check_versions(versions: Sequence[Mapping[str, str]]) -> None:
    """Refuses ranks that run different versions, given in rank order.

    Raises:
        ConfigError: Names the first difference, the two ranks, and the remedy.
    """
    for rank, other in enumerate(versions):
        for key in ("evener", "torch"):
            mine, theirs = versions[0][key], other[key]
            if mine != theirs:
                raise ConfigError(
                    f"rank 0 runs {key} {mine}, rank {rank} runs {key} {theirs}; install the same "
                    "version on every machine"
                )


def check_training(trainings: Sequence[Mapping[str, Any]]) -> None:
    """Refuses ranks that train differently.

    Args:
        trainings: What ``describe_training`` gave on each rank, in rank order.

    Raises:
        ConfigError: Names the first difference, the two ranks, and the remedy.
    """
    first = trainings[0]
    for rank, other in enumerate(trainings):
        _check_model(rank, first, other)
        _check_options(rank, first["options"], other["options"])
        # Kinds of schedulers first: they leave traces in optimizers, which would be named instead.
        _check_kinds(rank, first["schedulers"], other["schedulers"])
        _check_optimizers(rank, first["optimizers"], other["optimizers"])
        _check_schedulers(rank, first["schedulers"], other["schedulers"])


def _each(scheduler: Schedulers) -> Sequence[object]:
    if scheduler is None:
        return ()
    return scheduler if isinstance(scheduler, Sequence) else (scheduler,)


def _describe_scheduler(scheduler: object) -> dict[str, Any]:
    """Its kind and settings; of a function, its name."""
    if isinstance(scheduler, LRScheduler):
        return {"what": type(scheduler).__name__, "settings": _plain(scheduler.state_dict())}
    return {"what": getattr(scheduler, "__qualname__", type(scheduler).__name__), "settings": {}}


def _describe_optimizer(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    return {
        "class": type(optimizer).__name__,
        "groups": [
            {
                "entries": {k: _plain(v) for k, v in group.items() if k not in _OWN_ENTRIES},
                "parameters": [names.get(id(p), "a foreign one") for p in group["params"]],
            }
            for group in optimizer.param_groups
        ],
    }


def _plain(value: object) -> Any:
    """A value in types that survive JSON, so that equal values stay equal."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_plain(item) for item in value]
    return type(value).__name__


def _check_model(rank: int, first: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    for what in ("parameter", "buffer"):
        mine, theirs = first[f"{what}s"], other[f"{what}s"]
        for a, b in zip(mine, theirs, strict=False):
            if a != b:
                raise ConfigError(
                    f"rank {rank} trains another model: its {what} is {b[0]} {b[1]} {b[2]} "
                    f"where rank 0 has {a[0]} {a[1]} {a[2]}; build the same model on every rank"
                )
        if len(mine) != len(theirs):
            raise ConfigError(
                f"rank {rank} trains another model: {len(theirs)} {what}s where rank 0 has "
                f"{len(mine)}; build the same model on every rank"
            )


def _check_options(rank: int, first: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    for name, mine in first.items():
        if other[name] != mine:
            raise ConfigError(
                f"rank {rank} trains with {name} {other[name]!r}, rank 0 with {mine!r}; give "
                "Ddp.setup and DdpConfig the same options on every rank"
            )


def _check_optimizers(
    rank: int, first: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]]
) -> None:
    remedy = "make the same optimizers on every rank"
    if len(first) != len(other):
        raise ConfigError(
            f"rank {rank} has {len(other)} optimizers where rank 0 has {len(first)}; {remedy}"
        )
    for number, (mine, theirs) in enumerate(zip(first, other, strict=True)):
        where = f"optimizer {number} of rank {rank}"
        if mine["class"] != theirs["class"]:
            raise ConfigError(f"{where} is {theirs['class']}, rank 0 has {mine['class']}; {remedy}")
        if len(mine["groups"]) != len(theirs["groups"]):
            raise ConfigError(
                f"{where} has {len(theirs['groups'])} parameter groups, that of rank 0 has "
                f"{len(mine['groups'])}; {remedy}"
            )
        for g, (a, b) in enumerate(zip(mine["groups"], theirs["groups"], strict=True)):
            _check_group(f"{where}, parameter group {g}:", a, b, remedy)


_SAME_SCHEDULERS = "make the same schedulers on every rank"


def _check_kinds(
    rank: int, first: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]]
) -> None:
    names = [[one["what"] for one in those] for those in (first, other)]
    if names[0] != names[1]:
        by = [", ".join(kinds) or "nothing" for kinds in names]
        raise ConfigError(
            f"rank {rank} schedules learning rates by {by[1]}, rank 0 by {by[0]}; "
            f"{_SAME_SCHEDULERS}"
        )


def _check_schedulers(
    rank: int, first: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]]
) -> None:
    for mine, theirs in zip(first, other, strict=True):
        for key in sorted({*mine["settings"], *theirs["settings"]}):
            a, b = (s["settings"].get(key, "not set") for s in (mine, theirs))
            if a != b:
                raise ConfigError(
                    f"{theirs['what']} of rank {rank}: {key} is {b!r} where rank 0 has {a!r}; "
                    f"{_SAME_SCHEDULERS}"
                )


def _check_group(where: str, mine: Mapping[str, Any], theirs: Mapping[str, Any], do: str) -> None:
    for key in sorted({*mine["entries"], *theirs["entries"]}):
        a, b = mine["entries"].get(key, "not set"), theirs["entries"].get(key, "not set")
        if a != b:
            raise ConfigError(f"{where} {key} is {b!r} where rank 0 has {a!r}; {do}")
    for a, b in zip(mine["parameters"], theirs["parameters"], strict=False):
        if a != b:
            raise ConfigError(f"{where} holds {b!r} where rank 0 has {a!r}; {do}")
    a, b = len(mine["parameters"]), len(theirs["parameters"])
    if a != b:
        raise ConfigError(f"{where} holds {b} parameters, that of rank 0 {a}; {do}")
