"""What all ranks have agreed on: parameters and buffers after the last average."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
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
    def digest(self) -> int:
        """Return a hash of all of it, below 2**53."""

    @abstractmethod
    def held(self) -> Iterator[tuple[str, Tensor]]:
        """Yield its tensors, and parameters that no rank trains, with their names."""

    @abstractmethod
    def accept(self) -> None:
        """Take the present model for it, as after a load."""

    @abstractmethod
    def reset_model(self) -> None:
        """Bring the model back to it, also where tensors of ``held`` have arrived."""

    def digest_shown(self) -> int:
        """Return a hash of what the model shows of it, where no loop is in a micro-batch."""
        with self.shown():
            return self.check.digest()

    def digest_if_due(self, window: int) -> float:
        """Return the digest where ranks compare the state after ``window``; 0 elsewhere."""
        return float(self.digest()) if window >= 0 and self.check.is_due(window) else 0.0

    def compare_shown(self, comm: Communicator, window: int) -> None:
        """Find out in what the ranks' states after a window differ; all ranks call it together.

        Raises:
            ReplicasDifferError: On every rank.
        """
        with self.shown():
            self.check.name_difference(comm, window)


@final
class SyncConsensus(Consensus):
    """That of SYNC: parameters are equal at all times.

    Buffers move on with this rank's part of the next window.
    """

    def shown(self) -> AbstractContextManager[None]:
        """Show the agreed buffers."""
        self._flat.attach_data()  # values assigned to .data count
        return self._buffers.consensus()

    def digest(self) -> int:
        """Return a hash of all parameters and agreed buffers."""
        self._flat.adopt()  # otherwise ranks that have not computed since a thaw would hold less
        return self.digest_shown()

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
