"""Averages parameters that ranks have moved apart: their differences from the consensus."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from evener.comm.base import Communicator
from evener.comm.flat import FlatBuffers
from evener.comm.layout import FlatGroup


class ParameterAverager:
    """Keeps the consensus of all ranks beside this rank's working copy.

    An average goes through three steps. ``snapshot`` takes this rank's difference from the
    consensus into a scratch buffer; ``exchange`` sums ``weight / Σ weight`` of the differences over
    ranks, and may run in another thread while this rank goes on; ``agree`` applies the sum to the
    consensus and brings the working copy up to date. The working copy then is the consensus plus
    the steps made since the snapshot, so no step is ever lost.

    Differences are averaged, not values, and what is subtracted where nobody has changed anything
    is +0, which leaves every bit as it is. All ranks subtract the same sum from the same consensus,
    so that it stays the same to the bit on all of them, also on unlike devices.

    Args:
        flat: The trainable parameters, the same on every rank when this is made.
    """

    def __init__(self, flat: FlatBuffers) -> None:
        self._flat = flat
        self._consensus: list[torch.Tensor] = []
        self._scratch: list[torch.Tensor] = []
        self._snapshots: list[torch.Tensor] = []
        self.adopt()

    @property
    def consensus(self) -> tuple[torch.Tensor, ...]:
        """What all ranks have agreed on, laid out as ``FlatGroup.data`` of each group."""
        return tuple(self._consensus)

    @torch.no_grad()
    def adopt(self) -> None:
        """Takes in parameters that have become trainable, before their first step."""
        for group in self._flat.groups[len(self._consensus) :]:
            self._consensus.append(group.data.clone())
            self._scratch.append(torch.zeros_like(group.data))
            self._snapshots.append(torch.zeros_like(group.data))

    @torch.no_grad()
    def snapshot(self) -> float:
        """Takes the difference from the consensus as it is now.

        Returns:
            Its 2-norm relative to that of the consensus; not finite when a parameter is not.
        """
        for group, agreed, scratch, kept in self._buffers():
            kept.copy_(group.data)
            torch.sub(agreed, group.data, out=scratch)
        return _ratio(self._scratch, self._consensus)

    @torch.no_grad()
    def exchange(
        self, comm: Communicator, weight: float, total_weight: float, *, what: str
    ) -> None:
        """Sums the snapshots' differences over ranks, by weight; all ranks call it together.

        Args:
            comm: The ranks.
            weight: What this rank's work counts; 0 leaves it out, whatever it holds.
            total_weight: The same, summed over ranks; larger than 0.
            what: Names the exchange in errors.
        """
        for scratch in self._scratch:
            if weight == 0:
                scratch.zero_()
            elif weight != total_weight:
                scratch.mul_(weight / total_weight)
            if comm.world_size > 1:
                comm.all_reduce(scratch, what=f"parameters of {what}")

    @torch.no_grad()
    def agree(self, *, moved_on: bool) -> float:
        """Applies the exchanged sum.

        Args:
            moved_on: Whether this rank has made steps since the snapshot.

        Returns:
            The divergence: the 2-norm of snapshot less average, relative to that of the average.
        """
        for group, agreed, scratch, kept in self._buffers():
            agreed.sub_(scratch)
            kept.sub_(agreed)
            if moved_on:
                group.data.sub_(kept)
            else:
                group.data.copy_(agreed)
        return _ratio(self._snapshots, self._consensus)

    @torch.no_grad()
    def reset(self) -> None:
        """Takes the parameters as they are for the consensus (after a load or a broadcast)."""
        for group, agreed, *_ in self._buffers():
            agreed.copy_(group.data)

    @torch.no_grad()
    def restore(self) -> None:
        """Puts the consensus into the working copy: what this rank has done since is dropped."""
        for group, agreed, *_ in self._buffers():
            group.data.copy_(agreed)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Shows the consensus in the model for the length of the block; do not change it there."""
        with torch.no_grad():
            working = [g.data.clone() for g in self._flat.groups]
        self.restore()
        try:
            yield
        finally:
            with torch.no_grad():
                for group, own in zip(self._flat.groups, working, strict=True):
                    group.data.copy_(own)

    def _buffers(self) -> Iterator[tuple[FlatGroup, torch.Tensor, torch.Tensor, torch.Tensor]]:
        return zip(self._flat.groups, self._consensus, self._scratch, self._snapshots, strict=True)


def _ratio(differences: list[torch.Tensor], wholes: list[torch.Tensor]) -> float:
    size = _norm(wholes)
    return _norm(differences) / size if size else _norm(differences)


def _norm(tensors: list[torch.Tensor]) -> float:
    squares = 0.0
    for tensor in tensors:
        half = tensor.dtype in (torch.float16, torch.bfloat16)
        dtype = torch.float32 if half else tensor.dtype
        squares += float(torch.linalg.vector_norm(tensor, dtype=dtype).item()) ** 2
    return float(squares**0.5)
