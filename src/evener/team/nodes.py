"""What the user says about the machines of a run."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from evener.comm.addresses import parse_address
from evener.errors import ConfigError
from evener.protocol.formation import read_team_limits

#: Where machines meet unless the user says otherwise; torchrun's default, too.
DEFAULT_PORT: Final = 29_500
#: More ranks than this on one host are taken for a typing error.
MAX_NPROC: Final = 256
#: Seconds that machines wait for one another unless the user says otherwise.
DEFAULT_TIMEOUT_S: Final = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """What the user said about machines; without ``nnodes`` the run is on this one alone.

    Attributes:
        nnodes: Number of machines, or the fewest and the most as ``MIN:MAX``.
        node_rank: Number of this one, from 0.
        master_addr: Host of node 0, or ``HOST:PORT``.
        port: Where machines meet; for a fixed team on this one alone, port of the script's own
            process group.
    """

    nnodes: str | None = None
    node_rank: int | None = None
    master_addr: str | None = None
    port: int | None = None

    @property
    def given(self) -> Mapping[str, object]:
        """The options that the user gave, by their names on the command line."""
        named = {
            "--nnodes": self.nnodes,
            "--node-rank": self.node_rank,
            "--master-addr": self.master_addr,
        }
        return {name: value for name, value in named.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """The machines of a run, and this one among them.

    Attributes:
        least: Fewest machines.
        most: Most machines; those of a fixed team are as many as the fewest.
        number: Number of this one, from 0; ``None`` where it was not given.
        host: Name or number of node 0.
        port: Where node 0 listens.
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
    options: NodeOptions, timeout_s: float, *, is_elastic: bool = False
) -> Nodes | None:
    """Return the machines of a run; ``None`` where it is on this one alone.

    Args:
        options: What the user said about machines.
        timeout_s: Longest wait for the others.
        is_elastic: The team is elastic, also where the number of machines is given.

    Raises:
        ConfigError: An option is missing, impossible, or does not fit the others.
    """
    if options.nnodes is None:
        if options.given:
            name, value = next(iter(options.given.items()))
            raise ConfigError(
                f"{name} is {value}, but --nnodes is missing; give the number of machines, or "
                f"leave {name} out to run on this one alone"
            )
        return None
    given = options.nnodes
    least, most = read_team_limits(given if ":" in given else f"{given}:{given}", "--nnodes")
    number = options.node_rank
    if most > 1 and options.master_addr is None:
        raise ConfigError(
            f"--nnodes is {options.nnodes}, but --master-addr is missing; give all machines the "
            "address of node 0"
        )
    if least == most > 1 and number is None and not is_elastic:
        raise ConfigError(
            f"--nnodes is {options.nnodes}, but --node-rank is missing; give each machine its "
            f"number, 0 to {most - 1}"
        )
    if number is not None and not 0 <= number < most:
        raise ConfigError(
            f"--node-rank is {number}, but --nnodes is {options.nnodes}; machines are numbered "
            f"from 0 to {most - 1}"
        )
    if most == 1:
        return None
    host, port = _split_address(options.master_addr or "", options.port)
    return Nodes(least=least, most=most, number=number, host=host, port=port, timeout_s=timeout_s)


def _split_address(address: str, port: int | None) -> tuple[str, int]:
    """Host and port of node 0, of which the port may be given in either place or in neither."""
    host, own = parse_address(address, "--master-addr")
    if own is not None and port is not None and own != port:
        raise ConfigError(
            f"--master-addr is {address!r}, but --port is {port}; name one port, the same on "
            "every machine"
        )
    return host, own or port or DEFAULT_PORT
