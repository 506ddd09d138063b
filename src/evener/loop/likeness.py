"""Compare at the start what must be the same on every rank for replicas to stay equal."""

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
from evener.loop.models import Schedulers
from evener.planning.policies import ApplyPolicy
from evener.team.members import own_versions

#: Options of ``DdpConfig`` that are a rank's own business.
_OWN_OPTIONS = frozenset({"timeout_s", "emulate_slow", "stop_when", "quiet"})
#: Entries of a parameter group that say how to compute, which may follow the device, not what.
_OWN_ENTRIES = frozenset(
    {"params", "param_names", "foreach", "fused", "capturable", "differentiable"}
)

_MODEL: Final = (
    "rank {{rank}} trains another model: {} where rank 0 has {{mine}}; build the same model on "
    "every rank"
)
_OPTIMIZERS: Final = "; make the same optimizers on every rank"
_SCHEDULERS: Final = "; make the same schedulers on every rank"
_GROUP: Final = "optimizer {0} of rank {rank}, parameter group {1}: "

#: The text of a difference, by the kind of fact. Numbers mean the fact's place.
_SAYINGS: Final = {
    "version": "rank 0 runs {0} {mine}, rank {rank} runs {0} {theirs}; install the same version on "
    "every machine",
    "tensor": _MODEL.format("its {0} is {theirs}"),
    "number of tensors": _MODEL.format("{theirs} {0}s"),
    "option": "rank {rank} trains with {0} {theirs!r}, rank 0 with {mine!r}; give Ddp.setup and "
    "DdpConfig the same options on every rank",
    "schedulers": "rank {rank} schedules learning rates by {theirs}, rank 0 by {mine}"
    + _SCHEDULERS,
    "optimizers": "rank {rank} has {theirs} optimizers where rank 0 has {mine}" + _OPTIMIZERS,
    "class": "optimizer {0} of rank {rank} is {theirs}, rank 0 has {mine}" + _OPTIMIZERS,
    "groups": "optimizer {0} of rank {rank} has {theirs} parameter groups, that of rank 0 has "
    "{mine}" + _OPTIMIZERS,
    "entry": _GROUP + "{2} is {theirs!r} where rank 0 has {mine!r}" + _OPTIMIZERS,
    "held": _GROUP + "holds {theirs!r} where rank 0 has {mine!r}" + _OPTIMIZERS,
    "number held": _GROUP + "holds {theirs} parameters, that of rank 0 {mine}" + _OPTIMIZERS,
    "setting": "{0} of rank {rank}: {1} is {theirs!r} where rank 0 has {mine!r}" + _SCHEDULERS,
}
#: Where a rank has more of these than another, the fact that follows, their number, says so.
_COUNTED: Final = ("tensor", "held")


def describe_versions() -> list[list[Any]]:
    """Return what this rank runs, for ``check_alike``."""
    versions = own_versions()
    return [["version", versions[what], what] for what in ("evener", "torch")]


def describe_training(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    scheduler: Schedulers,
    policy: ApplyPolicy,
    config: DdpConfig,
) -> list[list[Any]]:
    """Return what ``check_alike`` compares: model, options, optimizers, schedulers, versions.

    Returns:
        Facts in plain JSON types, in the order in which they are compared: kind, value, place.
    """
    facts: list[tuple[Any, ...]] = []
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for what, tensors in (
        ("parameter", model.named_parameters()),
        ("buffer", model.named_buffers()),
    ):
        shown = [f"{name} {list(tensor.shape)} {tensor.dtype}" for name, tensor in tensors]
        facts += [("tensor", text, what, position) for position, text in enumerate(shown)]
        facts.append(("number of tensors", str(len(shown)), what))
    facts.append(("option", policy.value, "policy"))
    facts += [
        ("option", getattr(config, option.name), option.name)
        for option in fields(config)
        if option.name not in _OWN_OPTIONS
    ]
    # Kinds of schedulers first: they leave traces in optimizers, which would be named instead.
    several = scheduler if isinstance(scheduler, Sequence) else [scheduler]
    schedulers = [(_name(one), one) for one in several if one is not None]
    facts.append(("schedulers", ", ".join(name for name, _ in schedulers) or "nothing"))
    facts.append(("optimizers", str(len(optimizers))))
    for number, optimizer in enumerate(optimizers):
        facts.append(("class", type(optimizer).__name__, number))
        facts.append(("groups", str(len(optimizer.param_groups)), number))
        for place, group in enumerate(optimizer.param_groups):
            entries = sorted(group.keys() - _OWN_ENTRIES)
            facts += [("entry", group[key], number, place, key) for key in entries]
            held = [names.get(id(parameter), "a foreign one") for parameter in group["params"]]
            facts += [("held", name, number, place, i) for i, name in enumerate(held)]
            facts.append(("number held", str(len(held)), number, place))
    for number, (name, one) in enumerate(schedulers):
        settings = one.state_dict() if isinstance(one, LRScheduler) else {}
        facts += [("setting", settings[key], name, key, number) for key in sorted(settings)]
    plain = [[kind, _plain(value), *map(str, place)] for kind, value, *place in facts]
    return [*describe_versions(), *plain]


def fingerprint(facts: Sequence[Sequence[Any]]) -> str:
    """Return a text that is the same for the same ``describe_training``, and for no other."""
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()


def summarise(facts: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """Return ``describe_training`` by name, as the coordinator of an elastic team compares it.

    Versions and options are told as they are; of the model, and of optimizers and schedulers, there
    is a fingerprint.
    """
    told: dict[str, Any] = {}
    others: dict[str, list[Any]] = {"model": [], "optimizers": []}
    for kind, value, *place in facts:
        if kind in ("version", "option"):
            told[place[0] if kind == "version" else f"option {place[0]}"] = value
        else:
            is_model = kind in ("tensor", "number of tensors")
            others["model" if is_model else "optimizers"].append([kind, value, *place])
    return told | {name: fingerprint(parts) for name, parts in others.items()}


def check_alike(ranks: Sequence[Sequence[Sequence[Any]]]) -> None:
    """Refuse ranks that run different versions, or train differently.

    Args:
        ranks: What ``describe_training``, or ``describe_versions``, gave on each rank, in rank
            order.

    Raises:
        ConfigError: Names the first difference, the two ranks, and the remedy.
    """
    first, *others = ({(kind, *place): value for kind, value, *place in facts} for facts in ranks)
    for rank, other in enumerate(others, 1):
        for kind, *place in {**first, **other}:
            mine, theirs = (facts.get((kind, *place), "not set") for facts in (first, other))
            if mine != theirs and not (kind in _COUNTED and "not set" in (mine, theirs)):
                saying = _SAYINGS[kind]
                raise ConfigError(saying.format(*place, rank=rank, mine=mine, theirs=theirs))


def _name(scheduler: object) -> str:
    """Return a scheduler's kind; of a function, its name."""
    return getattr(scheduler, "__qualname__", type(scheduler).__name__)


def _plain(value: object) -> Any:
    """Return a value in types that survive JSON, so that equal values stay equal."""
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
