"""Which ranks are in the team: the interface of fixed and elastic teams."""

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
    """A generation of an elastic team, and its communicator.

    Attributes:
        formation: Its members, and the source of the state.
        comm: Connects the members, in the order of ``formation``; its ``numbers`` are theirs.
    """

    formation: Formation
    comm: Communicator


class Membership(Closing):
    """Decides which ranks are in the team. This class is for fixed teams, which a lost rank ends.

    Args:
        number: See the attributes.
        most: See the attributes.
        link: Link to the coordinator; ``None`` if the ranks have connected in another way.

    Attributes:
        member: The worker's id.
        number: Its number in the team, which it keeps.
        most: Number of the team's ranks, absent ones included.
        generation: Its present or last generation; 0 before the first one.
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
        """Whether the team has begun, and this worker is not a member yet."""
        return False

    @property
    def wants_change(self) -> bool:
        """Whether a worker waits to join, or members are fewer than the least.

        The planner then ends the generation.
        """
        return False

    @property
    def is_leaving(self) -> bool:
        """Whether this worker was asked to leave for good, and is still a member."""
        return False

    @property
    def is_over(self) -> bool:
        """Whether the generation is known to have ended, so that waits in it are useless."""
        return False

    def next_generation(self, standing: Standing | None) -> Formed:
        """Leave the generation and wait for the next one.

        Args:
            standing: The state that this rank holds; ``None`` without state.

        Raises:
            EvenerError: This worker is not in it; the message has the cause.
        """
        raise AssertionError("a fixed team has one generation")

    def declare(self, phase: str, done: int = 0) -> str:
        """Report what this worker is doing, in case others wait for it.

        Args:
            phase: ``TRAINING``, ``WAITING``, ``PARKED``, or another text.
            done: Micro-batches computed since the last call.

        Returns:
            The previous phase.
        """
        return phase if self._link_for_waits is None else self._link_for_waits.declare(phase, done)

    def describe(self, facts: Mapping[str, Any]) -> None:
        """Send further facts that must be the same on all workers, by name.

        Ranks of a fixed team compare them in their first exchange.

        Raises:
            TeamRefusedError: Another worker has a different fact.
        """

    def leave(self, *, finished: bool) -> None:
        """Leave the team for good, after this worker's last commit; idempotent.

        Args:
            finished: Whether the run has ended: it was completed, or the team was stopped.
        """

    def await_lease(self) -> None:
        """Wait until this rank may commit: not while others may have continued without it.

        Raises:
            PeerLostError: The generation is over.
        """

    def take_refused(self) -> list[tuple[str, str]]:
        """Return which workers were refused since the last call, and why; on the main process."""
        return []

    def may_write(self) -> bool:
        """Return whether this process may write to the files of the run.

        It may not if its lease has expired and is not renewed: it was stopped, and the others have
        continued with another main process.
        """
        return True

    def described(self, name: str, timeout_s: float) -> Any:
        """Wait for a fact that members have sent with ``describe``, and return it.

        Returns:
            ``None`` if the team has no member left that knows it, and this worker chooses the state
            to begin with.

        Raises:
            LaunchError: Members have not sent it within ``timeout_s``.
        """
        return None

    def close(self) -> None:
        """Leave the team; idempotent. Ranks of a fixed team leave with their communicator."""


@final
class WaitWatch(WaitListener):
    """Reports long waits to the coordinator, and ends waits in a generation that is over.

    A rank whose process is stopped keeps its connections, so nothing else would end a wait for it.
    The coordinator prints the names of ranks for which others wait for long. In an elastic team it
    knows by heartbeats what each of them does. A rank of a fixed team sends none. It reports a wait
    after an adaptive deadline: other ranks may be busy, for example with an evaluation.

    Args:
        membership: The membership of this rank.
        windows_s: Seconds of the latest windows, kept by the caller.
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
            if before == PARKED:  # it waits while the others train
                self._membership.declare(PARKED)

    def wait_over(self, comm: Communicator, *, succeeded: bool) -> None:
        """Return to the previous phase."""
        if comm in self._phases:
            self._membership.declare(self._phases.pop(comm))

    def _is_long(self, comm: Communicator, call: Call, waited_s: float) -> bool:
        # Some calls have deadlines of hours.
        is_usual = call.timeout_s <= comm.timeout_s
        is_late = waited_s >= silence_deadline_s(tuple(self._windows_s))
        return self._membership.is_elastic or (is_usual and is_late)


def begin_generation(membership: Membership) -> Communicator:
    """Return the communicator of the ranks with which a worker begins.

    The first members begin together. A worker that joins later is alone until it has everything
    that receives the team's state: a model, optimizers, and a loader.
    """
    if membership.is_joining:
        return Communicator(number=membership.number)
    return membership.next_generation(None).comm
