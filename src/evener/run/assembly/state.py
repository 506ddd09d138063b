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
    copy_to_cpu,
    find_newest,
    open_checkpoint,
    unflatten_optimizer,
)
from evener.errors import CheckpointError, EvenerError
from evener.run.assembly.assembly import Assembly
from evener.run.windows.results import Progress

STATE = "state.json"
"""Document with progress, data position, planner and schedule; no rank count."""


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
        tensors[_stem(number)] = copy_to_cpu(arrays, into=old.get(_stem(number)))
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


def restore(assembly: Assembly, checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Puts a checkpoint's state into this rank; every rank restores the same one.

    Returns:
        The state document; its ``cursor`` belongs to the loader.

    Raises:
        CheckpointError: The checkpoint holds another model or optimizer.
    """
    state: Mapping[str, Any] = checkpoint.document(STATE)
    _restore_model(assembly, checkpoint)
    documents = state["optimizers"]
    if len(documents) != len(assembly.optimizers):
        raise CheckpointError(
            f"{checkpoint.path} holds {len(documents)} optimizers, this run has "
            f"{len(assembly.optimizers)}; resume with the script that wrote it"
        )
    for number, (optimizer, document) in enumerate(
        zip(assembly.optimizers, documents, strict=True)
    ):
        tensors = checkpoint.tensors(_stem(number))
        try:
            optimizer.load_state_dict(unflatten_optimizer(tensors, document))
        except ValueError as error:
            raise CheckpointError(
                f"{checkpoint.path} holds another optimizer than this run's: {error}; resume with "
                "the same optimizer and parameter groups"
            ) from error
    assembly.schedule.load_state_dict(state["schedule"])
    assembly.policy.load_state_dict(state["planner"])
    members = [m.member for m in assembly.members]
    limits = assembly.engine.limits
    limits.load_state_dict(state.get("micro_batch_limits", {}), members, assembly.team.rank)
    assembly.policy.set_micro_batch_sizes(limits.sizes)
    assembly.engine.options.loss_scale.load_state_dict(state.get("loss_scale", {}))
    registered = state.get("registered", {})
    held = checkpoint.tensors("registered") if _names_tensors(registered) else {}
    assembly.registry.restore(registered, held)
    assembly.engine.restored()
    assembly.engine.progress = Progress(**state["progress"])
    return state


def save_state(assembly: Assembly, positions: Sequence[Mapping[str, Any]], path: Path) -> str:
    """Writes a checkpoint at once.

    Args:
        assembly: The rank's parts.
        positions: The data position of each loader.
        path: Where to.

    Returns:
        What went wrong, or an empty string.
    """
    try:
        with CheckpointWriter(path, keep_last=None) as writer:
            first, *further = positions or [{}]
            writer.submit(capture(assembly, first, further=further))
            if not writer.wait(timeout_s=600.0):
                return f"{path} was not written within 600 s; check the disk"
            error = writer.poll_error()
        return "" if error is None else str(error)
    except (EvenerError, OSError) as error:
        return str(error)


def load_state(assembly: Assembly, path: Path) -> Mapping[str, Any]:
    """Restores the newest complete checkpoint in ``path``, or the checkpoint ``path`` itself."""
    skipped: list[str] = []
    newest = find_newest(path, lambda place, reason: skipped.append(f"{place.name}: {reason}"))
    if newest is None and skipped:
        raise CheckpointError(
            f"{path} holds no complete checkpoint ({'; '.join(skipped)}); give another folder"
        )
    return restore(assembly, newest or open_checkpoint(path))


@torch.no_grad()
def _restore_model(assembly: Assembly, checkpoint: Checkpoint) -> None:
    own = assembly.model.state_dict()
    saved = checkpoint.tensors("model")
    for name, tensor in own.items():
        if name not in saved:
            raise CheckpointError(
                f"{checkpoint.path} lacks {name!r} of this model; resume with the model it was "
                "written from"
            )
        if saved[name].shape != tensor.shape:
            raise CheckpointError(
                f"{name!r} has shape {tuple(saved[name].shape)} in {checkpoint.path} and "
                f"{tuple(tensor.shape)} in this model; resume with the same model configuration"
            )
    if extra := sorted(set(saved) - set(own)):
        raise CheckpointError(
            f"{checkpoint.path} holds {extra[0]!r}, which this model lacks; resume with the model "
            "it was written from"
        )
    for name, tensor in own.items():
        tensor.copy_(saved[name])


def _names_tensors(state: Any) -> bool:
    if isinstance(state, dict):
        return "$tensor" in state or any(_names_tensors(value) for value in state.values())
    return isinstance(state, list) and any(_names_tensors(value) for value in state)


def _stem(number: int) -> str:
    return "optimizer" if number == 0 else f"optimizer-{number}"
