"""Brings a rank that was away up to the team's state, bit for bit."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from evener.checkpoint import flatten_optimizer, unflatten_optimizer
from evener.checkpoint.codec import decode, encode
from evener.comm.base import Communicator
from evener.comm.flat import FlatBuffers
from evener.engine.registry import Registry
from evener.engine.schedule import Schedule


@torch.no_grad()
def transfer_state(
    comm: Communicator,
    model: nn.Module,
    flat: FlatBuffers,
    optimizers: Sequence[Optimizer],
    schedule: Schedule,
    registry: Registry,
    counters: dict[str, Any],
    *,
    receives: bool,
) -> dict[str, Any]:
    """Sends rank 0's state to all ranks; all ranks of ``comm`` call it together.

    Args:
        comm: The ranks.
        model: Its buffers travel; its trainable parameters do with ``flat``.
        flat: The trainable parameters.
        optimizers: Their state travels.
        schedule: Its state travels.
        registry: So do the states of registered objects.
        counters: Further JSON of rank 0; what others pass is ignored.
        receives: Whether this rank takes the state over; the others hold the same bits already.

    Returns:
        Rank 0's ``counters``.
    """
    sends = comm.rank == 0
    tensors: dict[str, Tensor] = {}
    documents = []
    if sends:
        for number, optimizer in enumerate(optimizers):
            parts, document = flatten_optimizer(optimizer.state_dict())
            tensors |= {f"{number}/{name}": tensor for name, tensor in parts.items()}
            documents.append(document)
    states: dict[str, Any] = {}
    if sends:
        states, own = registry.collect()
        tensors |= {f"registered/{name}": tensor for name, tensor in own.items()}
    index = [[name, list(t.shape), str(t.dtype), str(t.device.type)] for name, t in tensors.items()]
    note = {
        "tensors": index,
        "optimizers": documents,
        "schedule": encode(schedule.state_dict(), path="schedule"),
        "registered": states,
        "counters": counters,
    }
    answers = comm.all_gather_bytes(json.dumps(note).encode() if sends else b"", what="state index")
    note = json.loads(answers[0])
    for group in flat.groups:
        comm.broadcast(group.data, 0, what="parameters of a recall")
    for buffer in model.buffers():
        whole = buffer.contiguous()
        comm.broadcast(whole, 0, what="buffers of a recall")
        if receives:
            buffer.copy_(whole)
    device = flat.groups[0].data.device if flat.groups else torch.device("cpu")
    arrived: dict[str, Tensor] = {}
    for name, shape, dtype, kind in note["tensors"]:
        place = device if kind != "cpu" else torch.device("cpu")
        tensor = torch.empty(
            shape, dtype=getattr(torch, dtype.removeprefix("torch.")), device=place
        )
        if sends:
            tensor.copy_(tensors[name])
        comm.broadcast(tensor, 0, what="optimizer state of a recall")
        arrived[name] = tensor
    if receives:
        for number, (optimizer, document) in enumerate(
            zip(optimizers, note["optimizers"], strict=True)
        ):
            optimizer.load_state_dict(unflatten_optimizer(_under(f"{number}/", arrived), document))
        schedule.load_state_dict(decode(note["schedule"]))
        registry.restore(note["registered"], _under("registered/", arrived))
    counters = note["counters"]
    return counters


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
