"""Averages a model's buffers (such as BatchNorm's running statistics) over ranks, by weight."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from evener.comm.base import Communicator
from evener.devices import float64_device

_LATE_GAIN = 0.5
"""How much of an average that lands late is taken over by float buffers written since.

Running statistics forget: K updates with momentum m leave (1 - m)^K of what a buffer was at the
snapshot. So a difference from the average that was true then is mostly gone by itself when the
average lands, and adding all of it overshoots. A rank's deviation d goes from window to window as
d -> (1 - c - gain) d, with c = 1 - (1 - m)^K between 0 (sums, and short windows) and 1 (long ones):
with a gain of 1 it swings undamped where c is near 1; with 1/2 it is at least halved in every case.
"""


class BufferAverager:
    """Keeps a model's buffers equal on all ranks.

    Each rank's buffers drift inside a window, because its layers see other samples. After a window
    every buffer becomes ``consensus + Σ weight · difference / Σ weight``. Differences are averaged,
    not values, so that a buffer which nobody changed keeps its bits. Integer buffers (counters
    such as ``num_batches_tracked``) add their differences instead: a counter then reads what one
    process would have counted. Complex and empty buffers are left alone.

    Attributes:
        names: Of the buffers, in the order of the model; those that the model had at the start.
        is_empty: Whether there are none, so that no window has to look at them.
        agreed: What all ranks have agreed on, in the order of ``names``: equal on all of them.
    """

    def __init__(self, model: nn.Module, comm: Communicator) -> None:
        self.comm = comm
        places: dict[int, tuple[str, nn.Module, str]] = {}
        for prefix, module in model.named_modules():
            for key, buffer in module.named_buffers(recurse=False):
                if buffer.numel() and not buffer.is_complex():
                    name = f"{prefix}.{key}" if prefix else key
                    places.setdefault(id(buffer), (name, module, key))
        self.names = tuple(name for name, _, _ in places.values())
        self.is_empty = not places
        # By place, not by object: a module may assign a new tensor instead of writing in place.
        self._places = [(module, key) for _, module, key in places.values()]
        buffers = self._buffers
        # Where differences are summed, in float64.
        self._device = float64_device(buffers[0].device) if buffers else torch.device("cpu")
        self.agreed = [b.detach().clone() for b in buffers]
        #: The buffers and their versions at the last agreement; a version of -1 is never found.
        self._marks = [_mark(b) for b in buffers]
        self._snapshots: list[torch.Tensor] = []
        # As they were at the last ``keep``; what was never written is in the consensus.
        self._kept: dict[int, torch.Tensor] = {}
        self._kept_marks = [_mark(b) for b in buffers]

    @property
    def _buffers(self) -> list[torch.Tensor]:
        return [getattr(module, key) for module, key in self._places]

    def committed(self) -> Sequence[torch.Tensor]:
        """Return the same as the model holds it, where nothing has written to it since."""
        return self.agreed if self.changed() else self._buffers

    def changed(self) -> bool:
        """Return whether a buffer was written on this rank since the last agreement."""
        return any(map(_is_written, self._buffers, self._marks))

    @torch.no_grad()
    def keep(self) -> None:
        """Remember the buffers as they are, for ``rewind``; copy only what has been written."""
        written = self._written()
        for number, buffer in written:
            if number not in self._kept:
                self._kept[number] = torch.empty_like(buffer)
            self._kept_marks[number] = _mark(buffer)
        _copy([self._kept[number] for number, _ in written], [buffer for _, buffer in written])

    @torch.no_grad()
    def rewind(self) -> None:
        """Put the buffers back as they were at the last ``keep``: a batch is left out."""
        written = self._written()
        kept = [self._kept.get(number, self.agreed[number]) for number, _ in written]
        _copy([buffer for _, buffer in written], kept)
        for number, buffer in written:
            self._kept_marks[number] = _mark(buffer)

    def _written(self) -> list[tuple[int, torch.Tensor]]:
        """Return the buffers of modules that have written to one since the last mark.

        Those of a module go together: batch normalisation raises the version of its counter, but
        not of its statistics.
        """
        buffers = self._buffers
        marked = zip(self._places, buffers, self._kept_marks, strict=True)
        modules = {id(module) for (module, _), b, mark in marked if _is_written(b, mark)}
        return [
            (number, buffers[number])
            for number, (module, _) in enumerate(self._places)
            if id(module) in modules
        ]

    def use(self, comm: Communicator) -> None:
        """Go on with other ranks."""
        self.comm = comm

    @torch.no_grad()
    def average(
        self,
        weight: float,
        total_weight: float,
        *,
        what: str,
        unless: torch.Tensor | None = None,
    ) -> None:
        """Agree on the buffers; all ranks call it together.

        Args:
            weight: Weight of this rank's part of the window.
            total_weight: The same, summed over ranks; larger than 0.
            what: Names the exchange in errors.
            unless: Shape ``()``: where it is not 0, the buffers become those of the last agreement.
        """
        if not self.is_empty:
            self._snapshots = self._buffers  # no copies: nothing is written before the last step
            packed = self._differences()
            self.exchange(packed, self.comm, weight, total_weight, what=what)
            if unless is not None:
                packed.masked_fill_(unless.bool().to(packed.device), 0.0)
            self.agree(packed, moved_on=False)

    # ── in three steps, so that a rank can continue meanwhile ────────────────────────────────────

    @torch.no_grad()
    def snapshot(self) -> torch.Tensor:
        """Return this rank's present differences from the consensus, as one float64 tensor."""
        self._snapshots = [b.detach().clone() for b in self._buffers]
        return self._differences()

    def _differences(self) -> torch.Tensor:
        parts = [
            self._widened((b ^ agreed) if b.dtype == torch.bool else (b - agreed)).flatten()
            for b, agreed in zip(self._snapshots, self.agreed, strict=True)
        ]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)

    @torch.no_grad()
    def exchange(
        self,
        packed: torch.Tensor,
        comm: Communicator,
        weight: float,
        total_weight: float,
        *,
        what: str,
    ) -> None:
        """Sum snapshots over ranks, by weight (counters by 1); all ranks call it together.

        Args:
            packed: From ``snapshot``; receives the sum.
            comm: The ranks.
            weight: Weight of this rank's part of the window; 0 leaves its float buffers out.
            total_weight: The same, summed over ranks; larger than 0.
            what: Names the exchange in errors.
        """
        for agreed, part in zip(self.agreed, self._parts(packed), strict=True):
            if agreed.is_floating_point():
                if weight == 0:
                    part.zero_()  # what counts for nothing may even be NaN
                else:
                    part.mul_(weight / total_weight)
        if packed.numel() and comm.world_size > 1:
            comm.all_reduce(packed, what=f"buffers of {what}")

    @torch.no_grad()
    def agree(self, packed: torch.Tensor, *, moved_on: bool) -> None:
        """Apply an exchanged sum to the consensus, and bring the buffers up to date.

        Args:
            packed: From ``exchange``.
            moved_on: Whether this rank has gone on since the snapshot. What it has changed stays,
                and float buffers come half of the way to the average.
        """
        for buffer, agreed, kept, part in zip(
            self._buffers, self.agreed, self._snapshots, self._parts(packed), strict=True
        ):
            self._move(agreed, part.view(agreed.shape))
            if not moved_on:
                buffer.copy_(agreed)
            elif agreed.dtype == torch.bool:
                buffer.copy_(torch.where(buffer == kept, agreed, buffer))
            elif agreed.is_floating_point():
                buffer.sub_((kept - agreed) * _LATE_GAIN)
            else:
                buffer.sub_(kept - agreed)
        self._marks = [(b, -1) if moved_on else _mark(b) for b in self._buffers]

    def _parts(self, packed: torch.Tensor) -> Sequence[torch.Tensor]:
        return torch.split(packed, [agreed.numel() for agreed in self.agreed])

    def _widened(self, difference: torch.Tensor) -> torch.Tensor:
        """In float64, where that exists."""
        return difference.to(self._device).to(torch.float64)

    def _move(self, agreed: torch.Tensor, part: torch.Tensor) -> None:
        """Add an exchanged sum to a buffer's consensus; keep its bits where that is zero."""
        if agreed.dtype == torch.bool:
            agreed.logical_xor_((part > 0).to(agreed.device))
        elif agreed.is_floating_point():
            wide = self._widened(agreed)
            moved = torch.where(part == 0, wide, wide + part).to(agreed.dtype)
            agreed.copy_(moved)
        else:
            agreed.add_(part.round().to(agreed.dtype).to(agreed.device))

    @torch.no_grad()
    def reset(self) -> None:
        """Take the buffers as they are for the new consensus (after a broadcast or a load)."""
        _copy(self.agreed, self._buffers)
        self._marks = [_mark(b) for b in self._buffers]

    @torch.no_grad()
    def restore(self) -> None:
        """Put the last consensus back, as after timing runs or a discarded window."""
        _copy(self._buffers, self.agreed)
        self._marks = [_mark(b) for b in self._buffers]

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Show the last consensus in the model for the length of the block."""
        if not self.changed():
            yield
            return
        working = [b.detach().clone() for b in self._buffers]
        self.restore()
        try:
            yield
        finally:
            with torch.no_grad():
                _copy(self._buffers, working)
            self._marks = [(b, -1) for b in self._buffers]


def _mark(buffer: torch.Tensor) -> tuple[torch.Tensor, int]:
    return buffer, buffer._version


def _is_written(buffer: torch.Tensor, mark: tuple[torch.Tensor, int]) -> bool:
    return buffer is not mark[0] or buffer._version != mark[1]


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy tensor by tensor, those of one dtype in one call: a step should not wait for many."""
    for dtype in {target.dtype for target in targets}:
        pairs = [(t, s) for t, s in zip(targets, sources, strict=True) if t.dtype == dtype]
        torch._foreach_copy_([t for t, _ in pairs], [s for _, s in pairs])
