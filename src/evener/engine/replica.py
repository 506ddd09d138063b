"""A rank's working copy of the model, and the consensus beside it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

from torch import Tensor

from evener.averaging.buffers import BufferAverager
from evener.averaging.parameters import ParameterAverager
from evener.averaging.verification import ReplicaCheck
from evener.comm.base import Communicator
from evener.comm.flat import FlatBuffers


@dataclass(frozen=True, slots=True)
class Snapshot:
    """How far a rank had moved when its window was over.

    Attributes:
        drift: 2-norm of the difference of parameters from the consensus, relative to the latter.
        changed: Whether a buffer was written.
        buffers: Their differences, for the exchange; those of parameters are kept in place.
    """

    drift: float
    changed: bool
    buffers: Tensor


@final
class Replica:
    """Parameters and buffers of one rank, which its local steps move away from the consensus.

    Args:
        flat: The trainable parameters.
        buffers: Keeps the consensus of buffers.
        check: Compares the ranks' consensus.

    Attributes:
        parameters: Keeps the consensus of parameters.
    """

    def __init__(
        self,
        flat: FlatBuffers,
        buffers: BufferAverager,
        check: ReplicaCheck,
    ) -> None:
        self.flat = flat
        self.parameters = ParameterAverager(flat)
        self.buffers = buffers
        self._check = check

    def verify(self, comm: Communicator, window: int) -> None:
        """Compares the ranks' consensus where that is due; all ranks call it together.

        It reads the consensus, which nobody writes to while a window is exchanged.

        Args:
            comm: The ranks.
            window: The one that is being exchanged.

        Raises:
            ReplicasDifferError: The consensus after the window before differs.
        """
        if window and self._check.is_due(window - 1):
            agreed = self.parameters.consensus, self.buffers.agreed
            self._check.compare(comm, window - 1, *agreed)

    def snapshot(self) -> Snapshot:
        """Takes this rank's differences from the consensus as they are now."""
        self.flat.attach_grads()  # parameters thawed on this rank, which had no step since
        self.parameters.adopt()
        drift = self.parameters.snapshot()
        return Snapshot(drift, self.buffers.changed(), self.buffers.snapshot())

    def adopt(self) -> None:
        """Counts parameters that were thawed on this rank."""
        self.parameters.adopt()

    def exchange(
        self,
        comm: Communicator,
        buffers: Tensor | None,
        weight: float,
        total: float,
        *,
        what: str,
    ) -> None:
        """Sums up all ranks' differences, by weight; all ranks call it together.

        Args:
            comm: The ranks.
            buffers: The snapshot of buffers, which becomes what was exchanged; ``None`` where no
                rank has written any.
            weight: Of this rank.
            total: Of all ranks.
            what: Named in errors, such as ``window 3``.
        """
        self.parameters.exchange(comm, weight, total, what=what)
        if buffers is not None:
            self.buffers.exchange(buffers, comm, weight, total, what=what)

    def agree(self, weight: float, differences: Tensor | None, *, moved_on: bool) -> float:
        """Moves the consensus on by what was exchanged, and this rank with it.

        Args:
            weight: Of the window over all ranks; 0 changes nothing.
            differences: Of buffers, as exchanged; ``None`` where no rank has written any.
            moved_on: Whether this rank has made steps since the snapshot.

        Returns:
            How far it was from the average, relative to that; not finite when the sum is not.
        """
        if weight == 0:
            if not moved_on:
                self.buffers.restore()
            return 0.0
        divergence = self.parameters.agree(moved_on=moved_on)
        if differences is not None:
            self.buffers.agree(differences, moved_on=moved_on)
        return divergence

    def restore(self) -> None:
        """Goes back to the consensus: what this rank has done since is dropped."""
        self.parameters.restore()
        self.buffers.restore()
        self.flat.zero_()

    def reset(self) -> None:
        """Takes the model as it is for the consensus."""
        self.parameters.reset()
        self.buffers.reset()

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Shows the consensus in the model for the length of the block."""
        with self.parameters.shown(), self.buffers.consensus():
            yield
