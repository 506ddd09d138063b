"""Check at the start what must be the same on every rank for replicas to stay equal."""

import hashlib
import json
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, Final

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from evener.config.settings import DdpConfig
from evener.errors import ConfigError
from evener.loop.arguments import Schedulers
from evener.planning.policies import ApplyPolicy
from evener.team.members import own_versions

#: What a rank trains with: by part, the values that are compared, by name, in plain JSON types.
Description = Mapping[str, Mapping[str, Any]]

#: Options of ``DdpConfig`` that are a rank's own business.
_OWN_OPTIONS: Final = frozenset({"timeout_s", "emulate_slow", "stop_when", "quiet"})
#: Entries of a parameter group that say how to compute, which may follow the device, not what.
_OWN_ENTRIES: Final = frozenset(
    {"params", "param_names", "foreach", "fused", "capturable", "differentiable"}
)

#: What to do about a difference, by part.
_REMEDIES: Final = {
    "versions": "install the same version on every machine",
    "model": "build the same model on every rank",
    "options": "give Ddp.setup and DdpConfig the same options on every rank",
    "schedulers": "make the same schedulers on every rank",
    "optimizers": "make the same optimizers on every rank",
}


def describe_versions() -> Description:
    """Return what this rank runs, for ``check_consistency``."""
    versions = own_versions()
    return {"versions": {what: versions[what] for what in ("evener", "torch")}}


def describe_training(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    scheduler: Schedulers,
    policy: ApplyPolicy,
    config: DdpConfig,
) -> Description:
    """Return what ``check_consistency`` compares, in the order in which it is compared."""
    options = {option.name: getattr(config, option.name) for option in fields(config)}
    compared = {"policy": policy.value} | {
        name: value for name, value in options.items() if name not in _OWN_OPTIONS
    }
    described = {
        "model": _describe_model(model),
        "options": compared,
        # Before optimizers: schedulers leave traces in those, which would be named instead.
        "schedulers": _describe_schedulers(scheduler),
        "optimizers": _describe_optimizers(model, optimizers),
    }
    return {**describe_versions(), **{part: _plain(values) for part, values in described.items()}}


def _describe_model(model: nn.Module) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for what, named in (
        ("parameter", model.named_parameters()),
        ("buffer", model.named_buffers()),
    ):
        shown = [f"{name} {list(tensor.shape)} {tensor.dtype}" for name, tensor in named]
        values[f"the number of {what}s"] = len(shown)
        values |= {f"{what} {number}": text for number, text in enumerate(shown)}
    return values


def _describe_schedulers(scheduler: Schedulers) -> dict[str, Any]:
    several = scheduler if isinstance(scheduler, Sequence) else [scheduler]
    schedulers = [one for one in several if one is not None]
    # Of a function, its name.
    names = [getattr(one, "__qualname__", type(one).__name__) for one in schedulers]
    values: dict[str, Any] = {"the schedulers": names}
    for number, (name, one) in enumerate(zip(names, schedulers, strict=True)):
        settings = one.state_dict() if isinstance(one, LRScheduler) else {}
        values |= {f"{key} of {name} {number}": settings[key] for key in sorted(settings)}
    return values


def _describe_optimizers(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    values: dict[str, Any] = {"the optimizers": [type(one).__name__ for one in optimizers]}
    for number, optimizer in enumerate(optimizers):
        groups = optimizer.param_groups
        values[f"the number of parameter groups of optimizer {number}"] = len(groups)
        for place, group in enumerate(groups):
            where = f"parameter group {place} of optimizer {number}"
            entries = sorted(group.keys() - _OWN_ENTRIES)
            values |= {f"{key} of {where}": group[key] for key in entries}
            held = [names.get(id(parameter), "a foreign one") for parameter in group["params"]]
            values[f"the number of parameters of {where}"] = len(held)
            values |= {f"parameter {i} of {where}": name for i, name in enumerate(held)}
    return values


def summarise(description: Description) -> dict[str, Any]:
    """Return ``describe_training`` by name, as the coordinator of an elastic team compares it.

    Versions and options are given as they are; the rest as digests.
    """
    options = {f"option {name}": value for name, value in description["options"].items()}
    trained = {
        "model": description["model"],
        "optimizers": [description["optimizers"], description["schedulers"]],
    }
    digests = {name: _digest(values) for name, values in trained.items()}
    return {**description["versions"], **options, **digests}


def _digest(values: Any) -> str:
    data = json.dumps(values, sort_keys=True).encode()
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def check_consistency(ranks: Sequence[Description]) -> None:
    """Refuse ranks that run different versions, or train differently.

    Args:
        ranks: What ``describe_training``, or ``describe_versions``, gave on each rank, in rank
            order.

    Raises:
        ConfigError: Names the first difference, the two ranks, and the remedy.
    """
    for rank, other in enumerate(ranks):
        for part, values in ranks[0].items():
            for name in {**values, **other[part]}:
                mine, theirs = values.get(name), other[part].get(name)
                if mine != theirs:
                    raise ConfigError(
                        f"rank {rank} and rank 0 differ in {name}: {theirs!r} instead of "
                        f"{mine!r}; {_REMEDIES[part]}"
                    )


def _plain(value: object) -> Any:
    """Return a value in types that survive JSON, so that equal values stay equal."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, numbers.Real):
        number = float(value)
        return int(number) if number.is_integer() else number
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_plain(item) for item in value]
    return type(value).__name__
