"""What replicas of a model must have in common, and where they are put."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from evener.averaging.replicas import Entry
from evener.devices import count_accelerators
from evener.errors import ConfigError
from evener.team.environment import DistributedTrainConfig
from evener.team.placement import by_number, device_by_number, found_here

#: A layout as it travels: name, shape and dtype in words.
Model = Sequence[Sequence[str]]


def check_models(models: Sequence[nn.Module]) -> None:
    """Refuses what cannot be replicas.

    Raises:
        ConfigError: No model, something else, one model twice, or parameters without values.
    """
    if not models:
        raise ConfigError("models is empty; give one model for each device of this process")
    owner: dict[int, tuple[int, str]] = {}
    for number, model in enumerate(models):
        if not isinstance(model, nn.Module):
            raise ConfigError(f"model {number} is a {type(model).__name__}; give torch modules")
        for name, parameter in model.named_parameters():
            if isinstance(parameter, UninitializedParameter) or parameter.is_meta:
                raise ConfigError(
                    f"parameter {name!r} of model {number} has no values yet (it is lazy, or on "
                    "the meta device); materialise the model before Ddp.wrap"
                )
            other, its_name = owner.setdefault(id(parameter), (number, name))
            if other != number:
                raise ConfigError(
                    f"models {other} and {number} share the parameter {its_name!r}; replicas need "
                    "parameters of their own: build the model once for each, or copy.deepcopy it"
                )


def place(
    models: Sequence[nn.Module],
    devices: str | torch.device | Sequence[str | int | torch.device],
    environment: DistributedTrainConfig,
) -> tuple[torch.device, ...]:
    """The device of each replica of this process.

    Args:
        models: The replicas.
        devices: ``"auto"`` (accelerators in turn, this host's processes one after the other, as far
            as there are any), one device for all, or one for each.
        environment: This process's place on its host.

    Raises:
        ConfigError: A device is unknown or not there, or there are not as many as models.
    """
    counts = count_accelerators()
    if isinstance(devices, str) and devices == "auto":
        start = environment.local_rank * len(models)
        wanted = environment.backend.value
        return tuple(
            torch.device(device_by_number(wanted, start + i, environment, counts))
            for i in range(len(models))
        )
    if isinstance(devices, str | torch.device):
        return (_device(devices, counts),) * len(models)
    if len(devices) != len(models):
        raise ConfigError(
            f"{len(models)} models, but {len(devices)} devices ({list(devices)}); give one device "
            "for each model of this process"
        )
    return tuple(
        _device(by_number(device, counts, devices) if isinstance(device, int) else device, counts)
        for device in devices
    )


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that gradients are averaged for, tied ones once."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def read_layout(
    replicas: Sequence[Mapping[str, Tensor]], first: int, *, gradients: bool = False
) -> tuple[tuple[Entry, ...], str]:
    """What this process's replicas look like now.

    Args:
        replicas: Tensors by name, a mapping for each replica.
        first: Number of the first of them among all.
        gradients: Also look whether their gradients can be averaged.

    Returns:
        Names, shapes and dtypes sorted by name, and what is wrong, if anything is.
    """
    layouts = [
        tuple(sorted(((n, tuple(t.shape), t.dtype) for n, t in named.items()), key=_by_name))
        for named in replicas
    ]
    for number, layout in enumerate(layouts):
        if layout != layouts[0]:
            difference = first_difference(
                in_words(layouts[0]), in_words(layout), first, first + number
            )
            return layouts[0], difference
    if gradients:
        for number, named in enumerate(replicas):
            for name, tensor in named.items():
                if problem := _gradient_problem(tensor):
                    return layouts[
                        0
                    ], f"the gradient of {name!r} on replica {first + number} {problem}"
    return layouts[0], ""


def first_difference(left: Model, right: Model, left_number: int, right_number: int) -> str:
    """The first difference of two layouts in words, by name; empty where there is none."""
    a = {entry[0]: entry[1:] for entry in left}
    b = {entry[0]: entry[1:] for entry in right}
    for name in sorted({*a, *b}):
        mine, theirs = a.get(name), b.get(name)
        if mine == theirs:
            continue
        if mine is not None and theirs is not None:
            what = (
                f"{name!r} is {' '.join(theirs)} on replica {right_number} and {' '.join(mine)} "
                f"on replica {left_number}"
            )
        else:
            has, lacks = (left_number, right_number) if mine else (right_number, left_number)
            what = f"replica {has} has {name!r} and replica {lacks} has not, or has it frozen"
        return f"{what}; replicas need the same architecture, and must change it alike"
    return ""


def in_words(layout: Sequence[Entry]) -> list[tuple[str, str, str]]:
    """A layout as plain texts."""
    return [(n, str(list(shape)), str(dtype).removeprefix("torch.")) for n, shape, dtype in layout]


def _device(device: str | torch.device, counts: Mapping[str, int]) -> torch.device:
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise ConfigError(
            f"device {device!r} is unknown; give 'cpu', 'cuda:0' and the like, or 'auto'"
        ) from None
    if chosen.type == "meta":
        raise ConfigError("device 'meta' holds no values; give 'cpu' or 'cuda:0' and the like")
    if chosen.type == "cpu":
        return chosen
    index = chosen.index or 0
    if index >= counts.get(chosen.type, 0):
        raise ConfigError(f"device {str(chosen)!r} is not here: torch finds {found_here(counts)}")
    return torch.device(chosen.type, index)


def _gradient_problem(parameter: Tensor) -> str:
    gradient = parameter.grad
    if gradient is None:
        return ""
    if gradient.layout is not torch.strided:
        return "is sparse; replicas exchange dense gradients: use sparse=False in its layer"
    if gradient.shape != parameter.shape:
        return (
            f"has shape {list(gradient.shape)}, its parameter {list(parameter.shape)}; call "
            "zero_grad() after a model has changed its size"
        )
    return ""


def _by_name(entry: Entry) -> str:
    return entry[0]
