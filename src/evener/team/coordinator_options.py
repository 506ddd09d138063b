"""How a coordinator is started."""

import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from evener.comm.addresses import LOOPBACK, open_port
from evener.protocol.formation import Deadlines

#: How often a coordinator looks what is due, in seconds.
TICK_S: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorOptions:
    """How a coordinator is started.

    Attributes:
        host: Where it listens.
        port: Its port; 0 takes a free one.
        least: Fewest members of the team.
        most: Most members.
        token: What workers must know; ``None`` admits every process of this host.
        deadlines: Those of the team.
        nnodes: Hosts of a fixed team; 0 for an elastic team.
        ledger: The file from which a coordinator that is started again continues; ``None`` for
            none: it then hears from workers and launchers what the newest generation is.
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
    """Return a socket that listens where the coordinator is to be.

    Raises:
        ConfigError: It would listen on other than loopback without a token.
        LaunchError: The port is in use, or not allowed; its cause is the OSError.
    """
    is_guarded = options.token is not None
    return open_port(options.host, options.port, program="the coordinator", is_guarded=is_guarded)
