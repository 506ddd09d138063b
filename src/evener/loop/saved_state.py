"""A team's state on disk: the content of a checkpoint, and how a team of any size loads it.

A checkpoint is read as a whole, and its names and shapes are compared with the rank's parts, before
any of it is loaded: a state that is refused has changed nothing.
"""

import copy
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from evener.averaging.sharded_update import ELEMENTWISE
from evener.checkpoint import (
    Checkpoint,
    Snapshot,
    copy_to_cpu,
    encode_document,
    find_newest,
    open_checkpoint,
)
from evener.engine.results import Progress
from evener.engine.training_state import TrainingContent, unpack
from evener.errors import CheckpointError
from evener.loop.assembly import Assembly
from evener.team.terminal import warn

STATE: Final = "state.json"
"""Document with progress, data position, planner and schedule; no rank count."""
TRAINING: Final = "training"
"""Stem of the file with the tensors of optimizers and registered objects."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedState:
    """The content of a team's checkpoint.

    Attributes:
        path: The checkpoint.
        positions: The data position of each loader, in the order in which they were made.
        model: Parameters and buffers by name, on the CPU.
        training: Optimizers, schedule, and registered objects.
        engine: The argument of ``Engine.load_state_dict``.
    """

    path: Path
    positions: tuple[Mapping[str, Any], ...]
    model: Mapping[str, Tensor]
    training: TrainingContent
    engine: Mapping[str, Any]

    @property
    def progress(self) -> Progress:
        """Return what the team had applied."""
        return Progress(**self.engine["progress"])


def capture(
    assembly: Assembly,
    positions: Sequence[Mapping[str, Any]],
    *,
    assets: Mapping[str, bytes] | None = None,
    documents: Mapping[str, Any] | None = None,
    after: Sequence[threading.Event] = (),
    into: Snapshot | None = None,
) -> Snapshot:
    """Copy the team's state to CPU memory; training may continue afterwards.

    Call it at a commit or between epochs, where all ranks hold the same state; one rank suffices.

    Args:
        assembly: The rank's parts.
        positions: The data positions that belong to the state, one for each loader.
        assets: Further files, by name.
        documents: Further JSON documents, by file name.
        after: As for ``Snapshot``.
        into: An earlier snapshot that is not read any more; its memory is used again.
    """
    engine, started_s = assembly.engine, time.perf_counter()
    training, tensors = assembly.state.collect(engine.optimizer_states())
    groups = {"model": assembly.model.state_dict(), TRAINING: tensors}
    old = into.tensors if into is not None else {}
    state = {
        **engine.run.state_dict(engine.policy, assembly.names),
        **training,
        "positions": list(positions),
    }
    documents = {STATE: state, **(documents or {})}
    encoded = {name: encode_document(name, one) for name, one in documents.items()}
    return Snapshot(
        step=engine.window,
        tensors={stem: copy_to_cpu(those, into=old.get(stem)) for stem, those in groups.items()},
        files={**(assets or {}), **encoded},
        copy_s=time.perf_counter() - started_s,
        after=after,
    )


def find_state(assembly: Assembly, path: Path) -> SavedState:
    """Read the newest complete checkpoint in ``path``, or the checkpoint ``path`` itself.

    What is damaged is passed over, with a warning on rank 0. Nothing of the rank is changed.

    Raises:
        CheckpointError: There is none, or it is of another model, optimizer or policy.
    """
    skipped: list[str] = []

    def skip(place: Path, reason: str) -> None:
        skipped.append(f"{place.name}: {reason}")
        if assembly.comm.rank == 0:
            warn(f"skipped checkpoint {place}: {reason}")

    checkpoint = find_newest(path, skip)
    if checkpoint is None and skipped:
        raise CheckpointError(
            f"{path} holds no complete checkpoint ({'; '.join(skipped)}); give another folder"
        )
    saved = _read(checkpoint or open_checkpoint(path))
    _check_model(saved.path, saved.model, assembly.model)
    _check_training(saved.path, saved.training, assembly)
    # On a copy, which shows whether it is of another policy.
    copy.deepcopy(assembly.policy).load_state_dict(saved.engine["planner"])
    return saved


def restore(assembly: Assembly, saved: SavedState) -> None:
    """Load a checkpoint's state, which fits, into this rank; all ranks load the same one.

    Raises:
        CheckpointError: A registered object refuses its state; the model is as it was.
    """
    assembly.state.restore(saved.training)
    with torch.no_grad():
        for name, tensor in assembly.model.state_dict().items():
            tensor.copy_(saved.model[name])
    assembly.engine.load_state_dict(saved.engine, assembly.names)


def _read(checkpoint: Checkpoint) -> SavedState:
    """Read what ``capture`` has saved."""
    try:
        state = checkpoint.document(STATE)
        return SavedState(
            path=checkpoint.path,
            positions=tuple(state["positions"]),
            model=checkpoint.tensors("model"),
            training=unpack(state, checkpoint.tensors(TRAINING)),
            engine=state,
        )
    except (LookupError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{checkpoint.path / STATE} is damaged: {error!r}; resume from an older checkpoint"
        ) from error


def _check_model(path: Path, saved: Mapping[str, Tensor], model: nn.Module) -> None:
    """Compare names and shapes of the weights in ``path`` with a model's.

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


def _check_training(path: Path, saved: TrainingContent, assembly: Assembly) -> None:
    """Compare saved optimizers and schedulers with those of this rank.

    Raises:
        CheckpointError: They are others.
    """
    _check_number(path, "optimizers", len(saved.optimizers), len(assembly.optimizers))
    for state, optimizer in zip(saved.optimizers, assembly.optimizers, strict=True):
        if difference := _difference(state, optimizer):
            raise CheckpointError(
                f"{path} holds another optimizer than this run's: {difference}; resume with the "
                "same optimizer and parameter groups"
            )
    own = assembly.state.schedule.state_dict()
    _check_number(path, "schedulers", len(saved.schedule), len(own))


def _check_number(path: Path, what: str, saved: int, own: int) -> None:
    if saved != own:
        raise CheckpointError(
            f"{path} holds {saved} {what}, this run has {own}; resume with the script that wrote it"
        )


def _difference(state: Mapping[str, Any], optimizer: Optimizer) -> str:
    """Return how an optimizer's saved state differs from the optimizer; empty if it fits."""
    saved, own = state["param_groups"], optimizer.param_groups
    sizes, own_sizes = ([len(group["params"]) for group in groups] for groups in (saved, own))
    if sizes != own_sizes:
        return f"its parameter groups hold {sizes} parameters instead of {own_sizes}"
    for number, (group, mine) in enumerate(zip(saved, own, strict=True)):
        for key, value in mine.items():
            # A newer torch may know options that an older one did not write.
            optional = value is None or isinstance(value, bool | str) or key == "initial_lr"
            if key not in group and not optional:
                return f"its parameter group {number} lacks {key!r}"
    parameters = [parameter for group in own for parameter in group["params"]]
    of_shape = ELEMENTWISE.get(type(optimizer), frozenset())  # others may keep parts of a shape
    for index, values in state["state"].items() if of_shape else ():
        for key in values.keys() & of_shape:
            # SGD without momentum keeps a buffer that is None.
            if isinstance(values[key], Tensor) and values[key].shape != parameters[index].shape:
                there, here = tuple(values[key].shape), tuple(parameters[index].shape)
                return f"state.{index}.{key} has shape {there} instead of {here}"
    return ""
