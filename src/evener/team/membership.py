"""Who decides which ranks are in the team: the seam between fixed and elastic teams."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, final

from evener.closing import Closing
from evener.comm.base import Communicator, WaitListener
from evener.comm.calls import Call
from evener.planning.silence import silence_deadline_s
from evener.protocol.formation import PARKED, WAITING, Formation, Standing
from evener.team.elastic import CoordinatorLink

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
    """Decides which ranks are in the team. This is that of a fixed team, where a lost rank ends it.

    Args:
        number: See the attributes.
        most: See the attributes.
        link: To the coordinator; ``None`` where the ranks have met otherwise.

    Attributes:
        member: The worker's id.
        number: Its number in the team, which it keeps.
        most: How many numbers there are: the ranks of the team, those that are absent included.
        generation: That in which it is, or was last; 0 before the first one.
        is_elastic: Whether members may join and leave.
    """

    is_elastic = False

    def __init__(self, number: int, most: int, link: CoordinatorLink | None = None) -> None:
        self.member = f"rank {number}"
        self.number, self.most = number, most
        self.generation = 0
        self._link_for_waits = link

    @property
    def is_joining(self) -> bool:
        """Whether the team began before this worker came, which is not in it yet."""
        return False

    @property
    def wants_change(self) -> bool:
        """Whether a worker waits to join, or members are fewer than the least.

        The planner then ends the generation.
        """
        return False

    @property
    def is_leaving(self) -> bool:
        """Whether this worker was told to leave for good, and is still a member."""
        return False

    @property
    def is_over(self) -> bool:
        """Whether the generation is known to have ended: nobody need be waited for in it."""
        return False

    def next_generation(self, standing: Standing | None) -> Formed:
        """Leave the generation and wait for the next one.

        Args:
            standing: What this rank holds; ``None`` without state.

        Raises:
            EvenerError: This worker is not in it; says why.
        """
        raise AssertionError("a fixed team has one generation")

    def declare(self, phase: str, done: int = 0) -> str:
        """Say what this worker is doing, for the case that others wait for it.

        Args:
            phase: ``TRAINING``, ``WAITING``, ``PARKED``, or in its own words.
            done: Micro-batches that it has done since the last call.

        Returns:
            The phase before.
        """
        return phase if self._link_for_waits is None else self._link_for_waits.declare(phase, done)

    def describe(self, facts: Mapping[str, Any]) -> None:
        """Say more of what must be the same on all workers, by name.

        Ranks of a fixed team compare it in their first exchange.

        Raises:
            TeamRefusedError: Another worker has said otherwise.
        """

    def leave(self, *, finished: bool) -> None:
        """Leave the team for good, after this worker's last commit; idempotent.

        Args:
            finished: The run has ended: it was done to its end, or the team was stopped.
        """

    def await_lease(self) -> None:
        """Return when this rank may commit: not while others may have continued without it.

        Raises:
            PeerLostError: The generation is over.
        """

    def take_refused(self) -> list[tuple[str, str]]:
        """Return which workers were refused since the last call, and why; on the main process."""
        return []

    def may_write(self) -> bool:
        """Return whether this process may write to the files of the run.

        Not if its lease has run out and is not renewed: it was stopped, and the others have
        continued, with another main process.
        """
        return True

    def described(self, name: str, timeout_s: float) -> Any:
        """Wait for what members have said with ``describe``, and return it.

        Returns:
            ``None`` as soon as no member of the team is left that could tell it, and this worker
            decides with what the team begins.

        Raises:
            LaunchError: They have not said it in ``timeout_s``.
        """
        return None

    def close(self) -> None:
        """Leave the team; idempotent. Ranks of a fixed team leave with their communicator."""


@final
class WaitWatch(WaitListener):
    """Lets the coordinator know of long waits, and ends those in a generation that is over.

    A rank whose process is stopped keeps its connections: nothing else would end the wait for it.
    The coordinator names ranks for which others wait for long. In an elastic team it knows what
    each of them does, by its heartbeats. A rank of a fixed team has none. It tells of a wait after
    an adaptive deadline: others may be busy with what it does not do, such as an evaluation.

    Args:
        membership: Knows whether the generation is over, and the coordinator.
        windows_s: Seconds that the latest windows took, kept by the caller.
    """

    def __init__(self, membership: Membership, windows_s: Sequence[float] = ()) -> None:
        self._membership, self._windows_s = membership, windows_s
        self._phases: dict[Communicator, str] = {}  # before the wait

    def still_waits(self, comm: Communicator, call: Call, waited_s: float) -> None:
        """Let the call fail at once if its generation is over."""
        if self._membership.is_over:
            comm.hurry(_AT_ONCE_S)
        elif comm not in self._phases and self._is_long(comm, call, waited_s):
            before = self._phases[comm] = self._membership.declare(WAITING)
            if before == PARKED:  # it waits while the others train, so nobody is idle
                self._membership.declare(PARKED)

    def wait_over(self, comm: Communicator, *, succeeded: bool) -> None:
        """Go back to the phase before."""
        if comm in self._phases:
            self._membership.declare(self._phases.pop(comm))

    def _is_long(self, comm: Communicator, call: Call, waited_s: float) -> bool:
        # Some ranks make a call with a longer deadline than others for hours.
        is_usual = call.timeout_s <= comm.timeout_s
        is_late = waited_s >= silence_deadline_s(tuple(self._windows_s))
        return self._membership.is_elastic or (is_usual and is_late)


def begin_generation(membership: Membership) -> Communicator:
    """Return what joins the ranks with which a worker begins.

    Those that found the team begin together. One that comes later is alone until it has all that
    the team's state goes to: a model, optimizers, and a loader.
    """
    if membership.is_joining:
        return Communicator(number=membership.number)
    return membership.next_generation(None).comm
