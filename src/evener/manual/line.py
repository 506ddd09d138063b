"""The connection that all ``Replicas`` of a process share."""

import atexit
from typing import ClassVar, Self, final

import torch

from evener.comm.base import Communicator
from evener.errors import ConfigError
from evener.team.backends import check_backend, connect_team
from evener.team.environment import DistributedTrainConfig
from evener.team.news import LEFT, tell

#: When a script averages whose policy is its own.
HAND = "by hand"


@final
class Line:
    """A use of a connection, which ends with its last use.

    One for all replicas of a process (a GAN wraps two networks): the port of the team serves one
    connection at a time, and ranks that are in different calls then find out at once.

    Attributes:
        comm: The connection.
        reason: Why it exchanges as it does, for people.
    """

    _lines: ClassVar[dict[DistributedTrainConfig, list[Self]]] = {}

    def __init__(self, comm: Communicator, reason: str, backend: str) -> None:
        self.comm = comm
        self.reason = reason
        self._backend = backend
        self._environment: DistributedTrainConfig | None = None
        self._released = False

    @classmethod
    def open(
        cls,
        environment: DistributedTrainConfig,
        backend: str,
        device: torch.device,
        timeout_s: float,
        communicator: Communicator | None,
    ) -> Self:
        """Connects, or shares the connection that is there already.

        Args:
            environment: This process's place.
            backend: ``AverageBackend`` by name.
            device: Where this process exchanges.
            timeout_s: Longest wait for another process, over the life of a new connection.
            communicator: To be used instead; not shared, and closed by ``release``.

        Raises:
            ConfigError: Another backend than that of the connection.
            LaunchError: The processes did not find one another.
        """
        check_backend(backend)
        if communicator is not None:
            return cls(
                *connect_team(environment, backend, HAND, device, timeout_s, communicator), backend
            )
        users = cls._lines.get(environment, [])
        if users:
            if users[0]._backend != backend:
                raise ConfigError(
                    f"backend is {backend!r}, but replicas wrapped before use "
                    f"{users[0]._backend!r}; give the same to every Ddp.wrap of a script"
                )
            line = cls(users[0].comm, users[0].reason, backend)
        else:
            comm, reason = connect_team(environment, backend, HAND, device, timeout_s)
            line = cls(comm, reason, backend)
        line._environment = environment
        cls._lines.setdefault(environment, []).append(line)
        # Many scripts never close. Process groups that live on when the interpreter ends abort it.
        atexit.register(line.release)
        return line

    def release(self) -> None:
        """Ends this use; the last one closes the connection. Idempotent."""
        if self._released:
            return
        self._released = True
        if self._environment is None:
            self.comm.close()
            return
        atexit.unregister(self.release)
        users = self._lines[self._environment]
        users.remove(self)
        if not users:
            del self._lines[self._environment]
            self.comm.close()
            tell(place=LEFT)
