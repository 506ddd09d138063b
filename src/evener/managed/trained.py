"""The result of a managed run: the model's parameters and buffers, on the CPU."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import IO, Any

import torch
from torch import Tensor, nn

from evener.checkpoint import alias_table, copy_to_cpu
from evener.checkpoint.codec import decode, encode
from evener.engine.results import Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedState:
    """A trained model's state.

    Attributes:
        params: Parameters by name, on the CPU, in the dtypes of the model.
        buffers: Persistent buffers by name, on the CPU.
        extra: Extra state of modules (``get_extra_state``), by name.
        progress: The team's progress.
    """

    params: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    extra: Mapping[str, Any]
    progress: Progress

    def state_dict(self) -> dict[str, Any]:
        """The whole state, for ``model.load_state_dict`` of a new model."""
        return {**self.params, **self.buffers, **self.extra}


def capture_trained(model: nn.Module, progress: Progress) -> TrainedState:
    """Copy a model's state to new CPU memory.

    Raises:
        CheckpointError: A tensor is sparse, or extra state is not made of plain values.
    """
    state = model.state_dict()
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    tensors = copy_to_cpu({n: t for n, t in state.items() if isinstance(t, Tensor)})
    return TrainedState(
        params={n: t for n, t in tensors.items() if n in names},
        buffers={n: t for n, t in tensors.items() if n not in names},
        extra={n: value for n, value in state.items() if not isinstance(value, Tensor)},
        progress=progress,
    )


def write_trained(state: TrainedState, file: IO[bytes]) -> dict[str, Any]:
    """Write the tensors to a file; return the rest as JSON, for ``read_trained``."""
    tensors = {**state.params, **state.buffers}
    aliases = alias_table(tensors)  # tied weights are sent once
    kept = {name: tensor for name, tensor in tensors.items() if name not in aliases}
    file.seek(0)
    for tensor in kept.values():
        file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
    file.flush()
    return {
        "tensors": [
            [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
            for name, tensor in kept.items()
        ],
        "params": {name: aliases.get(name, name) for name in state.params},
        "buffers": {name: aliases.get(name, name) for name in state.buffers},
        "extra": encode(dict(state.extra), path="extra state"),
        "progress": asdict(state.progress),
    }


def read_trained(document: Mapping[str, Any], file: IO[bytes]) -> TrainedState:
    """Read what ``write_trained`` has written; the tensors own their memory."""
    tensors: dict[str, Tensor] = {}
    file.seek(0)
    for name, dtype_name, shape in document["tensors"]:
        tensors[name] = torch.empty(shape, dtype=getattr(torch, dtype_name))
        if tensors[name].numel():
            file.readinto(tensors[name].view(-1).view(torch.uint8).numpy())  # type: ignore[attr-defined]
    return TrainedState(
        params={name: tensors[kept] for name, kept in document["params"].items()},
        buffers={name: tensors[kept] for name, kept in document["buffers"].items()},
        extra=decode(document["extra"]),
        progress=Progress(**document["progress"]),
    )
