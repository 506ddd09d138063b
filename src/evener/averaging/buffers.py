"""Averages a model's buffers (such as BatchNorm's running statistics) over ranks, by weight."""

from collections.abc import Iterator, Sequence
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


class _Kind(NamedTuple):
    """Buffers of one dtype and device: few calls move them all.

    Attributes:
        numbers: Of the buffers.
        agreed: ``(n,)``; what all ranks have agreed on, side by side.
        parts: The same, buffer by buffer.
    """

    numbers: Sequence[int]
    agreed: Tensor
    parts: list[Tensor]


class BufferAverager:
    """Keeps a model's buffers equal on all ranks.

    Each rank's buffers drift inside a window, because its layers see other samples. After a window
    every buffer becomes ``consensus + Σ weight · difference / Σ weight``. Differences are averaged,
    not values, so that a buffer which no rank changed keeps its bits. Integer buffers (counters
    such as ``num_batches_tracked``) add their differences instead: a counter then reads what one
    process would have counted. Complex and empty buffers are left alone.

    An average has three steps, so that a rank can continue meanwhile: ``snapshot``, ``exchange``,
    ``agree``.

    Attributes:
        names: Of the buffers, in the order of the model; those that the model had at the start.
        is_empty: Whether there are none, so that no window has to look at them.
        agreed: What all ranks have agreed on, in the order of ``names``: equal on all of them.
    """

    def __init__(self, model: nn.Module, comm: Communicator) -> None:
        self._comm = comm
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
        by_kind: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for number, buffer in enumerate(buffers):
            by_kind.setdefault((buffer.device, buffer.dtype), []).append(number)
        self._kinds: list[_Kind] = []
        self._num_floats = 0
        parts: dict[int, Tensor] = {}
        for numbers in sorted(
            by_kind.values(), key=lambda numbers: not buffers[numbers[0]].is_floating_point()
        ):
            own = [buffers[number] for number in numbers]
            flat = _flat(own, own[0])
            kind = _Kind(numbers, flat, _cut(flat, own))
            self._kinds.append(kind)  # floating-point ones come first
            self._num_floats += flat.numel() * flat.is_floating_point()
            parts |= zip(numbers, kind.parts, strict=True)
        self.agreed = [parts[number] for number in range(len(buffers))]
        #: The buffers and their versions at the last agreement; a version of -1 is never found.
        self._marks = _marks(buffers)
        #: As they were at the last ``keep``; empty if they were in the consensus.
        self._kept: list[Tensor] = []
        self._kept_marks = _marks(buffers)
        #: As they were at the last ``snapshot``, by kind.
        self._taken: list[Tensor] = []

    @property
    def _buffers(self) -> list[Tensor]:
        return [module._buffers[key] for module, key in self._places]  # type: ignore[misc]  # never None

    def use(self, comm: Communicator) -> None:
        """Continue with other ranks."""
        self._comm = comm

    # ── one rank's buffers ───────────────────────────────────────────────────────────────────────

    def committed(self) -> Sequence[Tensor]:
        """Return the same as the model holds it, where nothing has written to it since."""
        return self.agreed if self.changed() else self._buffers

    def changed(self) -> bool:
        """Return whether a buffer was written on this rank since the last agreement."""
        return _any_written(self._buffers, self._marks)

    @torch.no_grad()
    def keep(self) -> None:
        """Remember the buffers as they are, for ``rewind``; copy them only if one was written.

        All of them: batch normalisation raises the version of its counter, but not of its
        statistics.
        """
        if _any_written(self._buffers, self._kept_marks):
            self._kept = self._kept or [torch.empty_like(buffer) for buffer in self._buffers]
            self._copy(self._kept, self._buffers)
            self._kept_marks = _marks(self._buffers)

    @torch.no_grad()
    def rewind(self) -> None:
        """Restore the buffers of the last ``keep``, because a batch is skipped."""
        if _any_written(self._buffers, self._kept_marks):
            self._copy(self._buffers, self._kept or self.agreed)
            self._kept_marks = _marks(self._buffers)

    def _copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Copy buffers, in one call for each kind."""
        for kind in self._kinds:
            own, others = ([tensors[n] for n in kind.numbers] for tensors in (targets, sources))
            torch._foreach_copy_(own, others)

    @torch.no_grad()
    def reset(self) -> None:
        """Take the present buffers as the new consensus (after a broadcast or a load)."""
        self._copy(self.agreed, self._buffers)
        self._marks = _marks(self._buffers)

    @torch.no_grad()
    def restore(self) -> None:
        """Put the last consensus back, as after a discarded window."""
        self._copy(self._buffers, self.agreed)
        self._marks = _marks(self._buffers)

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Show the last consensus in the model for the length of the block."""
        working = [b.detach().clone() for b in self._buffers] if self.changed() else None
        if working is not None:
            self.restore()
        try:
            yield
        finally:
            if working is not None:
                with torch.no_grad():
                    self._copy(self._buffers, working)
                self._marks = _marks(self._buffers, are_written=True)

    # ── averages ─────────────────────────────────────────────────────────────────────────────────

    @torch.no_grad()
    def average(self, weight: float, total_weight: float, *, what: str) -> None:
        """Agree on the buffers; all ranks call it together.

        Args:
            weight: Weight of this rank's part of the window.
            total_weight: The same, summed over ranks; larger than 0.
            what: Names the exchange in errors.
        """
        if not self.is_empty:
            packed = self.snapshot()
            self.exchange(packed, self._comm, weight, total_weight, what=what)
            self.agree(packed, moved_on=False)

    @torch.no_grad()
    def snapshot(self) -> Tensor:
        """Return this rank's present differences from the consensus, as one float64 tensor."""
        buffers = self._buffers
        self._taken = [_flat([buffers[n] for n in k.numbers], k.agreed) for k in self._kinds]
        differences = []
        for kind, taken in zip(self._kinds, self._taken, strict=True):
            is_bool = taken.dtype == torch.bool
            difference = taken ^ kind.agreed if is_bool else taken - kind.agreed
            # In two steps: a device without float64 cannot convert on its way.
            wide = difference.to(float64_device(buffers[0].device)).to(torch.float64)
            differences.append(wide)
        return torch.cat(differences) if differences else torch.empty(0, dtype=torch.float64)

    @torch.no_grad()
    def exchange(
        self, packed: Tensor, comm: Communicator, weight: float, total_weight: float, *, what: str
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
            moved_on: Whether this rank has made steps since the snapshot. Its changes stay, and
                float buffers come half of the way to the average.
        """
        buffers = self._buffers
        sums = torch.split(packed, [kind.agreed.numel() for kind in self._kinds])
        for kind, taken, total in zip(self._kinds, self._taken, sums, strict=True):
            _move(kind.agreed, total)
            own = [buffers[n] for n in kind.numbers]
            if moved_on:
                late = _come_closer(_flat(own, taken), taken, kind.agreed)
                torch._foreach_copy_(own, _cut(late, own))
            else:
                torch._foreach_copy_(own, kind.parts)
        self._marks = _marks(buffers, are_written=moved_on)


def _marks(buffers: Sequence[Tensor], *, are_written: bool = False) -> list[tuple[Tensor, int]]:
    return [(buffer, -1 if are_written else buffer._version) for buffer in buffers]


def _any_written(buffers: Sequence[Tensor], marks: Sequence[tuple[Tensor, int]]) -> bool:
    marked = zip(buffers, marks, strict=True)
    return any(now is not then or now._version != version for now, (then, version) in marked)


def _flat(buffers: Sequence[Tensor], like: Tensor) -> Tensor:
    """Return a copy of buffers side by side, of the dtype and on the device of ``like``."""
    return torch.cat([buffer.detach().to(like).reshape(-1) for buffer in buffers])


def _cut(flat: Tensor, buffers: Sequence[Tensor]) -> list[Tensor]:
    """Return views of what ``_flat`` has returned, in the shapes of the buffers."""
    parts = torch.split(flat, [buffer.numel() for buffer in buffers])
    return [part.view(buffer.shape) for part, buffer in zip(parts, buffers, strict=True)]


def _move(agreed: Tensor, total: Tensor) -> None:
    """Add an exchanged sum to the consensus; keep its bits where that is zero."""
    if agreed.dtype == torch.bool:
        agreed.logical_xor_((total > 0).to(agreed.device))
    elif agreed.is_floating_point():
        wide = agreed.to(total.device).to(torch.float64)
        agreed.copy_(torch.where(total == 0, wide, wide + total).to(agreed.dtype))
    else:
        agreed.add_(total.round().to(agreed.dtype).to(agreed.device))


def _come_closer(present: Tensor, taken: Tensor, agreed: Tensor) -> Tensor:
    """Return buffers that were written since they were ``taken``, moved on with the consensus."""
    if agreed.dtype == torch.bool:
        return torch.where(present == taken, agreed, present)
    gain = _LATE_GAIN if agreed.is_floating_point() else 1
    return present - (taken - agreed) * gain
