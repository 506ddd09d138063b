"""The options of a coordinator."""

import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from evener.comm.addresses import LOOPBACK, open_port
from evener.protocol.formation import Deadlines

#: Seconds between a coordinator's checks of deadlines.
TICK_S: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorOptions:
    """The options of a coordinator.

    Attributes:        host: The address on which it listens.
        port: Its port; 0 for a free one.
        least: Fewest members of the team.
        most: Most members.
        token: The token that workers must know; ``None`` admits every process of this host.
        deadlines: The team's deadlines.
        nnodes: Hosts of a fixed team; 0 for an elastic team.
        ledger: The file from which a restarted coordinator continues. Without one it learns the
            newest generation from workers and launchers.
    """

    host: str = LOOPBACK
    port: int = 0
    least: int = 1
    most: int
    token: bytes | None = None
    deadlines: Deadlines = field(default_factory=Deadlines)
    nnodes: int = 0
    ledger: Path | None = None


def listen(options: CoordinatorOptions) -> socket.socket:
    """Return a listening socket for the coordinator.

    Raises:
        ConfigError: It would listen on another address than loopback without a token.
        LaunchError: The port is in use, or not allowed; its cause is the OSError.
    """
    is_guarded = options.token is not None
    return open_port(options.host, options.port, program="the coordinator", is_guarded=is_guarded)
