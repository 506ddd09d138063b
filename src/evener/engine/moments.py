"""The weighted mean of optimizer states that ranks have moved apart: what a checkpoint holds."""

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from evener.checkpoint import flatten_optimizer
from evener.comm.base import Communicator

#: Tensors by name, and the document that puts them in their places.
SavedState = tuple[dict[str, Tensor], dict[str, Any]]


def own_state(optimizer: Optimizer) -> SavedState:
    """An optimizer's state as tensors and a document."""
    tensors, document = flatten_optimizer(optimizer.state_dict())
    return dict(tensors), dict(document)


@torch.no_grad()
def mean_states(
    comm: Communicator, optimizers: Sequence[Optimizer], weight: float
) -> list[SavedState]:
    """Averages optimizer states over ranks; all ranks call it together.

    Floating-point tensors become their mean by weight, over the ranks that have them; single
    numbers (step counts) are rounded. Everything else is rank 0's.

    Args:
        comm: The ranks.
        optimizers: This rank's.
        weight: What this rank's work counts, such as its weight in the last window.

    Returns:
        A state for each optimizer, complete on every rank that has made steps of its own.
    """
    own = [own_state(optimizer) for optimizer in optimizers]
    if comm.world_size == 1:
        return own
    return [_mean_state(comm, tensors, document, weight) for tensors, document in own]


def _mean_state(
    comm: Communicator, own: dict[str, Tensor], document: dict[str, Any], weight: float
) -> SavedState:
    index = {
        name: [list(t.shape), str(t.dtype)] for name, t in own.items() if t.is_floating_point()
    }
    note = json.dumps({"tensors": index, "weight": weight, "document": document}).encode()
    notes = [json.loads(n) for n in comm.all_gather_bytes(note, what="optimizer states")]
    # A rank that has made no step yet has no state; who has one speaks for it.
    richest = max(notes, key=lambda n: len(n["tensors"]))
    weights = [n["weight"] for n in notes]
    if not any(weights):
        weights = [1.0] * len(notes)
    mean: dict[str, Tensor] = {}
    for name, (shape, dtype) in richest["tensors"].items():
        holders = [r for r, n in enumerate(notes) if name in n["tensors"]]
        total = 0.0
        for rank in holders:
            total += weights[rank]
        device = own[name].device if name in own else _device(own)
        part = torch.zeros(shape, dtype=getattr(torch, dtype.removeprefix("torch.")), device=device)
        part = part.contiguous()
        if comm.rank in holders:
            part.copy_(own[name])
            part.mul_(weights[comm.rank] / total if total else 1.0 / len(holders))
        comm.all_reduce(part, what=f"optimizer state {name}")
        mean[name] = part.round() if not shape else part
    rest = {name: tensor for name, tensor in own.items() if name not in mean}
    return {**rest, **mean}, document if len(own) >= len(mean) else richest["document"]


def _device(own: dict[str, Tensor]) -> torch.device:
    return next(iter(own.values())).device if own else torch.device("cpu")
