"""What all ranks have agreed on: parameters and buffers after the last average."""

import hashlib
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import final

from torch import Tensor

from evener.averaging.verification import ReplicaCheck
from evener.comm.base import Communicator
from evener.engine.replica import Replica
from evener.engine.schedule import Schedule
from evener.engine.state import TrainingState


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
    def hashes(self) -> list[int]:
        """Return a hash of each parameter and buffer."""

    @abstractmethod
    def held(self) -> Iterator[tuple[str, Tensor]]:
        """Yield its tensors, and parameters that no rank trains, with their names."""

    @abstractmethod
    def restored(self) -> None:
        """Take the present model for it, as after a load."""

    @abstractmethod
    def recovered(self) -> None:
        """Continue with tensors of ``held`` that have arrived."""

    def digest(self) -> int:
        """Return a hash of all of it, below 2**53."""
        return _digest(self.hashes())

    def digest_shown(self) -> int:
        """Return a hash of what the model shows of it, where no loop is in a micro-batch."""
        with self.shown():
            return _digest(self.check.hashes())

    def digest_if_due(self, window: int) -> float:
        """Return the digest where ranks compare the state after ``window``; 0 elsewhere."""
        return float(self.digest()) if window >= 0 and self.check.is_due(window) else 0.0

    def compare_shown(self, comm: Communicator, window: int) -> None:
        """Find out in what the ranks' states after a window differ; all ranks call it together.

        Raises:
            ReplicasDifferError: On every rank.
        """
        with self.shown():
            self.check.compare(comm, window)


def _digest(hashes: Sequence[int]) -> int:
    packed = struct.pack(f"={len(hashes)}q", *hashes)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=6).digest())


@final
class SyncConsensus(Consensus):
    """That of SYNC: parameters are equal at all times.

    Buffers move on with this rank's part of the next window.
    """

    def shown(self) -> AbstractContextManager[None]:
        """Show the agreed buffers."""
        self._flat.attach_data()  # values assigned to .data count
        return self._buffers.consensus()

    def hashes(self) -> list[int]:
        """Return a hash of each parameter and agreed buffer."""
        self._flat.adopt()  # otherwise ranks that have not computed since a thaw would hold less
        with self.shown():
            return self.check.hashes()

    def held(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the model's tensors."""
        yield from self._training.held()
        yield from self._training.frozen()

    def restored(self) -> None:
        """Take the buffers as they are for the agreed ones."""
        self._buffers.reset()

    def recovered(self) -> None:
        """Continue with a model that has arrived."""
        self._flat.zero_()
        self._buffers.reset()


@final
class LocalConsensus(Consensus):
    """That of CADENCE and ASYNC: kept beside the working copy of each rank.

    Args:
        training: Holds the working copy.
        verify_every: Windows after which ranks compare the consensus; 0 for never.
        comm: Over which, or over a split of which, differences are exchanged.

    Attributes:
        replica: The working copy, and the consensus.
    """

    def __init__(self, training: TrainingState, verify_every: int, comm: Communicator) -> None:
        super().__init__(training, verify_every)
        self.replica = Replica(self._flat, self._buffers, self.check, comm)
        self._schedule: Schedule = training.schedule

    def shown(self) -> AbstractContextManager[None]:
        """Show parameters and buffers."""
        return self.replica.shown()

    def hashes(self) -> list[int]:
        """Return a hash of each tensor, without showing it.

        The loop may be between a forward and its backward.
        """
        self.replica.adopt()
        return self.check.hashes(self.replica.consensus, self._buffers.agreed)

    def compare(self, comm: Communicator, window: int) -> None:
        """Find out in what the ranks' states differ, while a window is exchanged.

        It reads what no thread writes to meanwhile.
        """
        self.check.compare(comm, window, self.replica.consensus, self._buffers.agreed)

    def held(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of the consensus."""
        self.replica.adopt()
        yield from (("parameters", agreed) for agreed in self.replica.consensus)
        yield from (("buffers", agreed) for agreed in self._buffers.agreed)
        yield from self._training.frozen()

    def restored(self) -> None:
        """Take the model as it is for the consensus."""
        self.replica.reset()

    def recovered(self) -> None:
        """Go back to the consensus: what this rank has done since is dropped."""
        self.replica.restore()
        self._buffers.keep()  # a void batch goes back to these
