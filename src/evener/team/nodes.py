"""Several machines, a launcher on each: what the user says about them, checked."""

from collections.abc import Mapping
from dataclasses import dataclass

from evener.errors import ConfigError
from evener.team.address import check_port, parse_address

#: Where nodes meet unless the user says otherwise; torchrun's default, too.
DEFAULT_PORT = 29_500
#: Seconds that nodes wait for one another unless the user says otherwise.
DEFAULT_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """What the user said about machines; all ``None`` for a run on this one alone.

    Attributes:
        nnodes: Number of machines.
        node_rank: Number of this one, from 0.
        master_addr: Host of node 0, or ``HOST:PORT``.
    """

    nnodes: int | None = None
    node_rank: int | None = None
    master_addr: str | None = None

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
class Node:
    """This machine among those of a run.

    Attributes:
        number: Its number, from 0.
        nnodes: How many there are, 2 or more.
        host: Name or number of node 0.
        port: Where node 0 listens.
        timeout_s: Longest wait for the others.
    """

    number: int
    nnodes: int
    host: str
    port: int
    timeout_s: float

    @property
    def where(self) -> str:
        """The meeting point in words."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def choose_node(options: NodeOptions, port: int | None, timeout_s: float) -> Node | None:
    """This machine's place among several; ``None`` where the run is on this one alone.

    Args:
        options: What the user said about machines.
        port: ``--port``.
        timeout_s: Longest wait for the others.

    Raises:
        ConfigError: An option is missing, impossible, or does not fit the others.
    """
    nnodes = options.nnodes
    if nnodes is None:
        if options.given:
            name, value = next(iter(options.given.items()))
            raise ConfigError(
                f"{name} is {value}, but --nnodes is missing; give the number of machines, or "
                f"leave {name} out to run on this one alone"
            )
        return None
    if nnodes < 1:
        raise ConfigError(f"--nnodes is {nnodes}; give the number of machines, 1 or more")
    number = options.node_rank
    if nnodes > 1 and (number is None or options.master_addr is None):
        missing = "--node-rank" if number is None else "--master-addr"
        raise ConfigError(
            f"--nnodes is {nnodes}, but {missing} is missing; give each machine its number "
            f"(--node-rank 0 to {nnodes - 1}) and all of them the address of node 0 "
            "(--master-addr)"
        )
    if number is not None and not 0 <= number < nnodes:
        raise ConfigError(
            f"--node-rank is {number}, but --nnodes is {nnodes}; machines are numbered from 0 to "
            f"{nnodes - 1}"
        )
    if nnodes == 1:
        return None
    assert number is not None
    assert options.master_addr is not None
    host, chosen = _split_address(options.master_addr, port)
    return Node(number=number, nnodes=nnodes, host=host, port=chosen, timeout_s=timeout_s)


def _split_address(address: str, port: int | None) -> tuple[str, int]:
    """Host and port of node 0, of which the port may be given in either place or in neither."""
    host, own = parse_address(address, "--master-addr")
    if own is not None and port is not None and own != port:
        raise ConfigError(
            f"--master-addr is {address!r}, but --port is {port}; name one port, the same on "
            "every machine"
        )
    return host, check_port(own or port or DEFAULT_PORT, "--port")
