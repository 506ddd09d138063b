"""Averages a model's buffers (such as BatchNorm's running statistics) over ranks, by weight."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from evener.comm.base import Communicator


class BufferAverager:
    """Keeps a model's buffers equal on all ranks.

    Each rank's buffers drift inside a window, because its layers see other samples. After a window
    every buffer becomes ``consensus + Σ weight · difference / Σ weight``. Differences are averaged,
    not values, so that a buffer which nobody changed keeps its bits. Integer buffers (counters
    such as ``num_batches_tracked``) add their differences instead: a counter then reads what one
    process would have counted.
    """

    def __init__(self, model: nn.Module, comm: Communicator) -> None:
        self.comm = comm
        places: dict[int, tuple[nn.Module, str]] = {}
        for module in model.modules():
            for key, buffer in module.named_buffers(recurse=False):
                if buffer.numel() and not buffer.is_complex():
                    places.setdefault(id(buffer), (module, key))
        # By place, not by object: a module may assign a new tensor instead of writing in place.
        self._places = list(places.values())
        self._seen = self._buffers
        self._device = self._seen[0].device if self._seen else torch.device("cpu")
        self._consensus = [b.detach().clone() for b in self._seen]
        self._versions = [b._version for b in self._seen]

    @property
    def _buffers(self) -> list[torch.Tensor]:
        return [getattr(module, key) for module, key in self._places]

    def changed(self) -> bool:
        """Whether a buffer was written on this rank since the last agreement."""
        return any(
            b is not seen or b._version != version
            for b, seen, version in zip(self._buffers, self._seen, self._versions, strict=True)
        )

    @torch.no_grad()
    def average(self, weight: float, total_weight: float, *, what: str) -> None:
        """Agrees on the buffers; all ranks call it together.

        Args:
            weight: Weight of this rank's part of the window.
            total_weight: The same, summed over ranks; larger than 0.
            what: Names the exchange in errors.
        """
        if not self._places:
            return
        parts = []
        for buffer, agreed in zip(self._buffers, self._consensus, strict=True):
            if weight == 0 and buffer.is_floating_point():
                buffer = agreed  # what counts for nothing may even be NaN
            difference = (buffer - agreed) if buffer.dtype != torch.bool else buffer ^ agreed
            factor = weight / total_weight if buffer.is_floating_point() else 1.0
            parts.append(difference.to(self._device, torch.float64).mul_(factor).flatten())
        packed = torch.cat(parts)
        if self.comm.world_size > 1:
            self.comm.all_reduce(packed, what=f"buffers of {what}")
        offset = 0
        for buffer, agreed in zip(self._buffers, self._consensus, strict=True):
            part = packed[offset : offset + agreed.numel()].view(agreed.shape).to(agreed.device)
            offset += agreed.numel()
            if agreed.dtype == torch.bool:
                agreed.logical_xor_(part > 0)
            elif agreed.is_floating_point():
                agreed.copy_(torch.where(part == 0, agreed, (agreed.double() + part)))
            else:
                agreed.add_(part.round().to(agreed.dtype))
            buffer.copy_(agreed)
        self._mark()

    @torch.no_grad()
    def reset(self) -> None:
        """Takes the buffers as they are for the new consensus (after a broadcast or a load)."""
        for buffer, agreed in zip(self._buffers, self._consensus, strict=True):
            agreed.copy_(buffer)
        self._mark()

    @torch.no_grad()
    def restore(self) -> None:
        """Puts the last consensus back, as after timing runs or a discarded window."""
        for buffer, agreed in zip(self._buffers, self._consensus, strict=True):
            buffer.copy_(agreed)
        self._mark()

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Shows the last consensus in the model for the length of the block."""
        if not self.changed():
            yield
            return
        working = [b.detach().clone() for b in self._buffers]
        self.restore()
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, own in zip(self._buffers, working, strict=True):
                    buffer.copy_(own)
            self._versions = [-1] * len(self._places)

    def _mark(self) -> None:
        self._seen = self._buffers
        self._versions = [b._version for b in self._seen]
