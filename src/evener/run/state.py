"""What a checkpoint of a team holds, and how it goes back into one of another size."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from evener.checkpoint import (
    Checkpoint,
    CheckpointWriter,
    Snapshot,
    WrittenCheckpoint,
    copy_to_cpu,
    find_newest,
    open_checkpoint,
)
from evener.errors import CheckpointError
from evener.run.assembly import Assembly
from evener.run.launching.terminal import warn
from evener.run.saved import (
    STATE,
    SavedState,
    check_fit,
    read_saved,
    stem_of,
)


def capture(
    assembly: Assembly,
    cursor_state: Mapping[str, Any],
    *,
    assets: Mapping[str, bytes] | None = None,
    documents: Mapping[str, Any] | None = None,
    further: Sequence[Mapping[str, Any]] = (),
    into: Snapshot | None = None,
) -> Snapshot:
    """Copies the team's state to CPU memory; training may go on afterwards.

    Call it at a commit or between epochs, where all ranks hold the same state; one rank suffices.

    Args:
        assembly: The rank's parts.
        cursor_state: The data position that belongs to the state.
        assets: Further files, by name.
        documents: Further JSON documents, by file name.
        further: Data positions of further loaders, in the order in which they were made.
        into: An earlier snapshot that nobody reads any more; its memory is used again.
    """
    progress = assembly.engine.progress
    old = into.tensors if into is not None else {}
    tensors: dict[str, Mapping[str, Tensor]] = {
        "model": copy_to_cpu(assembly.model.state_dict(), into=old.get("model"))
    }
    optimizers = []
    for number, (arrays, document) in enumerate(assembly.engine.saved_states()):
        tensors[stem_of(number)] = copy_to_cpu(arrays, into=old.get(stem_of(number)))
        optimizers.append(document)
    state = {
        "progress": {
            "window": progress.window,
            "steps": progress.steps,
            "samples": progress.samples,
            "weight": progress.weight,
            "skipped": progress.skipped,
        },
        "cursor": dict(cursor_state),
        "planner": assembly.policy.state_dict(),
        "schedule": assembly.schedule.state_dict(),
        "optimizers": optimizers,
        "micro_batch_limits": assembly.engine.limits.state_dict(
            [m.member for m in assembly.members]
        ),
        "loss_scale": assembly.engine.options.loss_scale.state_dict(),
    }
    if further:
        state["further_cursors"] = [dict(one) for one in further]
    if assembly.registry:
        state["registered"], own = assembly.registry.collect()
        if own:
            tensors["registered"] = copy_to_cpu(own, into=old.get("registered"))
    return Snapshot(
        step=progress.window,
        tensors=tensors,
        documents={STATE: state, **(documents or {})},
        assets=dict(assets or {}),
    )


def restore(assembly: Assembly, saved: SavedState) -> None:
    """Put a checkpoint's state, which fits, into this rank; every rank restores the same one.

    Raises:
        CheckpointError: A registered object refuses its state; the model is as it was.
    """
    # What may be refused comes first: the code of registered objects is the user's.
    try:
        assembly.registry.restore(saved.registered, saved.registered_tensors)
    except CheckpointError as error:
        raise CheckpointError(f"{saved.path}: {error}") from error
    assembly.policy.load_state_dict(saved.planner)
    assembly.schedule.load_state_dict(saved.schedule)
    for optimizer, state in zip(assembly.optimizers, saved.optimizers, strict=True):
        optimizer.load_state_dict(state)
    with torch.no_grad():
        for name, tensor in assembly.model.state_dict().items():
            tensor.copy_(saved.model[name])
    members = [m.member for m in assembly.members]
    limits = assembly.engine.limits
    limits.load_state_dict(saved.limits, members, assembly.team.rank)
    assembly.policy.set_micro_batch_sizes(limits.sizes)
    assembly.engine.options.loss_scale.load_state_dict(saved.loss_scale)
    assembly.engine.restored()
    assembly.engine.progress = saved.progress


def save_state(
    assembly: Assembly, positions: Sequence[Mapping[str, Any]], path: Path
) -> WrittenCheckpoint:
    """Write a checkpoint at once.

    Args:
        assembly: The rank's parts.
        positions: The data position of each loader.
        path: Where to.

    Raises:
        CheckpointError: It could not be written.
    """
    with CheckpointWriter(path, keep_last=None) as writer:
        first, *further = positions or [{}]
        writer.submit(capture(assembly, first, further=further))
        if not writer.wait(timeout_s=600.0):
            raise CheckpointError(f"{path} was not written within 600 s; check the disk")
        if (error := writer.poll_error()) is not None:
            raise error
        return writer.poll_written()[0]


def find_state(assembly: Assembly, path: Path) -> SavedState:
    """Read the newest checkpoint in ``path`` that can be used, or the checkpoint ``path`` itself.

    What is damaged is passed over, with a warning on rank 0. Nothing of the rank is changed.

    Raises:
        CheckpointError: There is none, or it is of another model, optimizer or policy.
    """
    skipped: list[str] = []
    read: list[SavedState] = []

    def skip(place: Path, reason: str) -> None:
        skipped.append(f"{place.name}: {reason}")
        if assembly.team.rank == 0:
            warn(f"skipped checkpoint {place}: {reason}")

    def check(checkpoint: Checkpoint) -> None:
        read.append(read_saved(checkpoint, assembly.model))

    if find_newest(path, skip, check) is None:
        if skipped:
            raise CheckpointError(
                f"{path} holds no complete checkpoint ({'; '.join(skipped)}); give another folder"
            )
        check(open_checkpoint(path))
    check_fit(read[-1], assembly)
    return read[-1]


def check_state(assembly: Assembly, checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint that cannot be restored into this rank, of which nothing is changed.

    Raises:
        CheckpointError: It is damaged, or of another model, optimizer or policy.
    """
    check_fit(read_saved(checkpoint, assembly.model), assembly)
