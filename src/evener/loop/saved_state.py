"""A team's state on disk: the content of a checkpoint, and how a team of any size loads it.

A checkpoint is read and checked as a whole before any of it is loaded. Damage (a value of the wrong
kind, a missing tensor) is found while it is read. Another model or optimizer is found when it is
compared with the rank's parts. Either way a refused state has changed nothing.
"""

import copy
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

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
from evener.data.cursor import Cursor
from evener.engine.results import Progress
from evener.engine.state import REGISTERED, TrainingContent, stem_of, unpack
from evener.errors import CheckpointError
from evener.loop.assembly import Assembly
from evener.loop.fitting import check_kind, check_model, check_optimizer, check_weights
from evener.parsing import Fields
from evener.team.terminal import warn

STATE: Final = "state.json"
"""Document with progress, data position, planner and schedule; no rank count."""


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
    training, groups = assembly.state.collect(engine.optimizer_states())
    groups = {"model": assembly.model.state_dict(), **groups}
    old = into.tensors if into is not None else {}
    first, *further = positions or [{}]
    state = {**engine.state_dict(assembly.names), **training, "cursor": dict(first)}
    if further:
        state["further_cursors"] = [dict(one) for one in further]
    copies = {stem: copy_to_cpu(those, into=old.get(stem)) for stem, those in groups.items()}
    return Snapshot(
        step=engine.window,
        tensors=copies,
        documents={STATE: state, **(documents or {})},
        assets=dict(assets or {}),
        copy_s=time.perf_counter() - started_s,
        after=after,
    )


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
        writer.submit(capture(assembly, positions))
        if not writer.wait(timeout_s=600.0):
            raise CheckpointError(f"{path} was not written within 600 s; check the disk")
        if (error := writer.poll_error()) is not None:
            raise error
        (written,) = writer.poll()
        assert isinstance(written, WrittenCheckpoint)
        return written


def restore(assembly: Assembly, saved: SavedState) -> None:
    """Load a checkpoint's state, which fits, into this rank; all ranks load the same one.

    Raises:
        CheckpointError: A registered object refuses its state; the model is as it was.
    """
    with _naming(saved.path):
        assembly.state.restore(saved.training)
    with torch.no_grad():
        for name, tensor in assembly.model.state_dict().items():
            tensor.copy_(saved.model[name])
    assembly.engine.load_state_dict(saved.engine, assembly.names)


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
        if assembly.comm.rank == 0:
            warn(f"skipped checkpoint {place}: {reason}")

    if find_newest(path, skip, lambda one: read.append(_read(one, assembly))) is None:
        if skipped:
            raise CheckpointError(
                f"{path} holds no complete checkpoint ({'; '.join(skipped)}); give another folder"
            )
        read.append(_read(open_checkpoint(path), assembly))
    _check_fit(read[-1], assembly)
    return read[-1]


def check_state(assembly: Assembly, checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint that cannot be restored into this rank, of which nothing is changed.

    Raises:
        CheckpointError: It is damaged, or of another model, optimizer or policy.
    """
    _check_fit(_read(checkpoint, assembly), assembly)


def _read(checkpoint: Checkpoint, assembly: Assembly) -> SavedState:
    with _naming(checkpoint.path / STATE):
        state = Fields(checkpoint.document(STATE))
        positions = [state["cursor"]]
        if "further_cursors" in state:
            positions += state.items("further_cursors")
        for position in positions:
            _check_position(Fields(position, "cursor"))
        stems = [stem_of(number) for number, _ in enumerate(state.items("optimizers"))]
        if f"{REGISTERED}.safetensors" in checkpoint.manifest.files:
            stems.append(REGISTERED)
        saved = SavedState(
            path=checkpoint.path,
            positions=tuple(positions),
            model=checkpoint.tensors("model"),
            training=unpack(state.values, {stem: checkpoint.tensors(stem) for stem in stems}),
            engine=_engine_state(state),
        )
    check_weights(saved.path, saved.model, assembly.model)
    return saved


def _engine_state(state: Fields) -> dict[str, Any]:
    progress, values = state.fields("progress"), state.values
    limits = Fields(values.get("micro_batch_limits", {}), "micro_batch_limits")
    scale = Fields(values.get("loss_scale", {}), "loss_scale")
    return {
        "progress": {
            **{name: progress.whole(name) for name in ("window", "steps", "samples", "skipped")},
            "weight": progress.number("weight", least=0.0),
        },
        "planner": state.fields("planner").values,
        "micro_batch_limits": {name: limits.whole(name, least=1) for name in limits.values},
        "loss_scale": scale.values
        and {"value": scale.number("value", least=1.0), "good_steps": scale.whole("good_steps")},
    }


def _check_position(position: Fields) -> None:
    """Check a data position by itself; whether it is of this data, its loader says."""
    if "stream_epoch" in position:
        position.whole("stream_epoch", most=Cursor.MOST_EPOCHS)
    elif position.values:  # a loop without a loader has none
        seed = position.whole("seed", least=-(2**64), most=2**64)
        Cursor(position.whole("num_samples", least=1), seed).load_state_dict(position.values)


def _check_fit(saved: SavedState, assembly: Assembly) -> None:
    """Compare a saved state with a rank's parts, which stay as they are.

    Raises:
        CheckpointError: It is of another model, other optimizers or schedulers, or another policy.
    """
    path, training = saved.path, saved.training
    check_model(path, saved.model, assembly.model)
    if len(training.optimizers) != len(assembly.optimizers):
        raise CheckpointError(
            f"{path} holds {len(training.optimizers)} optimizers, this run has "
            f"{len(assembly.optimizers)}; resume with the script that wrote it"
        )
    what = "holds another optimizer than this run's"
    with _naming(path, what, "resume with the same optimizer and parameter groups"):
        for optimizer, state in zip(assembly.optimizers, training.optimizers, strict=True):
            check_optimizer(state, optimizer)
    schedule = assembly.state.schedule
    own = schedule.state_dict()
    what = "holds another schedule than this run's"
    with _naming(path, what, "resume with the same schedulers"):
        if len(training.schedule) != len(own):
            raise ValueError(f"it has {len(training.schedule)} schedulers instead of {len(own)}")
        check_kind(training.schedule, own, "schedule")
    with _naming(path / STATE):
        copy.deepcopy(assembly.policy).load_state_dict(saved.engine["planner"])


@contextmanager
def _naming(place: Path, what: str = "", remedy: str = "") -> Iterator[None]:
    """Make errors of the block name the checkpoint, its damage, and the remedy."""
    try:
        yield
    except ValueError as error:
        text = f"{place} is damaged: {error}; resume from an older checkpoint"
        raise CheckpointError(f"{place} {what}: {error}; {remedy}" if what else text) from error
    except CheckpointError as error:
        folder = place.parent if place.name == STATE else place
        if str(folder) in str(error):  # it names one of the files
            raise
        raise CheckpointError(f"{place}: {error}") from error
