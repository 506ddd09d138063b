"""A checkpoint's state, read and checked as a whole before any of it is put into a rank.

What is damaged (a value of the wrong kind, a tensor that is missing) shows while it is read; what
does not belong to this run (another model, another optimizer) shows when it is compared with the
rank's parts. Either way a refused state has changed nothing.
"""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from torch import Tensor, nn
from torch.optim import Optimizer

from evener.checkpoint import Checkpoint, unflatten_optimizer
from evener.data.cursor import Cursor
from evener.engine.results import Progress
from evener.errors import CheckpointError
from evener.parsing import MOST_WHOLE, Fields, short
from evener.run.assembly import Assembly

STATE: Final = "state.json"
"""Document with progress, data position, planner and schedule; no rank count."""

#: What torch's optimizers keep for a parameter in a tensor of its shape.
_OF_PARAMETER_SHAPE = frozenset(
    {"acc_delta", "ax", "exp_avg", "exp_avg_sq", "exp_inf", "grad_avg", "max_exp_avg_sq"}
    | {"momentum_buffer", "prev", "square_avg", "step_size", "sum"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedState:
    """What a checkpoint holds of a team.

    Attributes:
        path: The checkpoint.
        progress: What the team had applied.
        positions: The data position of each loader, in the order in which they were made.
        model: Parameters and buffers by name, on the CPU.
        optimizers: What each optimizer's ``load_state_dict`` takes.
        schedule: State of each torch scheduler.
        planner: What was learnt of the members' speeds.
        limits: The largest micro-batch that fits, by member.
        loss_scale: The loss scale of fp16.
        registered: States of registered objects, by name.
        registered_tensors: The tensors that these name.
    """

    path: Path
    progress: Progress
    positions: tuple[Mapping[str, Any], ...]
    model: Mapping[str, Tensor]
    optimizers: tuple[dict[str, Any], ...]
    schedule: list[Any]
    planner: Mapping[str, Any]
    limits: Mapping[str, int]
    loss_scale: Mapping[str, Any]
    registered: Mapping[str, Any]
    registered_tensors: Mapping[str, Tensor]


def stem_of(number: int) -> str:
    """Name of the tensor file of an optimizer, without its suffix."""
    return "optimizer" if number == 0 else f"optimizer-{number}"


def read_saved(checkpoint: Checkpoint, model: nn.Module) -> SavedState:
    """Read all that a checkpoint holds of a team.

    Raises:
        CheckpointError: A value is missing or of the wrong kind, or the weights cannot be those of
            any training of this model; names file and value.
    """
    try:
        saved = _read(checkpoint)
    except ValueError as error:
        raise CheckpointError(
            f"{checkpoint.path / STATE} is damaged: {error}; resume from an older checkpoint"
        ) from error
    except CheckpointError as error:
        if str(checkpoint.path) in str(error):  # it names one of the other files
            raise
        raise CheckpointError(f"{checkpoint.path / STATE}: {error}") from error
    _check_weights(saved, model)
    return saved


def _read(checkpoint: Checkpoint) -> SavedState:
    state = Fields(checkpoint.document(STATE))
    further = state.items("further_cursors") if "further_cursors" in state else []
    positions = [state["cursor"], *further]
    for position in positions:
        _check_position(Fields(position, "cursor"))
    limits = state.fields("micro_batch_limits") if "micro_batch_limits" in state else Fields({})
    registered = state.fields("registered").values if "registered" in state else {}
    return SavedState(
        path=checkpoint.path,
        progress=_progress(state.fields("progress")),
        positions=tuple(positions),
        model=checkpoint.tensors("model"),
        optimizers=tuple(
            unflatten_optimizer(checkpoint.tensors(stem_of(number)), document)
            for number, document in enumerate(state.items("optimizers"))
        ),
        schedule=state.items("schedule"),
        planner=state.fields("planner").values,
        limits={member: limits.whole(member, least=1) for member in limits.values},
        loss_scale=_loss_scale(state) if "loss_scale" in state else {},
        registered=registered,
        registered_tensors=checkpoint.tensors("registered") if _names_tensors(registered) else {},
    )


def _progress(fields: Fields) -> Progress:
    return Progress(
        window=fields.whole("window"),
        steps=fields.whole("steps"),
        samples=fields.whole("samples"),
        weight=fields.number("weight", least=0.0),
        skipped=fields.whole("skipped"),
    )


def _loss_scale(state: Fields) -> dict[str, Any]:
    scale = state.fields("loss_scale")
    return {
        "value": scale.number("value", least=1.0),
        "good_steps": scale.whole("good_steps"),
    }


def _check_position(position: Fields) -> None:
    """Check a data position by itself; whether it is of this data, its loader says."""
    if "stream_epoch" in position:
        position.whole("stream_epoch", most=Cursor.MOST_EPOCHS)
    elif position.values:  # a loop without a loader has none
        seed = position.whole("seed", least=-(2**64), most=2**64)
        Cursor(position.whole("num_samples", least=1), seed).load_state_dict(position.values)


def _names_tensors(state: Any) -> bool:
    if isinstance(state, dict):
        return "$tensor" in state or any(_names_tensors(value) for value in state.values())
    return isinstance(state, list) and any(_names_tensors(value) for value in state)


def _check_weights(saved: SavedState, model: nn.Module) -> None:
    """Refuse whole numbers where the model has fractions, and the other way round."""
    for name, own in model.state_dict().items():
        other = saved.model.get(name)
        if other is None or other.shape != own.shape:
            continue  # of another model, perhaps: see ``check_fit``
        if _kind(other) != _kind(own):
            raise CheckpointError(
                f"{saved.path / 'model.safetensors'} is damaged: {name!r} is of "
                f"{other.dtype}, which does not go into {own.dtype}; resume from an older "
                "checkpoint"
            )


def _kind(tensor: Tensor) -> str:
    if tensor.is_complex():
        return "complex"
    return "float" if tensor.is_floating_point() else "whole"


# ── does it belong to this run? ──────────────────────────────────────────────────────────────────


def check_fit(saved: SavedState, assembly: Assembly) -> None:
    """Compare a saved state with a rank's parts, which stay as they are.

    Raises:
        CheckpointError: It is of another model, other optimizers or schedulers, or another policy.
    """
    _check_model(saved, assembly.model)
    if len(saved.optimizers) != len(assembly.optimizers):
        raise CheckpointError(
            f"{saved.path} holds {len(saved.optimizers)} optimizers, this run has "
            f"{len(assembly.optimizers)}; resume with the script that wrote it"
        )
    for optimizer, state in zip(assembly.optimizers, saved.optimizers, strict=True):
        try:
            _check_optimizer(state, optimizer)
        except ValueError as error:
            raise CheckpointError(
                f"{saved.path} holds another optimizer than this run's: {error}; resume with "
                "the same optimizer and parameter groups"
            ) from error
    own = assembly.schedule.state_dict()
    try:
        if len(saved.schedule) != len(own):
            raise ValueError(f"it has {len(saved.schedule)} schedulers instead of {len(own)}")
        _require_alike(saved.schedule, own, "schedule")
    except ValueError as error:
        raise CheckpointError(
            f"{saved.path} holds another schedule than this run's: {error}; resume with the same "
            "schedulers"
        ) from error
    try:
        copy.deepcopy(assembly.policy).load_state_dict(saved.planner)
    except CheckpointError as error:
        raise CheckpointError(f"{saved.path / STATE}: {error}") from error


def _check_model(saved: SavedState, model: nn.Module) -> None:
    own = model.state_dict()
    for name, tensor in own.items():
        if name not in saved.model:
            raise CheckpointError(
                f"{saved.path} lacks {name!r} of this model; resume with the model it was "
                "written from"
            )
        if saved.model[name].shape != tensor.shape:
            raise CheckpointError(
                f"{name!r} has shape {tuple(saved.model[name].shape)} in {saved.path} and "
                f"{tuple(tensor.shape)} in this model; resume with the same model configuration"
            )
    if extra := sorted(set(saved.model) - set(own)):
        raise CheckpointError(
            f"{saved.path} holds {extra[0]!r}, which this model lacks; resume with the model "
            "it was written from"
        )


def _check_optimizer(state: dict[str, Any], optimizer: Optimizer) -> None:
    own = optimizer.state_dict()["param_groups"]
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
                _require_alike(group[key], value, f"{place}.{key}")
    _check_states(Fields(state).fields("state").values, optimizer)


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
        for key, value in values.items():
            _check_value(key, value, parameter, f"state.{index}.{key}")


def _check_value(key: Any, value: Any, parameter: Tensor, place: str) -> None:
    if value is None and key == "momentum_buffer":
        return  # SGD without momentum, of some versions of torch
    if key in _OF_PARAMETER_SHAPE:
        if not isinstance(value, Tensor) or value.shape != parameter.shape:
            what = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else short(value)
            raise ValueError(f"{place} is {what}, not of shape {tuple(parameter.shape)}")
        if _kind(value) != _kind(parameter):
            raise ValueError(f"{place} is of {value.dtype}, the parameter of {parameter.dtype}")
    elif key == "step":
        number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        _require_alike(number, 0, place)


def _require_alike(saved: Any, own: Any, place: str) -> None:
    """Check that a value is of the same kind as the one in use, all the way down."""
    if own is None:  # what is not set yet may be anything
        return
    if isinstance(own, Mapping):
        good = isinstance(saved, Mapping)
    elif isinstance(own, tuple):  # such as betas: as many numbers as the optimizer unpacks
        good = isinstance(saved, list | tuple) and len(saved) == len(own)
    elif isinstance(own, list):
        good = isinstance(saved, list | tuple)
    elif isinstance(own, bool | str):
        good = isinstance(saved, type(own))
    elif isinstance(own, int | float):
        number = saved.item() if isinstance(saved, Tensor) and saved.numel() == 1 else saved
        good = isinstance(number, int | float) and not isinstance(number, bool)
        good = good and (not math.isfinite(own) or -MOST_WHOLE <= number <= MOST_WHOLE)
    else:
        good = not isinstance(own, Tensor) or isinstance(saved, Tensor | int | float)
    if not good:
        raise ValueError(f"{place} is {short(saved)}, not of the kind of {short(own)}")
    if isinstance(own, Mapping):
        for key in own.keys() & saved.keys():
            _require_alike(saved[key], own[key], f"{place}.{key}")
    elif isinstance(own, list | tuple):
        for number, (one, other) in enumerate(zip(saved, own, strict=False)):
            _require_alike(one, other, f"{place}.{number}")
