"""A team's state on disk: the content of a checkpoint, and how a team of any size loads it.

A checkpoint is read as a whole, and its names and shapes are compared with those of the rank before
any of it is loaded, so a refused checkpoint changes nothing.
"""

import copy
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from evener.averaging.outer import describe_loss
from evener.averaging.sharded_update import ELEMENTWISE
from evener.checkpoint import Snapshot, copy_to_cpu, encode_document, find_newest, open_checkpoint
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
        model: Parameters and buffers by name, on the CPU.
        training: Optimizers, schedule, and registered objects.
        engine: The argument of ``Engine.load_state_dict``, with the data position of each loader.
    """

    path: Path
    model: Mapping[str, Tensor]
    training: TrainingContent
    engine: Mapping[str, Any]


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

    Call it at a commit or between epochs, when all ranks hold the same state; one rank suffices.

    Args:
        assembly: The rank.
        positions: The data positions that belong to the state, one for each loader.
        assets: Further files, by name.
        documents: Further JSON documents, by file name.
        after: As for ``Snapshot``.
        into: An earlier snapshot, whose memory is reused.
    """
    engine, started_s = assembly.engine, time.perf_counter()
    training, tensors = assembly.state.collect(engine.optimizer_states())
    groups = {"model": assembly.model.state_dict(), TRAINING: tensors}
    old = into.tensors if into is not None else {}
    known = engine.run.state_dict(engine.policy, assembly.names)
    state = {**known, **training, "positions": list(positions)}
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

    Damaged checkpoints are skipped, with a warning on rank 0. The rank is not changed.

    Raises:
        CheckpointError: There is none, or it belongs to another model, optimizer or policy.
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
    checkpoint = checkpoint or open_checkpoint(path)
    state = checkpoint.document(STATE)
    saved = SavedState(
        path=checkpoint.path,
        model=checkpoint.tensors("model"),
        training=unpack(state, checkpoint.tensors(TRAINING)),
        engine=state,
    )
    if difference := next(_differences(saved, assembly), None):
        raise CheckpointError(
            f"{saved.path} is not of this run: {difference}; resume with the model, "
            "optimizers and schedulers that it was written from"
        )
    # On a copy, which shows whether it is of another policy.
    copy.deepcopy(assembly.engine.policy).load_state_dict(saved.engine["planner"])
    return saved


def restore(assembly: Assembly, saved: SavedState) -> None:
    """Load a checkpoint's checked state into this rank; all ranks load the same one.

    A warning says what of the outer optimizer does not continue.

    Raises:
        CheckpointError: A registered object refuses its state; the model is as it was.
    """
    assembly.state.restore(saved.training)
    with torch.no_grad():
        for name, tensor in assembly.model.state_dict().items():
            tensor.copy_(saved.model[name])
    assembly.engine.load_state_dict(saved.engine, assembly.names)
    if lost := describe_loss(saved.training.outer, assembly.state.outer):
        assembly.engine.options.guards.notice(f"{saved.path}: {lost}")


def _differences(saved: SavedState, assembly: Assembly) -> Iterator[str]:
    """Yield differences between a checkpoint's model, optimizers, schedulers and this rank's."""
    groups = [state["param_groups"] for state in saved.training.optimizers]
    there = _layout(saved.model, groups, saved.training.schedule)
    groups = [optimizer.param_groups for optimizer in assembly.optimizers]
    here = _layout(assembly.model.state_dict(), groups, assembly.state.schedule.state_dict())
    for name in here | there:
        if (theirs := there.get(name, "missing")) != (mine := here.get(name, "missing")):
            yield f"{name} is {theirs} there and {mine} here"
    for number, optimizer in enumerate(assembly.optimizers):
        state = saved.training.optimizers[number]
        for group, options in zip(state["param_groups"], optimizer.param_groups, strict=True):
            for key, value in options.items():
                # A newer torch may know options that an older one did not write.
                optional = value is None or isinstance(value, bool | str) or key == "initial_lr"
                if key not in group and not optional:
                    yield f"optimizer {number} has {key!r} here only"
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        of_shape = ELEMENTWISE.get(type(optimizer), frozenset())  # others may keep parts of a shape
        for index, values in state["state"].items():
            for key in values.keys() & of_shape:
                # SGD without momentum keeps a buffer that is None.
                if isinstance(values[key], Tensor) and values[key].shape != parameters[index].shape:
                    shapes = f"{tuple(values[key].shape)} for {tuple(parameters[index].shape)}"
                    yield f"state.{index}.{key} of optimizer {number} has the shape {shapes}"


def _layout(
    model: Mapping[str, Tensor],
    optimizers: Sequence[Sequence[Mapping[str, Any]]],
    schedulers: Sequence[Any],
) -> dict[str, str]:
    """Return names and shapes as text, with the parameter groups of each optimizer."""
    layout = {repr(name): f"of shape {tuple(tensor.shape)}" for name, tensor in model.items()}
    for number, groups in enumerate(optimizers):
        sizes = [len(group["params"]) for group in groups]
        layout[f"optimizer {number}"] = f"one with groups of {sizes} parameters"
    return layout | {"the number of schedulers": str(len(schedulers))}
