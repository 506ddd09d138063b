"""Check at the start what must be the same on every rank for replicas to stay equal."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from numbers import Real
from typing import Any, Final

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from evener.averaging.outer import copy_together, make_checked
from evener.config.settings import DdpConfig
from evener.errors import ConfigError
from evener.loop.arguments import Schedulers, several
from evener.planning.policies import ApplyPolicy
from evener.team.members import own_versions

#: Describes what a rank trains with: JSON values by name, such as ``optimizer.0.groups.0.lr``.
Description = Mapping[str, Any]

#: Options that may differ between ranks, and entries of parameter groups that select a kernel and
#: may depend on the device.
_OWN: Final = frozenset(
    {
        *("timeout_s", "emulate_slow", "stop_when", "quiet"),
        *("param_names", "foreach", "fused", "capturable", "differentiable"),
    }
)
#: Prefixes of names of which there is one for each parameter.
_MANY: Final = ("parameter", "buffer", "scheduler", "optimizer")


def describe_versions() -> Description:
    """Return this rank's versions, for ``check_consistency``."""
    versions = own_versions()
    return {f"version.{what}": versions[what] for what in ("evener", "torch")}


def describe_training(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    scheduler: Schedulers,
    policy: ApplyPolicy,
    config: DdpConfig,
) -> Description:
    """Return what ``check_consistency`` compares, in the order of comparison.

    Raises:
        ConfigError: The function for the outer optimizer does not return one, or not one that
            ASYNC can use.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parts = {
        # Before options: a different model changes the gradient buckets, too.
        "parameter": [_shape(*named) for named in model.named_parameters()],
        "buffer": [_shape(*named) for named in model.named_buffers()],
        "option": {**vars(config), "policy": policy.value},
        # Before optimizers: a different scheduler changes their parameter groups, too.
        "scheduler": [
            {"class": _class(one)} | (one.state_dict() if isinstance(one, LRScheduler) else {})
            for one in several(scheduler)
        ],
        "optimizer": [_describe(one) for one in optimizers],
    }
    if callable(config.outer):
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        outer = make_checked(config.outer, trained)
        if policy is ApplyPolicy.ASYNC:
            copy_together(outer, trained)  # later, it would fail in the midst of training
        parts["optimizer_outer"] = _describe(outer)
    return {**describe_versions(), **dict(_flatten("", parts, names))}


def _describe(optimizer: Optimizer) -> Mapping[str, Any]:
    return {"class": _class(optimizer), "groups": optimizer.param_groups}


def _class(value: object) -> str:
    """Return the name of a function, or that of an object's class."""
    name: str = getattr(value, "__qualname__", type(value).__name__)
    return name


def _shape(name: str, tensor: Tensor) -> str:
    return f"{name} {list(tensor.shape)} {tensor.dtype}"


def _flatten(path: str, value: object, names: Mapping[int, str]) -> Iterator[tuple[str, Any]]:
    """Yield the plain values inside a value with their paths; parameters as their names."""
    if isinstance(value, nn.Parameter):
        value = names.get(id(value), "a foreign one")
    if isinstance(value, Tensor):
        value = value.tolist()
    if isinstance(value, Sequence) and not isinstance(value, str):
        value = dict(enumerate(value))
    if isinstance(value, Mapping):
        for key, part in value.items():
            if key not in _OWN:
                yield from _flatten(f"{path}.{key}".lstrip("."), part, names)
    elif value is None or isinstance(value, str | int | float):
        yield path, value
    else:
        yield path, float(value) if isinstance(value, Real) else type(value).__name__


def summarise(training: Description) -> dict[str, Any]:
    """Return ``describe_training`` with a digest in place of long parts, for an elastic team."""
    few = {name: value for name, value in training.items() if not name.startswith(_MANY)}
    rest = json.dumps([pair for pair in training.items() if pair[0] not in few])
    digest = hashlib.blake2b(rest.encode(), digest_size=16).hexdigest()
    return {**few, "model, optimizers and schedulers": digest}


def check_consistency(ranks: Mapping[int, Description], what: str = "rank") -> None:
    """Refuse ranks that run different versions, or train differently.

    Args:
        ranks: The results of ``describe_training`` or ``describe_versions``, by rank.
        what: What ranks are called in the message.

    Raises:
        ConfigError: Names the first difference, the two ranks, and the remedy.
    """
    first = min(ranks)
    for rank, other in ranks.items():
        for name in {**ranks[first], **other}:
            mine, theirs = ranks[first].get(name), other.get(name)
            if mine != theirs:
                raise ConfigError(
                    f"{what} {rank} and {what} {first} differ in {name}: {theirs!r} instead of "
                    f"{mine!r}; give every {what} the same"
                )
