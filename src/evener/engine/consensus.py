"""What all ranks have agreed on: parameters and buffers after the last average, and its update.

In SYNC that is the model itself; in CADENCE and ASYNC a copy beside each rank's working copy.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import accumulate, islice, zip_longest
from typing import NamedTuple, final

import torch
from torch import Tensor

from evener.averaging.feedback import ErrorFeedback
from evener.averaging.norms import norm_of
from evener.averaging.outer import Averaged, OuterFactory, OuterStep
from evener.averaging.verification import ReplicaCheck
from evener.comm.base import Communicator
from evener.comm.flat_groups import FlatGroup, view_like
from evener.engine.training_state import TrainingState


class Consensus(ABC):
    """The state that is committed, saved, compared, and sent to ranks that were away.

    Args:
        training: Holds the model.
        verify_every: Windows after which ranks compare it; 0 for never.
    """

    def __init__(self, training: TrainingState, verify_every: int) -> None:
        self._training = training
        self._flat, self._buffers = training.flat, training.buffers
        self.check = ReplicaCheck(training.model, self._flat, self._buffers, every=verify_every)

    @abstractmethod
    def shown(self) -> AbstractContextManager[None]:
        """Show the consensus in the model, in a ``with`` block."""

    @abstractmethod
    def tensors(self, *, at_rest: bool) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Return what ranks compare: parameters, as ``FlatGroup.data`` of each group, and buffers.

        Args:
            at_rest: No loop is in a micro-batch. So the model's own buffers are compared if they
                carry no mark of a write: what has changed them without one is found.
        """

    @abstractmethod
    def held(self) -> Iterator[tuple[str, Tensor]]:
        """Yield its tensors, and parameters that no rank trains, with their names."""

    @abstractmethod
    def accept(self) -> None:
        """Make the present model the consensus, as after a load."""

    @abstractmethod
    def reset_model(self) -> None:
        """Reset the model to the consensus, also after tensors of ``held`` have arrived."""

    def add_unfrozen(self) -> None:
        """Take in parameters that have become trainable."""
        self._flat.add_unfrozen()

    def digest(self, *, at_rest: bool = False) -> int:
        """Return a hash of the whole consensus, below 2**53; see ``tensors``."""
        if not at_rest:  # ranks that have not computed since parameters were unfrozen hold less
            self.add_unfrozen()
        return self.check.digest(*self.tensors(at_rest=at_rest))

    def digest_if_due(self, window: int, *, at_rest: bool = False) -> float:
        """Return the digest where ranks compare the state after ``window``; 0 elsewhere."""
        is_due = self.check.every > 0 if at_rest else self.check.is_due(window)
        return float(self.digest(at_rest=at_rest)) if window >= 0 and is_due else 0.0

    def compare(self, comm: Communicator, window: int, *, at_rest: bool) -> None:
        """Find out in what the ranks' states after a window differ; all ranks call it together.

        Raises:
            ReplicasDifferError: On every rank.
        """
        self.check.name_difference(comm, window, *self.tensors(at_rest=at_rest))


