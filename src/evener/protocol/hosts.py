"""The hosts of a fixed team: they are counted, and ranks are numbered host by host. Pure."""

from dataclasses import dataclass, field
from typing import NamedTuple


class Host(NamedTuple):
    """A host, by the facts of its agent.

    Attributes:
        number: Its number, from 0.
        nnodes: Hosts of the team, by its agent's option.
        nproc: Ranks that it starts.
        port: On node 0, a port for the script's own process groups.
        where: Its address or name, as text.
    """

    number: int
    nnodes: int
    nproc: int
    port: int
    where: str

    @property
    def name(self) -> str:
        """Its name for messages."""
        return f"node {self.number} ({self.where})"


@dataclass(slots=True)
class Hosts:
    """The hosts that have connected.

    Attributes:
        nnodes: Number of the team's hosts.
    """

    nnodes: int
    _nodes: dict[str, Host] = field(default_factory=dict)

    def arrive(self, agent: str, node: Host) -> str:
        """Add a host.

        Args:
            agent: Id of its agent; the same after a reconnect.
            node: The host.

        Returns:
            Why it is refused; empty if it is not.
        """
        if node.nnodes != self.nnodes:
            return (
                f"node 0 was started with --nnodes {self.nnodes}, node {node.number} with --nnodes "
                f"{node.nnodes}; give every machine the same number"
            )
        if not 0 <= node.number < self.nnodes:
            return f"node {node.number} of {self.nnodes} with {node.nproc} ranks is invalid"
        if any(a != agent and n.number == node.number for a, n in self._nodes.items()):
            return (
                f"two machines were started with --node-rank {node.number}; number them from 0 to "
                f"{self.nnodes - 1}, each differently"
            )
        self._nodes[agent] = node
        return ""

    @property
    def _is_complete(self) -> bool:
        return len(self._nodes) == self.nnodes

    def depart(self, agent: str) -> Host | None:
        """Note that a host has disconnected; return it if the team had begun."""
        if self._is_complete:
            return self._nodes.get(agent)
        self._nodes.pop(agent, None)
        return None

    @property
    def missing(self) -> str:
        """The hosts that have not connected, as text; empty once all have."""
        if self._is_complete:
            return ""
        here = {node.number for node in self._nodes.values()}
        absent = [str(n) for n in range(self.nnodes) if n not in here]
        return f"node{'s' if len(absent) > 1 else ''} {', '.join(absent)} of {self.nnodes}"

    @property
    def world_size(self) -> int:
        """Ranks of the hosts that have connected."""
        return sum(node.nproc for node in self._nodes.values())

    @property
    def master_port(self) -> int:
        """The port of node 0."""
        return next(node.port for node in self._nodes.values() if node.number == 0)

    def first_ranks(self) -> dict[str, int]:
        """Return the first rank of each host, by its agent."""
        return {
            agent: sum(other.nproc for other in self._nodes.values() if other.number < node.number)
            for agent, node in self._nodes.items()
        }
