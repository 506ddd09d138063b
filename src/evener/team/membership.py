"""Who decides which ranks are in the team: the seam between fixed and elastic teams."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple, final

from evener.closing import Closing
from evener.comm.base import Call, Communicator, WaitListener
from evener.protocol.formation import PARKED, WAITING, Formation, Standing

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
        """Whether a worker waits to join, or members are fewer than the least.

        The planner then ends the generation.
        """

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
    def declare(self, phase: str, done: int = 0) -> str:
        """Say what this worker is doing, for the case that others wait for it.

        Args:
            phase: ``TRAINING``, ``WAITING``, ``PARKED``, or in its own words.
            done: Micro-batches that it has done since the last call.

        Returns:
            The phase before.
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
            finished: The run has ended: it was done to its end, or the team was stopped.
        """

    @abstractmethod
    def await_lease(self) -> None:
        """Return when this rank may commit: not while others may have continued without it.

        Raises:
            PeerLostError: The generation is over.
        """

    def may_write(self) -> bool:
        """Return whether this process may write to the files of the run.

        Not if its lease has run out and is not renewed: it was stopped, and the others have
        continued, with another main process.
        """
        return True

    @abstractmethod
    def announce(self, key: str, text: str) -> None:
        """Tell workers that join later something of the run; of one key, the last text counts."""

    @abstractmethod
    def announced(self, key: str, timeout_s: float = 0.0) -> str | None:
        """Wait for what the team announces, and return it.

        Returns:
            An empty text after ``timeout_s``; ``None`` as soon as no member of the team is left
            that could tell it, and this worker decides with what the team begins.
        """


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

    def declare(self, phase: str, done: int = 0) -> str:
        """Do nothing: other ranks look at this one's process themselves."""
        return phase

    def describe(self, facts: Mapping[str, Any]) -> None:
        """Do nothing: ranks compare what they train with in their first exchange."""

    def leave(self, *, finished: bool) -> None:
        """Do nothing: the others notice that the connections end."""

    def await_lease(self) -> None:
        """Return: nobody continues without this rank."""

    def announce(self, key: str, text: str) -> None:
        """Do nothing: nobody joins."""

    def announced(self, key: str, timeout_s: float = 0.0) -> str:
        """Return an empty text: nobody joins."""
        return ""

    def close(self) -> None:
        """Do nothing."""


@final
class GenerationWatch(WaitListener):
    """Ends a wait in a generation that is over, and lets the coordinator know of all others.

    A rank whose process is stopped keeps its connections: nothing else would end the wait for it.
    The coordinator names ranks for which others wait for long: it knows what each is doing.

    Args:
        membership: Knows whether the generation is over.
    """

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._phases: dict[Communicator, str] = {}  # before the wait

    def still_waits(self, comm: Communicator, call: Call, waited_s: float) -> None:
        """Let the call fail at once if its generation is over."""
        if self._membership.is_over:
            comm.hurry(_AT_ONCE_S)
        elif comm not in self._phases:
            before = self._phases[comm] = self._membership.declare(WAITING)
            if before == PARKED:  # it waits while the others train, so nobody is idle
                self._membership.declare(PARKED)

    def wait_over(self, comm: Communicator, *, succeeded: bool) -> None:
        """Go back to the phase before."""
        if comm in self._phases:
            self._membership.declare(self._phases.pop(comm))


def begin_generation(membership: Membership) -> Communicator:
    """Return what joins the ranks with which a worker begins.

    Those that found the team begin together. One that comes later is alone until it has all that
    the team's state goes to: a model, optimizers, and a loader.
    """
    if membership.is_joining:
        return Communicator(number=membership.number)
    return membership.next_generation(None).comm