@final
class SyncConsensus(Consensus):
    """The consensus of SYNC: parameters are equal at all times.

    Buffers move on with this rank's part of the next window.
    """

    def shown(self) -> AbstractContextManager[None]:
        """Show the agreed buffers."""
        self._flat.attach_data()  # values assigned to .data count
        return self._buffers.consensus()

    def tensors(self, *, at_rest: bool) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Return the model's parameters, and the agreed buffers."""
        self._flat.attach_data()
        return [group.data for group in self._flat.groups], self._buffers.committed()

    def held(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the model's tensors."""
        yield from self._training.held()
        yield from self._training.frozen()

    def accept(self) -> None:
        """Make the present buffers the agreed ones."""
        self._buffers.reset()

    def reset_model(self) -> None:
        """Continue with a model that has arrived."""
        self._flat.zero_()
        self._buffers.reset()


class Drift(NamedTuple):
    """A rank's difference from the consensus at the end of its window.

    Attributes:
        size: 2-norm of the difference of parameters from the consensus, relative to the latter.
        changed: Whether a buffer was written.
        buffers: Their differences, for the exchange; those of parameters are kept in place.
    """

    size: float
    changed: bool
    buffers: Tensor


@final
class Replica(Consensus):
    """The consensus of CADENCE and ASYNC, beside a rank's working copy: the model.

    An average goes through three steps. ``snapshot`` takes this rank's difference from the
    consensus into a scratch buffer; ``exchange`` sums ``weight / Σ weight`` of the differences over
    ranks, and may run in another thread while this rank continues; ``agree`` applies the sum to the
    consensus and brings the working copy up to date. The working copy then is the consensus plus
    the steps made since the snapshot, so no step is ever lost.

    Differences are averaged, not values: if no rank has changed anything, +0 is subtracted,
    which changes no bit. All ranks subtract the same sum from the same consensus, or make the same
    step of an outer optimizer. So it stays bit-identical on all of them, also on different kinds of
    devices.

    Args:
        training: Holds the model, whose parameters are the same on every rank when this is made.
        verify_every: Windows after which ranks compare the consensus; 0 for never.
        comm: Over which, or over a split of which, differences are exchanged: they lie in its
            memory.
        wire: See ``ErrorFeedback``.
        outer: Makes the optimizer that steps the consensus; ``None`` averages.

    Attributes:
        consensus: Parameters that all ranks have agreed on, as ``FlatGroup.data`` of each group.
    """

    def __init__(
        self,
        training: TrainingState,
        verify_every: int,
        comm: Communicator,
        wire: str,
        outer: OuterFactory | None = None,
    ) -> None:
        super().__init__(training, verify_every)
        self._outer = training.outer = None if outer is None else OuterStep(outer)
        self._comm, self._feedback = comm, ErrorFeedback(wire)
        self.consensus: list[Tensor] = []
        self._scratch: list[Tensor] = []
        self._snapshots: list[Tensor] = []
        #: What this rank has continued from after the snapshot, if that is not the snapshot.
        self._ahead: list[Tensor] = []
        #: Groups that are exchanged: more may become trainable meanwhile.
        self._num_taken = 0
        #: How often this rank has gone back to the consensus.
        self._num_resets = 0
        self.add_unfrozen()

    def move(self, comm: Communicator) -> None:
        """Put exchanged tensors into memory that other ranks can map."""
        self._comm = comm
        self._scratch = [comm.allocate(s.numel(), s.dtype, s.device) for s in self._scratch]

    @torch.no_grad()
    def add_unfrozen(self) -> None:
        """Take in parameters that have become trainable, before their first step."""
        self._flat.add_unfrozen()
        for group in self._flat.groups[len(self.consensus) :]:
            self.consensus.append(group.data.clone())
            size, dtype, device = group.data.numel(), group.data.dtype, group.data.device
            self._scratch.append(self._comm.allocate(size, dtype, device))
            self._snapshots.append(torch.zeros_like(group.data))
            if self._outer is not None:
                self._outer.add(group.names, _views(group, self.consensus[-1]))

    @torch.no_grad()
    def snapshot(self) -> Drift:
        """Take this rank's differences from the consensus as they are now."""
        self.add_unfrozen()
        self._ahead = []
        for group, agreed, scratch, kept in self._groups():
            kept.copy_(group.data)
            torch.sub(agreed, group.data, out=scratch)
        size = self._relative(self._scratch)
        return Drift(size, self._buffers.changed(), self._buffers.snapshot())

    @torch.no_grad()
    def run_ahead(self, averaged: Averaged) -> None:
        """Continue from what the outer optimizer makes of this rank's own difference alone.

        Until the average lands, that is the best guess of it: the consensus will not be where this
        rank is, but where momentum carries it.

        Args:
            averaged: What the average is expected to be of.
        """
        if self._outer is None:
            return
        guesses = iter(self._outer.ahead(_updates([*self._groups()]), averaged))
        for group in self._flat.groups:
            guess = group.data.clone()
            for view in _views(group, guess):
                view.copy_(next(guesses))
            group.data.copy_(guess)
            self._ahead.append(guess)

    def _go_back(self, first: int) -> None:
        """Undo ``run_ahead`` for the groups from this number on, which are not averaged."""
        for (group, *_, kept), start in list(zip(self._groups(), self._ahead, strict=False))[
            first:
        ]:
            group.data.sub_(start - kept)

    @torch.no_grad()
    def exchange(
        self,
        comm: Communicator,
        buffers: Tensor | None,
        weight: float,
        total: float,
        *,
        trainable: int,
        what: str,
    ) -> None:
        """Sum up all ranks' differences, by weight; all ranks call it together.

        Args:
            comm: The ranks.
            buffers: The snapshot of buffers, which becomes what was exchanged; ``None`` if no
                rank has written any.
            weight: What this rank's work counts; 0 leaves it out, whatever it holds.
            total: The same, summed over ranks; larger than 0.
            trainable: The fewest parameters that a rank trains: a group that has just become
                trainable waits until it has on all ranks.
            what: Named in errors, such as ``window 3``.
        """
        ends = accumulate(len(group.names) for group in self._flat.groups)
        self._num_taken = sum(1 for end in ends if end <= trainable)
        self._feedback.use(comm)
        for scratch in self._scratch[: self._num_taken]:
            if weight == 0:
                scratch.zero_()
            elif weight != total:
                scratch.mul_(weight / total)
            if comm.world_size > 1:
                lost = self._feedback.of(scratch)
                comm.all_reduce(
                    scratch, what=f"parameters of {what}", lost=lost, bits=self._feedback.bits
                )
        if buffers is not None:
            self._buffers.exchange(buffers, comm, weight, total, what=what)

    @torch.no_grad()
    def agree(
        self,
        weight: float,
        differences: Tensor | None,
        *,
        moved_on: bool,
        averaged: Averaged | None,
    ) -> float:
        """Apply the exchanged average to the consensus and to this rank.

        Args:
            weight: Of the window over all ranks; 0 changes nothing.
            differences: Of buffers, as exchanged; ``None`` if no rank has written any.
            moved_on: Whether this rank has made steps since the snapshot.
            averaged: What the outer optimizer steps on; ``None`` averages.

        Returns:
            The divergence: the 2-norm of snapshot less average, relative to that of the average;
            not finite when the sum is not.
        """
        self._go_back(self._num_taken if weight else 0)
        if weight == 0:
            if not moved_on:
                self._buffers.restore()
            return 0.0
        taken = list(islice(self._groups(), self._num_taken))
        divergence = None
        if self._outer is not None:
            # From the average: momentum carries the consensus beyond it.
            divergence = self._relative([kept - agreed + sums for _, agreed, sums, kept in taken])
        if self._outer is not None and averaged is not None:
            self._outer.step(_updates(taken), averaged)
        else:
            for _, agreed, sums, _ in taken:
                agreed.sub_(sums)
        for (group, agreed, _, kept), start in zip_longest(taken, self._ahead[: len(taken)]):
            if start is not None:
                kept.copy_(start)
            kept.sub_(agreed)
            if moved_on:
                group.data.sub_(kept)
            else:
                group.data.copy_(agreed)
        if differences is not None:
            self._buffers.agree(differences, moved_on=moved_on)
        return self._relative(self._snapshots) if divergence is None else divergence

    def reset_model(self) -> None:
        """Go back to the consensus: what this rank has done since is dropped."""
        self._num_resets += 1
        self._show(self.consensus)
        self._buffers.restore()
        self._buffers.keep()  # a void batch goes back to these
        self._flat.zero_()

    @torch.no_grad()
    def accept(self) -> None:
        """Make the present model the consensus, after a load or a broadcast."""
        for group, agreed, *_ in self._groups():
            agreed.copy_(group.data)
        self._buffers.reset()
        self._feedback.clear()

    def tensors(self, *, at_rest: bool) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Return the consensus; where not at rest, what no thread writes to meanwhile."""
        return self.consensus, self._buffers.committed() if at_rest else self._buffers.agreed

    def held(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of the consensus."""
        self.add_unfrozen()
        yield from (("parameters", agreed) for agreed in self.consensus)
        yield from (("buffers", agreed) for agreed in self._buffers.agreed)
        yield from self._training.frozen()

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show the consensus in the model for the length of the block; do not change it there."""
        working, num_resets = [g.data.clone() for g in self._flat.groups], self._num_resets
        self._show(self.consensus)
        try:
            with self._buffers.consensus():
                yield
        finally:
            if self._num_resets == num_resets:
                self._show(working)
            else:  # the working copy was dropped meanwhile
                self._show(self.consensus)
                self._buffers.restore()

    @torch.no_grad()
    def _show(self, tensors: Sequence[Tensor]) -> None:
        for group, tensor in zip(self._flat.groups, tensors, strict=True):
            group.data.copy_(tensor)

    def _groups(self) -> Iterator[tuple[FlatGroup, Tensor, Tensor, Tensor]]:
        return zip(self._flat.groups, self.consensus, self._scratch, self._snapshots, strict=True)

    def _relative(self, differences: Sequence[Tensor]) -> float:
        """Return the 2-norm of differences, relative to that of the consensus."""
        size = norm_of([[agreed] for agreed in self.consensus])
        norm = norm_of([[difference] for difference in differences])
        return norm / size if size else norm


def _views(group: FlatGroup, buffer: Tensor) -> list[Tensor]:
    """Return a buffer's parts in the shapes of the group's parameters."""
    pairs = zip(group.offsets, group.parameters, strict=True)
    return [view_like(buffer, offset, parameter) for offset, parameter in pairs]


def _updates(
    groups: Sequence[tuple[FlatGroup, Tensor, Tensor, Tensor]],
) -> list[Tensor | None]:
    """Return the differences in the shapes of parameters; ``None`` for what no rank has changed.

    Momentum must not move what is frozen. Ranks may freeze it in different windows, so the sum
    decides, whose bits all have, and not ``requires_grad``.
    """
    updates: list[Tensor | None] = []
    for group, _, differences, _ in groups:
        views = _views(group, differences)
        changed = torch.stack([view.any() for view in views]).tolist()
        updates += [
            view if is_changed else None for view, is_changed in zip(views, changed, strict=True)
        ]
    return updates
