"""Who decides which ranks are in the team: the seam between fixed and elastic teams."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple, final

from evener.closing import Closing
from evener.comm.base import Call, Communicator, SingleCommunicator, WaitListener
from evener.protocol.formation import Formation, Standing

_AT_ONCE_S = 0.001


class Formed(NamedTuple):
    """A generation of an elastic team, and what joins its ranks.

    Attributes:
        formation: Who is in it, and whose state counts.
        comm: Joins the members, in the order of ``formation``; its ``numbers`` are theirs.
    """

    formation: Formation
    comm: Communicator


class Membership(Closing):
    """Decides which ranks are in the team; a leaf for each way of deciding.

    Attributes:
        member: The worker's id.
        number: Its number in the team, which it keeps.
        most: How many numbers there are: the ranks of the team, those that are absent included.
        generation: That in which it is, or was last; 0 before the first one.
    """

    member: str
    number: int
    most: int
    generation: int = 0

    @property
    @abstractmethod
    def is_elastic(self) -> bool:
        """Whether members may join and leave."""

    @property
    @abstractmethod
    def is_joining(self) -> bool:
        """Whether the team began before this worker came, which is not in it yet."""

    @property
    @abstractmethod
    def wants_change(self) -> bool:
        """Whether somebody waits to join, or is to leave: the planner then ends the generation."""

    @property
    @abstractmethod
    def is_leaving(self) -> bool:
        """Whether this worker was told to leave for good, and is still a member."""

    @property
    @abstractmethod
    def is_over(self) -> bool:
        """Whether the generation is known to have ended: nobody need be waited for in it."""

    @abstractmethod
    def next_generation(self, standing: Standing | None) -> Formed:
        """Leave the generation and wait for the next one.

        Args:
            standing: What this rank holds; ``None`` without state.

        Raises:
            EvenerError: This worker is not in it; says why.
        """

    @abstractmethod
    def describe(self, facts: Mapping[str, Any]) -> None:
        """Say more of what must be the same on all workers, by name.

        Raises:
            TeamRefusedError: Another worker has said otherwise.
        """

    @abstractmethod
    def leave(self, *, finished: bool) -> None:
        """Leave the team for good, after this worker's last commit; idempotent.

        Args:
            finished: This worker has done the run to its end.
        """

    @abstractmethod
    def await_lease(self) -> None:
        """Return when this rank may commit: not while others may have gone on without it.

        Raises:
            PeerLostError: The generation is over.
        """

    @abstractmethod
    def announce(self, key: str, text: str) -> None:
        """Tell workers that join later something of the run; of one key, the last text counts."""

    @abstractmethod
    def announced(self, key: str, timeout_s: float = 0.0) -> str:
        """Wait for what the team announces; return it, or an empty text after ``timeout_s``."""


@final
class FixedMembership(Membership):
    """The ranks that the team was started with: a lost one ends it."""

    def __init__(self, number: int, most: int) -> None:
        self.member = f"rank {number}"
        self.number = number
        self.most = most

    @property
    def is_elastic(self) -> bool:
        """Never."""
        return False

    @property
    def is_joining(self) -> bool:
        """Never."""
        return False

    @property
    def wants_change(self) -> bool:
        """Never."""
        return False

    @property
    def is_leaving(self) -> bool:
        """Never."""
        return False

    @property
    def is_over(self) -> bool:
        """Never."""
        return False

    def next_generation(self, standing: Standing | None) -> Formed:
        """Unreachable: a fixed team has one generation, apart from ranks that are parked."""
        raise AssertionError("a fixed team forms no generation")

    def describe(self, facts: Mapping[str, Any]) -> None:
        """Do nothing: ranks compare what they train with in their first exchange."""

    def leave(self, *, finished: bool) -> None:
        """Do nothing: the others notice that the connections end."""

    def await_lease(self) -> None:
        """Return: nobody goes on without this rank."""

    def announce(self, key: str, text: str) -> None:
        """Do nothing: nobody joins."""

    def announced(self, key: str, timeout_s: float = 0.0) -> str:
        """Return an empty text: nobody joins."""
        return ""

    def close(self) -> None:
        """Do nothing."""


@final
class GenerationWatch(WaitListener):
    """Ends a wait in a generation that is over, and hands all others on.

    A rank whose process is stopped keeps its connections: nothing else would end the wait for it.

    Args:
        membership: Knows whether the generation is over.
        others: Is told of waits, too.
    """

    def __init__(self, membership: Membership, others: WaitListener) -> None:
        self._membership, self._others = membership, others

    def still_waits(self, comm: Communicator, call: Call, waited_s: float) -> None:
        """Let the call fail at once if its generation is over."""
        if self._membership.is_over:
            comm.hurry(_AT_ONCE_S)
        else:
            self._others.still_waits(comm, call, waited_s)

    def wait_over(self, comm: Communicator, *, succeeded: bool) -> None:
        """Hand it on."""
        self._others.wait_over(comm, succeeded=succeeded)


def begin_generation(membership: Membership) -> Communicator:
    """Return what joins the ranks with which a worker begins.

    Those that found the team begin together. One that comes later is alone until it has all that
    the team's state goes to: a model, optimizers, and a loader.
    """
    if membership.is_joining:
        return SingleCommunicator(number=membership.number)
    return membership.next_generation(None).comm
