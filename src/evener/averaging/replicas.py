"""Averages and copies tensors over replicas of a model: several in a process, in many processes."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from evener.comm.base import Communicator


@torch.no_grad()
def copy_from_first(
    comm: Communicator, replicas: Sequence[Mapping[str, Tensor]], *, what: str
) -> None:
    """Give every replica the tensors of the first one, bit for bit; all processes call it together.

    Args:
        comm: The processes.
        replicas: Tensors by name, a mapping for each replica of this process.
        what: Names the exchange in errors.
    """
    first, *others = replicas
    by_kind: dict[tuple[torch.device, torch.dtype], list[str]] = {}
    for name in sorted(first):
        by_kind.setdefault((first[name].device, first[name].dtype), []).append(name)
    for names in by_kind.values() if comm.world_size > 1 else ():
        own = [first[name].detach() for name in names]
        packed = torch.cat([tensor.reshape(-1) for tensor in own])
        comm.broadcast(packed, 0, what=f"{what}: {names[0]}")
        parts = torch.split(packed, [tensor.numel() for tensor in own])
        for tensor, part in zip(own, parts, strict=True):
            tensor.copy_(part.view(tensor.shape))
    for other in others:
        for name, tensor in first.items():
            other[name].detach().copy_(tensor)


@torch.no_grad()
def sum_gradients(
    comm: Communicator,
    device: torch.device,
    replicas: Sequence[Mapping[str, Parameter]],
    factors: Sequence[float],
    *,
    what: str,
) -> tuple[dict[str, Tensor | None], bool]:
    """Form Σ factor · gradient over all replicas; all processes call it together.

    Replicas of one process are added up first, then the processes exchange one buffer for each
    dtype. Sums are formed in float32 at least, so half precision loses nothing on the way.

    Args:
        comm: The processes.
        device: Where this process adds up and exchanges.
        replicas: Trainable parameters by name, a mapping for each replica of this process. Their
            gradients stay as they are. Names, shapes and dtypes are the same everywhere.
        factors: One for each replica; with 0 its gradients are ignored.
        what: Names the exchange in errors.

    Returns:
        The sums by name, ``None`` if no replica has a gradient; and whether all of them are
        finite, with the same answer on every process.
    """
    by_dtype: dict[torch.dtype, list[str]] = {}
    for name in sorted(replicas[0]):
        dtype = torch.promote_types(replicas[0][name].dtype, torch.float32)
        by_dtype.setdefault(dtype, []).append(name)
    sums: dict[str, Tensor | None] = {}
    are_finite = True
    for dtype, names in by_dtype.items():
        sizes = [replicas[0][name].numel() for name in names]
        flat = torch.zeros(sum(sizes) + len(names), dtype=dtype, device=device)
        *parts, counts = torch.split(flat, [*sizes, len(names)])
        found = [0.0] * len(names)
        for replica, factor in zip(replicas, factors, strict=True):
            for number, name in enumerate(names):
                gradient = replica[name].grad
                if factor and gradient is not None:
                    part = parts[number].view(gradient.shape)
                    part.add_(gradient.to(device, dtype), alpha=factor)
                    found[number] += 1
        counts.copy_(torch.tensor(found))
        comm.all_reduce(flat, what=what)
        are_finite = are_finite and bool(flat.isfinite().all())
        for name, part, count in zip(names, parts, counts.tolist(), strict=True):
            sums[name] = part.view(replicas[0][name].shape) if count else None
    return sums, are_finite


@torch.no_grad()
def hand_out(
    replicas: Sequence[Mapping[str, Parameter]], sums: Mapping[str, Tensor | None]
) -> None:
    """Write sums to ``.grad`` of every replica; ``None`` if there is none."""
    for replica in replicas:
        for name, total in sums.items():
            parameter = replica[name]
            if total is None:
                parameter.grad = None
                continue
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.copy_(total)
