"""What a managed run leaves: the model's parameters and buffers, on the CPU."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from evener.checkpoint import copy_to_cpu
from evener.checkpoint.codec import decode, encode
from evener.engine.results import Progress

# Of each tensor in a payload, so that it can be read in place.
_ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedState:
    """A trained model's state.

    Attributes:
        params: Parameters by name, on the CPU, in the dtypes of the model.
        buffers: Persistent buffers by name, on the CPU.
        extra: What modules keep beside them (``get_extra_state``), by name.
        progress: What the team had applied.
    """

    params: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    extra: Mapping[str, Any]
    progress: Progress

    def state_dict(self) -> dict[str, Any]:
        """All of it, for ``model.load_state_dict`` of a fresh model."""
        return {**self.params, **self.buffers, **self.extra}


def capture_trained(model: nn.Module, progress: Progress) -> TrainedState:
    """Copies a model's state to CPU memory of its own.

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


def pack_trained(state: TrainedState) -> tuple[dict[str, Any], list[memoryview]]:
    """The state as JSON and bytes, for ``Channel.send``."""
    parts: list[memoryview] = []
    places: dict[int, int] = {}
    index = []
    offset = 0
    tensors = {**state.params, **state.buffers}
    for name, tensor in tensors.items():
        # Tied weights are one tensor under several names, and travel once.
        if id(tensor) not in places:
            places[id(tensor)] = offset
            raw = memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data)
            padding = -raw.nbytes % _ALIGNMENT_BYTES
            parts += [raw, memoryview(bytes(padding))]
            offset += raw.nbytes + padding
        dtype = str(tensor.dtype).removeprefix("torch.")
        index.append([name, dtype, list(tensor.shape), places[id(tensor)]])
    document = {
        "tensors": index,
        "params": len(state.params),
        "extra": encode(dict(state.extra), path="extra state"),
        "progress": asdict(state.progress),
    }
    return document, parts


def unpack_trained(document: Mapping[str, Any], payload: bytearray) -> TrainedState:
    """Reads back ``pack_trained``; the tensors own their memory."""
    made: dict[tuple[int, str], Tensor] = {}
    tensors: list[tuple[str, Tensor]] = []
    for name, dtype, shape, offset in document["tensors"]:
        key = offset, f"{dtype}{shape}"  # an empty tensor takes no room of its own
        if key not in made:
            made[key] = _tensor(payload, getattr(torch, dtype), shape, offset)
        tensors.append((name, made[key]))
    count: int = document["params"]
    return TrainedState(
        params=dict(tensors[:count]),
        buffers=dict(tensors[count:]),
        extra=decode(document["extra"]),
        progress=Progress(**document["progress"]),
    )


def _tensor(payload: bytearray, dtype: torch.dtype, shape: Sequence[int], offset: int) -> Tensor:
    count = 1
    for size in shape:
        count *= size
    if not count:
        return torch.empty(list(shape), dtype=dtype)
    flat = torch.frombuffer(payload, dtype=dtype, count=count, offset=offset)
    return flat.view(list(shape)).clone()
