"""The ranks as one of them sees them: which are present, and the communicators between them."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from evener.comm.base import Communicator, SingleCommunicator
from evener.errors import CollectiveError
from evener.places import here
from evener.team.members import Member, absent
from evener.team.membership import FixedMembership, Formed, GenerationWatch, Membership
from evener.team.waits import WaitWatch

#: Longest wait of a parked rank for a row: others may evaluate or save for hours in between.
PARKED_TIMEOUT_S = 7 * 24 * 3600.0


class Team:
    """Knows which ranks take part, and what joins them.

    A *parked* rank costs more than it contributes. All exchange rows; for everything else, the
    others use a communicator of their own. Ranks keep their numbers.

    In an elastic team, ranks may be *absent*: a member was lost, or has not come yet. Members keep
    their numbers, and each generation has a new communicator of all of them. A parked rank remains
    a member of its generation.

    Args:
        comm: Joins the ranks.
        membership: Decides which ranks are in the team; ``None`` for those of ``comm``.

    Attributes:
        rank: Number of this rank.
        world_size: Ranks of the team, those that are parked or absent included.
        members: Ranks that are present, in order.
        everyone: These, and the parked ones.
        people: What each rank is, as they introduced themselves; see ``meet``.
        names: Each rank's name in events; empty if no worker has that number.
        comm: Joins them.
        whole: Joins ``everyone``.
        membership: As given.
        sent_before: Bytes that this rank has sent through communicators that were let go.
    """

    def __init__(self, comm: Communicator, membership: Membership | None = None) -> None:
        self.membership = membership or FixedMembership(comm.rank, comm.world_size)
        self.rank = self.membership.number
        self.world_size = self.membership.most
        self.everyone = comm.numbers if self.is_elastic else tuple(range(comm.world_size))
        self.members = self.everyone
        self.people: tuple[Member, ...] = ()
        self._twin: Team | None = None
        self.names = [""] * self.world_size
        self.comm = self.whole = comm
        self._windows_s: Sequence[float] | None = None
        self.sent_before = 0
        self._on_handover: list[Callable[[], None]] = []

    @property
    def is_elastic(self) -> bool:
        """Return whether members may join and leave."""
        return self.membership.is_elastic

    @property
    def is_joining(self) -> bool:
        """Return whether an elastic team began before this rank came, and it has not joined yet."""
        return self.membership.is_joining

    @property
    def wants_change(self) -> bool:
        """Return whether a worker waits to join an elastic team."""
        return self.membership.wants_change

    @property
    def is_leaving(self) -> bool:
        """Return whether this rank was told to leave an elastic team."""
        return self.membership.is_leaving

    def leave(self) -> None:
        """Leave an elastic team for good: the others continue without this rank."""
        self.comm.close()
        self.membership.leave(finished=False)

    def finish(self) -> None:
        """Let an elastic team know that its run has ended: done to its end, or stopped."""
        self.membership.leave(finished=True)

    @property
    def name(self) -> str:
        """Return the name of this rank."""
        return self.membership.member

    @property
    def is_over(self) -> bool:
        """Return whether the generation is known to have ended: waiting in it is useless."""
        return self.membership.is_over

    def await_lease(self) -> None:
        """Return when this rank may commit; at once in a fixed team."""
        self.membership.await_lease()

    @property
    def is_first(self) -> bool:
        """Return whether this rank is the first of those that are present."""
        return self.rank == self.members[0]

    def declare(self, phase: str, done: int = 0) -> None:
        """Say what this rank is doing, for the case that others wait for it.

        Args:
            phase: ``TRAINING``, or in words of its own, such as ``saving``.
            done: Micro-batches that it has done since the last call.
        """
        self.membership.declare(phase, done)

    @contextmanager
    def in_phase(self, phase: str) -> Iterator[None]:
        """Say that this rank is doing something else for the length of a block."""
        before = self.membership.declare(phase)
        try:
            yield
        finally:
            self.membership.declare(before)

    def describe(self, facts: Mapping[str, Any]) -> None:
        """Say what must be the same on all workers of an elastic team, and is known only now."""
        self.membership.describe(facts)

    def announce(self, key: str, text: str) -> None:
        """Tell workers that join an elastic team later something of the run."""
        self.membership.announce(key, text)

    def announced(self, key: str, timeout_s: float = 0.0) -> str | None:
        """Return what the team has announced; see ``Membership.announced``."""
        return self.membership.announced(key, timeout_s)

    @property
    def away(self) -> frozenset[int]:
        """Return the ranks that are not present: parked or absent."""
        return frozenset(range(self.world_size)) - frozenset(self.members)

    @property
    def parked(self) -> frozenset[int]:
        """Return the ranks that wait to be called back."""
        return self.away - self.absent

    @property
    def absent(self) -> frozenset[int]:
        """Return the numbers that no member of an elastic team has."""
        return frozenset(range(self.world_size)) - frozenset(self.everyone)

    @property
    def fp16_ranks(self) -> list[int]:
        """Return the ranks that are present and compute in fp16."""
        return [rank for rank in self.members if self.people[rank].precision == "fp16"]

    @property
    def has_unlike_devices(self) -> bool:
        """Return whether ranks that are present compute on devices of several kinds."""
        present = [self.people[rank] for rank in self.members]
        return len({(one.device.partition(":")[0], one.device_name) for one in present}) > 1

    @property
    def has_ended(self) -> bool:
        """Return whether a connection was closed or lost."""
        return self.comm.has_ended or self.whole.has_ended

    def meet(self, people: Sequence[Member]) -> None:
        """Learn what the ranks are that are present, as they have introduced themselves.

        Of a rank that is gone, what it was stays known: summaries count what it has done.
        """
        known = {member.rank: member for member in people}
        before = self.people or [absent(rank) for rank in range(self.world_size)]
        self.people = tuple(known.get(rank, before[rank]) for rank in range(self.world_size))
        for rank, member in known.items():
            self.names[rank] = member.member
        self._report_waits()
        if self._twin is not None:
            self._twin.meet(people)

    def watch_waits(self, windows_s: Sequence[float]) -> None:
        """Let this rank say at the terminal for whom it waits, when it waits for long.

        Args:
            windows_s: Seconds that the latest windows took, kept by the engine.
        """
        self._windows_s = windows_s
        self._report_waits()
        if self._twin is not None:
            self._twin.watch_waits(windows_s)

    def _report_waits(self) -> None:
        if self.is_elastic:
            self.whole.report_waits_to(GenerationWatch(self.membership))
        elif self._windows_s is not None:
            watch = WaitWatch(self.rank, self.people, self._windows_s)
            self.whole.report_waits_to(watch)

    def introduce(self, greeting: Any, *, timeout_s: float | None = None) -> list[Any]:
        """Give every rank that is present each one's JSON, in rank order; all call it together."""
        return self.comm.all_gather_json(greeting, what="greetings", timeout_s=timeout_s)

    def hear(self, rank: int, told: Any, *, timeout_s: float | None = None) -> Any:
        """Return the JSON ``told`` of one rank; all that are present call it together."""
        return self.introduce(told, timeout_s=timeout_s)[self.members.index(rank)]

    def places(self) -> dict[int, str]:
        """Return the line of the user's code at which each rank is, where ranks can tell it."""
        try:
            told = self.comm.all_gather_bytes(
                here().encode(), what="places of ranks", timeout_s=min(10.0, self.comm.timeout_s)
            )
        except CollectiveError:
            return {}
        return {rank: place.decode() for rank, place in zip(self.members, told, strict=True)}

    def call_on_handover(self, function: Callable[[], None]) -> None:
        """Call ``function`` on the main rank before that is parked, or leaves for good."""
        self._on_handover.append(function)

    def hand_over(self) -> None:
        """Call the functions of ``call_on_handover``, newest first: another rank takes over."""
        for function in reversed(self._on_handover):
            function()

    # ── who is present ───────────────────────────────────────────────────────────────────────────

    def park(self, ranks: Collection[int]) -> None:
        """Let ranks leave all exchanges but that of rows; all that are present call it together."""
        members = tuple(member for member in self.members if member not in ranks)
        if self.rank in self.members:  # otherwise it has left them before
            old = self.comm
            places = [self.members.index(member) for member in members]
            self.comm = old.split(places, name="active") or self.whole
            self._let_go(old)
        self.members = members

    def rejoin(self) -> None:
        """Make all ranks present again."""
        self._let_go(self.comm)
        self.comm, self.members = self.whole, self.everyone

    def _let_go(self, comm: Communicator) -> None:
        if comm is not self.whole:
            self.sent_before += comm.sent_bytes
            comm.close()

    def form(self, formed: Formed) -> None:
        """Be the members of another generation of an elastic team."""
        formation = formed.formation
        self.sent_before += sum(comm.sent_bytes for comm in {self.comm, self.whole})
        self.comm = self.whole = formed.comm
        self.members = self.everyone = formation.numbers
        self.rank = self.membership.number
        self._report_waits()
        for rank, name in zip(formation.numbers, formation.members, strict=True):
            self.names[rank] = name

    def be_alone(self) -> None:
        """Have no part in any generation, as the team has continued without this rank."""
        self.sent_before += sum(comm.sent_bytes for comm in {self.comm, self.whole})
        self.comm = self.whole = SingleCommunicator(number=self.rank)
        self.members = self.everyone = (self.rank,)

    def let_go(self) -> None:
        """Close the connections, also those to parked ranks."""
        for comm in {self.comm, self.whole}:
            comm.close()
        if self._twin is not None:
            self._twin.let_go()

    def beside(self) -> "Team":
        """Return the same ranks once more, with connections of their own; all call it together."""
        self._twin = Team(self._split(), self.membership)
        self._twin.meet(self.people)
        return self._twin

    def form_beside(self) -> None:
        """Let those of ``beside``, if any, be the ranks of this generation, too; all call it."""
        if self._twin is not None:
            self._twin._follow(self)

    def _follow(self, team: "Team") -> None:
        self.sent_before += self.comm.sent_bytes
        self.comm = self.whole = team._split()
        self.members = self.everyone = team.members
        self.rank = team.rank
        self._report_waits()

    def _split(self) -> Communicator:
        comm = self.whole.split(range(self.whole.world_size), name="background")
        assert comm is not None
        return comm

    def stand_aside(self) -> None:
        """Be alone, as this rank's script is where the others have been before it joined."""
        self.comm = SingleCommunicator(number=self.rank)
        self.members = self.everyone = (self.rank,)

    def step_in(self) -> None:
        """End ``stand_aside``."""
        self.comm = self.whole
        self.members = self.everyone = self.whole.numbers

    def hurry(self, timeout_s: float) -> None:
        """Shorten the deadlines of exchanges, also of one that is under way."""
        self.comm.hurry(timeout_s)
        self.whole.hurry(timeout_s)
        if self._twin is not None:
            self._twin.hurry(timeout_s)

    def close(self) -> None:
        """Let the connections go, without waiting for any rank; idempotent."""
        self.let_go()
        self.membership.close()
