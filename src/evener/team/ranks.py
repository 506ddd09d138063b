"""What a launcher gives a rank: its place in the team, and rank 0 the socket of the store."""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from evener.comm.addresses import bind
from evener.errors import ConfigError, LaunchError
from evener.team.channel import CHANNEL_FD
from evener.team.child import PARENT_PID
from evener.team.environment import LAUNCHED, STORE_FD
from evener.team.host import threads_per_rank

#: More ranks than this on one host are taken for a typing error.
MAX_NPROC = 256

LOOPBACK = "127.0.0.1"
# What another launcher may have left in our environment, and would mislead the ranks.
_FOREIGN_PREFIX = "TORCHELASTIC_"
_FOREIGN = frozenset(
    {
        CHANNEL_FD,
        STORE_FD,
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "ROLE_NAME",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRanks:
    """The ranks of this host among those of the team.

    Attributes:
        first: The first of them; the others follow it.
        count: How many they are.
        world_size: Ranks of the team, on all hosts.
        host: Where the store is.
        port: Its port.
    """

    first: int = 0
    count: int
    world_size: int
    host: str = LOOPBACK
    port: int


def check_nproc(nproc: int) -> None:
    """Refuses an impossible number of ranks.

    Raises:
        ConfigError: It is below 1 or above ``MAX_NPROC``.
    """
    if not 1 <= nproc <= MAX_NPROC:
        raise ConfigError(
            f"--nproc is {nproc}; give the number of ranks to start on this host, from 1 to "
            f"{MAX_NPROC} (usually one per device)"
        )


def rank_environment(base: Mapping[str, str], ranks: LocalRanks, local_rank: int) -> dict[str, str]:
    """The environment of one rank: torchrun's variables, and evener's own.

    Args:
        base: Environment of the launcher.
        ranks: The ranks of this host.
        local_rank: Which of them.
    """
    environ = {
        name: value
        for name, value in base.items()
        if name not in _FOREIGN and not name.startswith(_FOREIGN_PREFIX)
    }
    environ.setdefault("OMP_NUM_THREADS", str(threads_per_rank(None, ranks.count)))
    # A store that goes away is reported by evener; torch would add its C++ stack.
    environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    return environ | {
        "RANK": str(ranks.first + local_rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(ranks.world_size),
        "LOCAL_WORLD_SIZE": str(ranks.count),
        "MASTER_ADDR": ranks.host,
        "MASTER_PORT": str(ranks.port),
        LAUNCHED: "1",
        PARENT_PID: str(os.getpid()),
    }


def bind_store(port: int | None, *, listen: bool) -> socket.socket:
    """Opens the port of the store, on loopback; the first rank inherits it.

    Args:
        port: Which; ``None`` takes a free one.
        listen: Connections may wait for rank 0; see ``launch``.

    Raises:
        ConfigError: The port is impossible.
        LaunchError: It is in use.
    """
    if port is not None and not 1 <= port <= 65_535:
        raise ConfigError(f"--port is {port}; give a port from 1 to 65535, or none for a free one")
    try:
        # A plain torch script can open the port itself while we keep others from being given it.
        return open_port(LOOPBACK, port or 0, backlog=MAX_NPROC if listen else 0)
    except OSError as error:
        raise LaunchError(
            f"port {port} cannot be opened on {LOOPBACK} ({error.strerror}); choose another with "
            "--port, or leave --port out to get a free one"
        ) from error


def open_port(host: str, port: int, *, backlog: int) -> socket.socket:
    """Opens a port, and listens there unless the backlog is 0; raises OSError."""
    opened = bind(host, port)
    try:
        if backlog:
            opened.listen(backlog)
    except OSError:
        opened.close()
        raise
    return opened
