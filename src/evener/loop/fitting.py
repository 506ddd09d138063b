"""Check whether a checkpoint fits a rank's parts, without changing these."""

import math
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from evener.averaging.optimizer_state import ELEMENTWISE
from evener.errors import CheckpointError
from evener.parsing import MOST_WHOLE, Fields, short

#: State of torch's optimizers in tensors of the parameter's shape.
_OF_PARAMETER_SHAPE = frozenset[str]().union(*ELEMENTWISE.values())


def check_weights(path: Path, saved: Mapping[str, Tensor], model: nn.Module) -> None:
    """Refuse whole numbers where the model has fractions, and the other way round.

    Raises:
        CheckpointError: The weights in ``path`` cannot be those of any training of this model.
    """
    for name, own in model.state_dict().items():
        other = saved.get(name, own)  # perhaps state of another model: see ``check_model``
        if other.shape == own.shape and _kind(other) != _kind(own):
            raise CheckpointError(
                f"{path / 'model.safetensors'} is damaged: {name!r} is of "
                f"{other.dtype}, which does not go into {own.dtype}; resume from an older "
                "checkpoint"
            )


def check_model(path: Path, saved: Mapping[str, Tensor], model: nn.Module) -> None:
    """Compare the weights in ``path`` with a model's.

    Raises:
        CheckpointError: They are of another model.
    """
    own = model.state_dict()
    for name, tensor in own.items():
        if name not in saved:
            raise CheckpointError(
                f"{path} lacks {name!r} of this model; resume with the model it was written from"
            )
        if saved[name].shape != tensor.shape:
            raise CheckpointError(
                f"{name!r} has shape {tuple(saved[name].shape)} in {path} and "
                f"{tuple(tensor.shape)} in this model; resume with the same model configuration"
            )
    if extra := sorted(set(saved) - set(own)):
        raise CheckpointError(
            f"{path} holds {extra[0]!r}, which this model lacks; resume with the model "
            "it was written from"
        )


def check_optimizer(state: Any, optimizer: Optimizer) -> None:
    """Compare an optimizer's saved state with the optimizer.

    Raises:
        ValueError: It is of another one; says what differs.
    """
    own = _numbered(optimizer.param_groups)
    groups = Fields(state).tables("param_groups")
    if len(groups) != len(own):
        raise ValueError(f"it has {len(groups)} parameter groups instead of {len(own)}")
    for number, (group, mine) in enumerate(zip(groups, own, strict=True)):
        place = f"param_groups.{number}"
        if group["params"] != mine["params"]:
            raise ValueError(
                f"{place} has the parameters {short(group['params'])} instead of "
                f"{short(mine['params'])}"
            )
        for key, value in mine.items():
            # A newer torch may know options that an older one did not write.
            optional = value is None or isinstance(value, bool | str) or key == "initial_lr"
            if key in group or not optional:
                check_kind(group[key], value, f"{place}.{key}")
    _check_states(Fields(state).fields("state").values, optimizer)


def _numbered(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return groups as ``state_dict()`` has them: a parameter is its number over all groups."""
    numbers = count()
    return [{**group, "params": [next(numbers) for _ in group["params"]]} for group in groups]


def _check_states(states: dict[Any, Any], optimizer: Optimizer) -> None:
    parameters = [
        (number, parameter)
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    ]
    of_torch = type(optimizer).__module__.startswith("torch.optim")
    kept: dict[tuple[int, bool], Any] = {}
    for index, state in states.items():
        if isinstance(index, str):
            continue  # state of the optimizer itself
        if type(index) is not int or not 0 <= index < len(parameters):
            raise ValueError(f"it has a state of parameter {short(index)}, which there is not")
        values = Fields(state, f"state.{index}").values
        if not of_torch or not values:
            continue
        group, parameter = parameters[index]
        # Adafactor keeps other things of matrices than of vectors.
        expected = kept.setdefault((group, parameter.dim() > 1), values.keys())
        if values.keys() != expected:
            raise ValueError(f"state.{index} has {list(values)} instead of {list(expected)}")
        usual = {**dict.fromkeys(_OF_PARAMETER_SHAPE, parameter), "step": 0}
        for key, value in values.items():
            # SGD without momentum keeps a buffer that is None, in some versions of torch.
            if value is not None or key != "momentum_buffer":
                check_kind(value, usual.get(key), f"state.{index}.{key}")


def check_kind(saved: Any, own: Any, place: str) -> None:
    """Check that a value is of the same kind as the one in use, all the way down.

    What is kept for a parameter has the parameter's shape; what is ``None`` in use, as it is not
    set yet, may be anything.

    Raises:
        ValueError: It is of another kind; names its place.
    """
    if isinstance(own, Parameter):
        _check_like_parameter(saved, own, place)
        return
    if not _is_of_kind(saved, own):
        raise ValueError(f"{place} is {short(saved)}, not of the kind of {short(own)}")
    if isinstance(own, Mapping):
        for key in own.keys() & saved.keys():
            check_kind(saved[key], own[key], f"{place}.{key}")
    elif isinstance(own, list | tuple):
        for number, (one, other) in enumerate(zip(saved, own, strict=False)):
            check_kind(one, other, f"{place}.{number}")


def _is_of_kind(saved: Any, own: Any) -> bool:
    if own is None:
        return True
    if isinstance(own, tuple) and isinstance(saved, list | tuple):
        return len(saved) == len(own)  # such as betas: as many numbers as the optimizer unpacks
    for kind in (Mapping, list | tuple, bool, str):
        if isinstance(own, kind):
            return isinstance(saved, kind)
    if isinstance(own, int | float):
        number = saved.item() if isinstance(saved, Tensor) and saved.numel() == 1 else saved
        is_number = isinstance(number, int | float) and not isinstance(number, bool)
        return is_number and (not math.isfinite(own) or -MOST_WHOLE <= number <= MOST_WHOLE)
    return not isinstance(own, Tensor) or isinstance(saved, Tensor | int | float)


def _check_like_parameter(saved: Any, parameter: Parameter, place: str) -> None:
    if not isinstance(saved, Tensor) or saved.shape != parameter.shape:
        what = f"of shape {tuple(saved.shape)}" if isinstance(saved, Tensor) else short(saved)
        raise ValueError(f"{place} is {what}, not of shape {tuple(parameter.shape)}")
    if _kind(saved) != _kind(parameter):
        raise ValueError(f"{place} is of {saved.dtype}, the parameter of {parameter.dtype}")


def _kind(tensor: Tensor) -> str:
    if tensor.is_complex():
        return "complex"
    return "float" if tensor.is_floating_point() else "whole"
