"""What all ranks have agreed on: parameters and buffers after the last average."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import final

from torch import Tensor

from evener.averaging.verification import ReplicaCheck
from evener.comm.base import Communicator
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
        """Show it in the model, in a ``with`` block."""

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
        """Take the present model for it, as after a load."""

    @abstractmethod
    def reset_model(self) -> None:
        """Bring the model back to it, also where tensors of ``held`` have arrived."""

    def adopt(self) -> None:
        """Take in parameters that have become trainable."""
        self._flat.adopt()

    def digest(self, *, at_rest: bool = False) -> int:
        """Return a hash of all of it, below 2**53; see ``tensors``."""
        if not at_rest:  # otherwise ranks that have not computed since a thaw would hold less
            self.adopt()
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
    """That of SYNC: parameters are equal at all times.

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
        """Take the buffers as they are for the agreed ones."""
        self._buffers.reset()

    def reset_model(self) -> None:
        """Continue with a model that has arrived."""
        self._flat.zero_()
        self._buffers.reset()
