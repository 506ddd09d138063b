"""The machines of a run, by the user's options."""

from dataclasses import dataclass
from typing import Final

from evener.comm.addresses import parse_address
from evener.errors import ConfigError
from evener.protocol.formation import read_team_limits

#: Default port of the rendezvous; torchrun's, too.
DEFAULT_PORT: Final = 29_500
#: More ranks than this on one host are considered a typing error.
MAX_NPROC: Final = 256
#: Default seconds that machines wait for one another.
DEFAULT_TIMEOUT_S: Final = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """The machines of a run, and this one among them.

    Attributes:
        least: Fewest machines.
        most: Most machines; in a fixed team, equal to ``least``.
        number: Number of this one, from 0; ``None`` if it was not given.
        host: Name or IP address of node 0.
        port: Port on which node 0 listens.
        timeout_s: Longest wait for the others.
    """

    least: int
    most: int
    number: int | None
    host: str
    port: int
    timeout_s: float = DEFAULT_TIMEOUT_S

    @property
    def are_fixed(self) -> bool:
        """Whether their number may not change."""
        return self.least == self.most


def choose_nodes(
    nnodes: str | None,
    node_rank: int | None,
    master_addr: str | None,
    port: int | None,
    *,
    timeout_s: float,
    is_elastic: bool = False,
) -> Nodes | None:
    """Return the machines of a run; ``None`` if it is only on this one.

    Args:
        nnodes: Number of machines, or the fewest and the most as ``MIN:MAX``.
        node_rank: Number of this one, from 0.
        master_addr: Host of node 0, or ``HOST:PORT``.
        port: Port of the rendezvous.
        timeout_s: Longest wait for the others.
        is_elastic: Whether the team is elastic, also if the number of machines is given.

    Raises:
        ConfigError: An option is missing, invalid, or contradicts another.
    """
    if nnodes is None:
        for name, value in (("--node-rank", node_rank), ("--master-addr", master_addr)):
            if value is not None:
                raise ConfigError(
                    f"{name} is {value}, but --nnodes is missing; give the number of machines, or "
                    f"leave {name} out to run on this one alone"
                )
        return None
    least, most = read_team_limits(nnodes if ":" in nnodes else f"{nnodes}:{nnodes}", "--nnodes")
    if most > 1 and master_addr is None:
        raise ConfigError(
            f"--nnodes is {nnodes}, but --master-addr is missing; give all machines the address of "
            "node 0"
        )
    if least == most > 1 and node_rank is None and not is_elastic:
        raise ConfigError(
            f"--nnodes is {nnodes}, but --node-rank is missing; give each machine its number, 0 to "
            f"{most - 1}"
        )
    if node_rank is not None and not 0 <= node_rank < most:
        raise ConfigError(
            f"--node-rank is {node_rank}, but --nnodes is {nnodes}; machines are numbered from 0 "
            f"to {most - 1}"
        )
    if most == 1:
        return None
    host, own_port = parse_address(master_addr or "", "--master-addr")
    if own_port is not None and port is not None and own_port != port:
        raise ConfigError(
            f"--master-addr is {master_addr!r}, but --port is {port}; name one port, the same on "
            "every machine"
        )
    return Nodes(
        least=least,
        most=most,
        number=node_rank,
        host=host,
        port=own_port or port or DEFAULT_PORT,
        timeout_s=timeout_s,
    )
