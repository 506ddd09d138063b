"""Averages a model's buffers (such as BatchNorm's running statistics) over ranks, by weight."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

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


_ByNumber = Sequence[Tensor] | Mapping[int, Tensor]


class _Kind(NamedTuple):
    """Buffers of one dtype and device, whose copies lie side by side: few calls move them all.

    Attributes:
        numbers: Of the buffers.
        start: First element in what is exchanged.
        stop: Last-plus-one element there.
        agreed: ``(stop - start,)``; what all ranks have agreed on.
        agreed_parts: The same, buffer by buffer.
        now: ``(stop - start,)``; the buffers as they were when differences were taken.
        now_parts: The same, buffer by buffer.
    """

    numbers: tuple[int, ...]
    start: int
    stop: int
    agreed: Tensor
    agreed_parts: list[Tensor]
    now: Tensor
    now_parts: list[Tensor]


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
        self._kinds = _lay_out(buffers)
        self._num_floats = max(
            (k.stop for k in self._kinds if k.agreed.is_floating_point()), default=0
        )
        size = sum(buffer.numel() for buffer in buffers)
        self._packed = comm.allocate(size, torch.float64, self._device)
        self.agreed: list[Tensor] = list(buffers)
        for kind in self._kinds:
            for number, part in zip(kind.numbers, kind.agreed_parts, strict=True):
                self.agreed[number] = part
        #: The buffers and their versions at the last agreement; a version of -1 is never found.
        self._marks = [_mark(b) for b in buffers]
        # As they were at the last ``keep``; what was never written is in the consensus.
        self._kept: dict[int, Tensor] = {}
        self._kept_marks = [_mark(b) for b in buffers]
        with torch.no_grad():
            self._copy(self.agreed, buffers)

    @property
    def _buffers(self) -> list[Tensor]:
        return [module._buffers[key] for module, key in self._places]  # type: ignore[misc]  # never None

    def committed(self) -> Sequence[Tensor]:
        """Return the same as the model holds it, where nothing has written to it since."""
        return self.agreed if self.changed() else self._buffers

    def changed(self) -> bool:
        """Return whether a buffer was written on this rank since the last agreement."""
        return any(map(_is_written, self._buffers, self._marks))

    @torch.no_grad()
    def keep(self) -> None:
        """Remember the buffers as they are, for ``rewind``; copy only what has been written."""
        buffers = self._buffers
        for number in (written := self._written(buffers)):
            if number not in self._kept:
                self._kept[number] = torch.empty_like(buffers[number])
            self._kept_marks[number] = _mark(buffers[number])
        self._copy(self._kept, buffers, written)

    @torch.no_grad()
    def rewind(self) -> None:
        """Restore the buffers of the last ``keep``, because a batch is skipped."""
        buffers = self._buffers
        written = self._written(buffers)
        kept = {number: self._kept.get(number, self.agreed[number]) for number in written}
        self._copy(buffers, kept, written)
        for number in written:
            self._kept_marks[number] = _mark(buffers[number])

    def _copy(self, targets: _ByNumber, sources: _ByNumber, chosen: set[int] | None = None) -> None:
        """Copy buffers, or those chosen, in one call for each kind."""
        for kind in self._kinds:
            numbers = [n for n in kind.numbers if chosen is None or n in chosen]
            if numbers:
                torch._foreach_copy_([targets[n] for n in numbers], [sources[n] for n in numbers])

    def _written(self, buffers: Sequence[Tensor]) -> set[int]:
        """Return the numbers of buffers whose modules have written to one since the last mark.

        Those of a module go together: batch normalisation raises the version of its counter, but
        not of its statistics.
        """
        marked = zip(self._places, buffers, self._kept_marks, strict=True)
        modules = {id(module) for (module, _), b, mark in marked if _is_written(b, mark)}
        return {n for n, (module, _) in enumerate(self._places) if id(module) in modules}

    def use(self, comm: Communicator) -> None:
        """Continue with other ranks."""
        self.comm = comm

    def move(self, comm: Communicator) -> None:
        """Continue with other ranks, and move exchanged tensors into their memory."""
        self.use(comm)
        size, dtype = self._packed.numel(), self._packed.dtype
        self._packed = comm.allocate(size, dtype, self._packed.device)

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
            packed = self._packed
            self._take_differences(packed)
            self.exchange(packed, self.comm, weight, total_weight, what=what)
            if unless is not None:
                packed.masked_fill_(unless.bool().to(packed.device), 0.0)
            self.agree(packed, moved_on=False)

    # ── in three steps, so that a rank can continue meanwhile ────────────────────────────────────

    @torch.no_grad()
    def snapshot(self) -> Tensor:
        """Return this rank's present differences from the consensus, as one float64 tensor."""
        packed = torch.empty_like(self._packed)
        self._take_differences(packed)
        return packed

    def _take_differences(self, packed: Tensor) -> None:
        buffers = self._buffers
        for kind in self._kinds:
            torch._foreach_copy_(kind.now_parts, [buffers[n] for n in kind.numbers])
            is_bool = kind.agreed.dtype == torch.bool
            difference = kind.now ^ kind.agreed if is_bool else kind.now - kind.agreed
            # In two steps: a device without float64 cannot convert on its way.
            packed[kind.start : kind.stop].copy_(difference.to(packed.device))

    @torch.no_grad()
    def exchange(
        self,
        packed: Tensor,
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
        floats = packed[: self._num_floats]
        if weight == 0:
            floats.zero_()  # what counts for nothing may even be NaN
        else:
            floats.mul_(weight / total_weight)
        if packed.numel() and comm.world_size > 1:
            comm.all_reduce(packed, what=f"buffers of {what}")

    @torch.no_grad()
    def agree(self, packed: Tensor, *, moved_on: bool) -> None:
        """Apply an exchanged sum to the consensus, and bring the buffers up to date.

        Args:
            packed: From ``exchange``.
            moved_on: Whether this rank has gone on since the snapshot. What it has changed stays,
                and float buffers come half of the way to the average.
        """
        for kind in self._kinds:
            self._move(kind.agreed, packed[kind.start : kind.stop])
        buffers = self._buffers
        for kind in self._kinds:
            own = [buffers[n] for n in kind.numbers]
            if not moved_on:
                torch._foreach_copy_(own, kind.agreed_parts)
            elif kind.agreed.dtype == torch.bool:
                for buffer, kept, agreed in zip(
                    own, kind.now_parts, kind.agreed_parts, strict=True
                ):
                    buffer.copy_(torch.where(buffer == kept, agreed, buffer))
            else:
                kind.now.sub_(kind.agreed)
                if kind.agreed.is_floating_point():
                    kind.now.mul_(_LATE_GAIN)
                torch._foreach_sub_(own, kind.now_parts)
        self._marks = [(b, -1) if moved_on else _mark(b) for b in self._buffers]

    def _move(self, agreed: Tensor, part: Tensor) -> None:
        """Add an exchanged sum to the consensus; keep its bits where that is zero."""
        if agreed.dtype == torch.bool:
            agreed.logical_xor_((part > 0).to(agreed.device))
        elif agreed.is_floating_point():
            wide = agreed.to(part.device).to(torch.float64)
            agreed.copy_(torch.where(part == 0, wide, wide + part).to(agreed.dtype))
        else:
            agreed.add_(part.round().to(agreed.dtype).to(agreed.device))

    @torch.no_grad()
    def reset(self) -> None:
        """Take the present buffers as the new consensus (after a broadcast or a load)."""
        self._copy(self.agreed, self._buffers)
        self._marks = [_mark(b) for b in self._buffers]

    @torch.no_grad()
    def restore(self) -> None:
        """Put the last consensus back, as after timing runs or a discarded window."""
        self._copy(self._buffers, self.agreed)
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
                self._copy(self._buffers, working)
            self._marks = [(b, -1) for b in self._buffers]


def _mark(buffer: Tensor) -> tuple[Tensor, int]:
    return buffer, buffer._version


def _is_written(buffer: Tensor, mark: tuple[Tensor, int]) -> bool:
    return buffer is not mark[0] or buffer._version != mark[1]


def _lay_out(buffers: Sequence[Tensor]) -> list[_Kind]:
    """Give the copies of buffers their places; floating-point ones come first."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for number, buffer in enumerate(buffers):
        by_kind.setdefault((buffer.device, buffer.dtype), []).append(number)
    kinds, start = [], 0
    for (device, dtype), numbers in sorted(
        by_kind.items(), key=lambda item: not item[0][1].is_floating_point
    ):
        sizes = [buffers[number].numel() for number in numbers]
        flats = [torch.zeros(sum(sizes), dtype=dtype, device=device) for _ in range(2)]
        (agreed, agreed_parts), (now, now_parts) = (
            (
                flat,
                [
                    part.view(buffers[number].shape)
                    for part, number in zip(torch.split(flat, sizes), numbers, strict=True)
                ],
            )
            for flat in flats
        )
        stop = start + sum(sizes)
        kinds.append(_Kind(tuple(numbers), start, stop, agreed, agreed_parts, now, now_parts))
        start = stop
    return kinds
