"""The ranks of a team: which are present, and the communicators between them."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from evener.comm.base import Communicator
from evener.team.members import Member
from evener.team.membership import Formed, Membership, WaitWatch


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
        member_by_rank: The member behind each rank, as it has introduced itself; see ``meet``.
        names: Each rank's name in events; empty if no worker has that number.
        comm: Joins the present ranks.
        whole: Joins ``everyone``.
        background: Joins ``everyone`` once more, for a thread; ``None`` if none needs it.
        gradients: Join the present ranks once more, for gradients that travel during backward;
            none if none do.
        membership: As given.
    """

    def __init__(self, comm: Communicator, membership: Membership | None = None) -> None:
        self.membership = membership or Membership(comm.rank, comm.world_size)
        self.rank = self.membership.number
        self.world_size = self.membership.most
        self.everyone = comm.numbers if self.is_elastic else tuple(range(comm.world_size))
        self.members = self.everyone
        self.member_by_rank: tuple[Member, ...] = ()
        self.names = [""] * self.world_size
        self.comm = self.whole = comm
        self.background: Communicator | None = None
        self.gradients: tuple[Communicator, ...] = ()
        self._windows_s: Sequence[float] = ()
        #: Bytes that this rank has sent through communicators that were let go.
        self._sent_before = 0
        self._on_handover: list[Callable[[], None]] = []

    @property
    def is_elastic(self) -> bool:
        """Return whether members may join and leave."""
        return self.membership.is_elastic

    @property
    def is_first(self) -> bool:
        """Return whether this rank is the first of those that are present."""
        return self.rank == self.members[0]

    @contextmanager
    def in_phase(self, phase: str) -> Iterator[None]:
        """Report another phase of this rank for the length of a block."""
        before = self.membership.declare(phase)
        try:
            yield
        finally:
            self.membership.declare(before)

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
        return [rank for rank in self.members if self.member_by_rank[rank].precision == "fp16"]

    @property
    def has_unlike_devices(self) -> bool:
        """Return whether ranks that are present compute on devices of several kinds."""
        present = [self.member_by_rank[rank] for rank in self.members]
        return len({(one.device.partition(":")[0], one.device_name) for one in present}) > 1

    @property
    def _connections(self) -> set[Communicator]:
        every = (self.comm, self.whole, self.background, *self.gradients)
        return {comm for comm in every if comm is not None}

    @property
    def has_ended(self) -> bool:
        """Return whether a connection was closed or lost."""
        return self.comm.has_ended or self.whole.has_ended

    @property
    def sent_bytes(self) -> int:
        """Return the bytes that this rank has sent so far."""
        return self._sent_before + sum(comm.sent_bytes for comm in self._connections)

    def meet(self, members: Sequence[Member]) -> None:
        """Store the members that are present, as they have introduced themselves.

        A rank that is gone keeps its last member: summaries count what that has done.
        """
        known = {member.rank: member for member in members}
        before = self.member_by_rank or [Member(rank=rank) for rank in range(self.world_size)]
        self.member_by_rank = tuple(
            known.get(rank, before[rank]) for rank in range(self.world_size)
        )
        for rank, member in known.items():
            self.names[rank] = member.member
        self._report_waits()

    def watch_waits(self, windows_s: Sequence[float]) -> None:
        """Let this rank notify the coordinator when it waits for long.

        Args:
            windows_s: Seconds that the latest windows took, kept by the engine.
        """
        self._windows_s = windows_s
        self._report_waits()

    def _report_waits(self) -> None:
        for comm in {self.whole, self.background or self.whole}:
            comm.report_waits_to(WaitWatch(self.membership, self._windows_s))

    def introduce(self, greeting: Any, *, timeout_s: float | None = None) -> list[Any]:
        """Give every rank that is present each one's JSON, in rank order; all call it together."""
        return self.comm.all_gather_json(greeting, what="greetings", timeout_s=timeout_s)

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
            places = [self.members.index(member) for member in members]
            active = self.comm.split(places, name="active")
            self._let_go_active()
            self.comm = active or self.whole
        self.members = members

    def rejoin(self) -> None:
        """Make all ranks present again."""
        self._let_go_active()
        self.comm, self.members = self.whole, self.everyone

    def _let_go_active(self) -> None:
        self.close_gradients()
        if self.comm is not self.whole:
            self._sent_before += self.comm.sent_bytes
            self.comm.close()

    def form(self, formed: Formed) -> None:
        """Use another generation's members, in an elastic team; all of them call it together."""
        formation = formed.formation
        self.rank = self.membership.number
        self._use(formed.comm, formation.numbers)
        for rank, name in zip(formation.numbers, formation.members, strict=True):
            self.names[rank] = name

    def be_alone(self) -> None:
        """Leave all generations, as the team has continued without this rank."""
        self._use(Communicator(number=self.rank), (self.rank,))

    def _use(self, comm: Communicator, ranks: tuple[int, ...]) -> None:
        self._sent_before = self.sent_bytes
        self.comm = self.whole = comm
        self.members = self.everyone = ranks
        self.gradients = ()
        if self.background is not None:
            self.open_background()
        self._report_waits()

    def open_background(self) -> None:
        """Connect the ranks once more, for a thread; all of them call it together."""
        everyone = range(self.whole.world_size)
        self.background = self.whole.split(everyone, name="background")

    def open_gradients(self) -> None:
        """Connect the present ranks twice more, for gradients; all of them call it together.

        While one piece waits for the other ranks' processors, the other one uses the link.
        """
        present = range(self.comm.world_size)
        for _ in range(2):
            comm = self.comm.split(present, name="gradients", reports_waits=False)
            assert comm is not None
            self.gradients = (*self.gradients, comm)

    def close_gradients(self) -> None:
        """End ``open_gradients``; idempotent."""
        for comm in self.gradients:
            self._sent_before += comm.sent_bytes
            comm.close()
        self.gradients = ()

    def stand_aside(self) -> None:
        """Exchange nothing, as this rank's script is where the others were before it joined."""
        self.comm = Communicator(number=self.rank)
        self.members = self.everyone = (self.rank,)

    def step_in(self) -> None:
        """End ``stand_aside``."""
        self.comm = self.whole
        self.members = self.everyone = self.whole.numbers

    def hurry(self, timeout_s: float) -> None:
        """Shorten the deadlines of exchanges, also of one that is under way."""
        for comm in self._connections:
            comm.hurry(timeout_s)

    def let_go(self) -> None:
        """Close the connections, also those to parked ranks."""
        for comm in self._connections:
            comm.close()

    def close(self) -> None:
        """Let the connections go, without waiting for any rank; idempotent."""
        self.let_go()
        self.membership.close()
