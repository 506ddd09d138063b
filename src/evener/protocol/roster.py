"""The members of a team, and when its next generation may form. Pure: time is a number.

The coordinator owns a ``Roster``. It reports events with their time to the roster, and sends the
messages that ``take`` returns. An event changes attributes of one worker. ``tick``, which ``take``
calls after events, then does everything that is due. Terms:

- A worker is *ready* when it waits for a generation: a joiner, or a member that has left its own.
- A generation is *over* when one of its members has left it or is lost. It then renews no lease.

A commit in generation g needs the rows of all members of g. So once a member has left g, windows
that it has not applied cannot be committed there: with it, g + 1 may form at once. A generation
without any member that holds state starts over. It forms only when no other worker can still
commit: each has left, its process has ended, or its lease has expired.

In a fixed team the fewest and most members are equal, and workers have given numbers. It forms one
generation, when all of them are ready.
"""

from collections import Counter, deque
from collections.abc import Container, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum, auto
from math import inf
from operator import attrgetter
from typing import Any, Final, NamedTuple

from evener.parsing import short
from evener.planning.silence import silence_deadline_s
from evener.protocol.formation import (
    NO_NUMBER,
    PARKED,
    TRAINING,
    WAITING,
    Deadlines,
    Formation,
    ProcessState,
    Standing,
)

#: Ranks that wait for the same rank report it within this time of one another.
_TELLING_S: Final = 1.0
#: Workers that start together connect within this time; nothing is printed before.
_SILENT_S: Final = 5.0


class Activity(Enum):
    """The activity of a worker, by its messages."""

    WORKING = auto()
    """It is in setup, or works in a generation. Only then its lease is renewed."""
    READY = auto()
    """It waits for a generation, and commits nothing in its previous one."""
    REFUSED = auto()
    """It was sent the reason why it cannot be in the team."""
    LEFT = auto()
    """It has left for good."""


class Trouble(Enum):
    """Why a worker is lost, unless it recovers in time. The value is the reason, for a message."""

    GONE = "its process has ended"
    STOPPED = "its process has been stopped for {:g} s (stopped_s)"
    DISCONNECTED = "its connection has ended and did not come back within {:g} s (reconnect_s)"
    SILENT = (
        "neither it nor its launcher has sent a heartbeat for {:g} s (host_lease_s): both are "
        "stopped, or their machine or the network to it has failed"
    )


@dataclass(slots=True, eq=False)
class Seat:
    """A worker. The roster writes the attributes.

    Attributes:
        member: Its id.
        session: A text that identifies its process; empty until it has connected.
        wish: The number that it gets if it is free: its last one, or its place on its launcher.
        number: Its number in the team.
        facts: Facts that must be the same on all workers.
        address: Address at which other workers reach it; empty if unknown.
        is_local: Whether only processes of its own machine reach it there.
        activity: Its activity.
        knows: Its last generation, by its own message or by one to it.
        standing: The state that it held when it became ready.
        unreached: Members of its last generation to which it could not connect.
        last_sent: By type, the last message to it, for types that are sent only once.
        lease_end_s: The last time at which it may commit; 0 once it has left its generation.
        micro_batches: Micro-batches that it has computed.
        phase: What it is doing, as text.
        advanced_s: When one of the two changed.
        named_s: The value of ``advanced_s`` when it was named as late, in this wait.
        heard_s: Time of its last heartbeat, or of its arrival.
        troubles: Its troubles, each with the time from which on it is lost, and why.
    """

    member: str
    session: str = ""
    wish: int = NO_NUMBER
    number: int = NO_NUMBER
    facts: Mapping[str, Any] = field(default_factory=dict)
    address: str = ""
    is_local: bool = False
    activity: Activity = Activity.WORKING
    knows: int = 0
    standing: Standing | None = None
    unreached: frozenset[str] = frozenset()
    last_sent: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    lease_end_s: float = 0.0
    micro_batches: int = 0
    phase: str = "joining"
    advanced_s: float = 0.0
    named_s: float | None = None
    heard_s: float = 0.0
    troubles: dict[Trouble, tuple[float, str]] = field(default_factory=dict)

    @property
    def can_join(self) -> bool:
        """Return whether it may be in the next generation."""
        return self.activity is Activity.READY and not self.troubles

    @property
    def is_connected(self) -> bool:
        """Return whether it has a connection, and its host has sent heartbeats."""
        return self.troubles.keys() <= {Trouble.STOPPED}

    def suffer(self, trouble: Trouble, since_s: float, patience_s: float = 0.0) -> None:
        """Note a trouble since ``since_s``, for which it is lost after ``patience_s``."""
        why = trouble.value.format(patience_s)
        self.troubles.setdefault(trouble, (since_s + patience_s, why))

    def why_lost(self, now_s: float) -> str:
        """Return why it is lost; empty while it is not."""
        if not self.troubles:
            return ""
        return next((why for since_s, why in self.troubles.values() if now_s >= since_s), "")

    def lives(self, now_s: float) -> bool:
        """Return whether it neither left nor is lost."""
        return self.activity is not Activity.LEFT and not self.why_lost(now_s)


class Outgoing(NamedTuple):
    """A message that follows from an event.

    Attributes:
        to: The recipient; empty for the terminal.
        type: ``formed``, ``over``, ``wanted``, ``left_out``, ``failed``, ``ended``; ``say`` for the
            terminal.
        content: Its content, as JSON.
    """

    to: str
    type: str
    content: Mapping[str, Any]


@dataclass(slots=True)
class Roster:
    """The state machine of membership.

    Each event takes the time in seconds, which must not decrease.

    Attributes:
        least: Fewest members of a generation.
        most: Most members of a generation.
        deadlines: The team's deadlines.
        started_s: When the coordinator started.
        is_fixed: Whether it is a fixed team.
        formation: The newest generation; ``None`` before the first.
        run_has_ended: Whether a member has left it because the run had ended.
        living: Ids of the workers that have neither left nor are lost, in the order of their
            arrival; as of the last tick.
    """

    least: int
    most: int
    deadlines: Deadlines
    started_s: float
    is_fixed: bool = False
    formation: Formation | None = None
    run_has_ended: bool = False
    living: tuple[str, ...] = ()
    _seats: dict[str, Seat] = field(default_factory=dict)
    _outgoing: list[Outgoing] = field(default_factory=list)
    _due_s: float | None = None  # time of the last event that is not processed yet
    _looked_s: float = 0.0
    #: When a supervisor last reported that a worker's process runs, also before it has arrived. A
    #: worker without a supervisor may be silent for long, for example while a call holds the GIL.
    _attended_s: dict[str, float] = field(default_factory=dict)
    _inside: frozenset[str] = frozenset()  # the members of the newest generation
    _leader: str = ""  # the worker that chooses the state to start over with, if no member is left
    _over: str = "it has not begun"  # why the newest generation is over; empty while it is not
    _over_s: float = 0.0
    _forgotten_lease_s: float = 0.0  # after it, no forgotten worker commits
    _arrival_s: float = 0.0  # when a worker became ready
    _short_s: float = 0.0  # since when too few workers are ready, as was printed
    _has_formed: bool = False  # a generation that this coordinator has formed
    _formed: Mapping[str, Any] = field(default_factory=dict)  # the newest generation, as a message
    _paces: deque[float] = field(default_factory=lambda: deque(maxlen=64))

    @property
    def generation(self) -> int:
        """Return the highest generation that has been formed; 0 for none."""
        return self.formation.generation if self.formation else 0

    @property
    def why_over(self) -> str:
        """Return why the newest generation is over; empty while it is not."""
        return self._over

    def number_of(self, member: str) -> int:
        """Return the number of a worker; ``NO_NUMBER`` while none is free."""
        return self._seats[member].number

    def is_open(self, now_s: float) -> bool:
        """Return whether generations may form.

        Members of a generation that an earlier coordinator formed reconnect first: otherwise a
        second team would commit windows that they have committed already.
        """
        return self.is_fixed or now_s - self.started_s >= self.deadlines.lease_s

    @property
    def missing(self) -> list[int]:
        """Return the numbers of a fixed team's workers that are not ready and were not."""
        present = {seat.wish for seat in self._seats.values() if seat.can_join or seat.knows}
        return sorted({*range(self.most)} - present)

    def knows(self, member: str) -> bool:
        """Return whether a worker has arrived and is not forgotten; only then it has events."""
        return member in self._seats

    def is_member(self, member: str) -> bool:
        """Return whether a worker is in the newest generation."""
        return member in self._inside

    def leads(self, member: str) -> bool:
        """Return whether a worker chooses the state with which a team without members starts over.

        It is the first living one. Facts of former members remain known; it chooses the others.
        """
        return member == self._leader

    def facts(self) -> Mapping[str, Any]:
        """Return the facts that must be the same on all members, as far as they are known."""
        return {name: fact for seat in self._members() for name, fact in seat.facts.items()}

    def take(self) -> list[Outgoing]:
        """Process the events since the last call; return the messages.

        A thousand members may leave a generation at the same moment. Each pass over all of them
        costs about a millisecond, so there is one pass for all events together.
        """
        if self._due_s is not None:
            self.tick(self._due_s)
        outgoing, self._outgoing = self._outgoing, []
        return outgoing

    # ── events ───────────────────────────────────────────────────────────────────────────────────

    def arrive(
        self,
        now_s: float,
        member: str,
        session: str,
        facts: Mapping[str, Any],
        held: Formation | None,
        wish: int = NO_NUMBER,
        address: str = "",
        is_local: bool = False,
    ) -> str:
        """Add a worker that has connected, for the first time or again.

        Args:
            now_s: The time.
            member: Its id.
            session: A text that identifies its process.
            facts: Facts that must be the same on all members.
            held: Its last generation, if any.
            wish: The number that it gets if it is free, such as its place on its launcher.
            address: Address at which other workers reach it.
            is_local: Whether only processes of its own machine reach it there.

        Returns:
            Why it is refused; empty if it is not.
        """
        if self._due_s is not None:  # the living workers must be known
            self.tick(now_s)
        new = Seat(member, session, wish, NO_NUMBER, facts, address, is_local, advanced_s=now_s)
        if self.is_fixed and (why := self._misfit(new)):
            return why
        before = self._seats.get(member, new)
        is_another = before.session not in ("", session)
        if is_another and before.is_connected:
            return f"another worker of this team is called {member!r}; set another EVENER_MEMBER"
        if why := self._difference(new) or self._mixture(new):
            return why
        if is_another:
            self._forget(before)  # so that the new worker is last in the order
            if self.is_member(member):
                self._end(now_s, f"{member} is another process now")
        seat = self._seats.setdefault(member, new)
        seat.session, seat.facts, seat.heard_s = session, facts, now_s
        seat.address, seat.is_local = address, is_local
        seat.knows = held.generation if held else 0
        for ended in (Trouble.DISCONNECTED, Trouble.GONE):
            seat.troubles.pop(ended, None)
        seat.last_sent.clear()  # messages may not have reached it
        if seat.activity is Activity.REFUSED:  # it may not have received the reason
            seat.activity = Activity.WORKING
        self.remember(now_s, held)
        self.tick(now_s)
        return ""

    def remember(
        self, now_s: float, held: Formation | None, facts: Mapping[str, Any] | None = None
    ) -> None:
        """Continue from a generation that an earlier coordinator has formed.

        Args:
            now_s: The time.
            held: A generation that a worker, a supervisor or the ledger has reported, if any.
            facts: Facts that must be the same on its members, if known.
        """
        if held is None or held.generation <= self.generation or self._has_formed:
            return
        self._begin(held)
        for member, number in zip(held.members, held.numbers, strict=True):
            if member not in self._seats:
                self._seats[member] = Seat(member, facts=facts or {}, advanced_s=now_s)
                # A reconnect may take as long as forming a generation.
                since_s = max(now_s, self.started_s + self.deadlines.lease_s)
                patience_s = self.deadlines.reconnect_s
                self._seats[member].suffer(Trouble.DISCONNECTED, since_s, patience_s)
            seat = self._seats[member]
            seat.number = seat.wish = number
            seat.lease_end_s = now_s + self.deadlines.lease_s

    def describe(self, now_s: float, member: str, facts: Mapping[str, Any]) -> None:
        """Add facts that must be the same on all members."""
        seat = self._seats[member]
        seat.facts = {**seat.facts, **facts}
        if why := self._difference(seat):
            self._refuse([member], "failed", why)
        self._due_s = now_s

    def depart(self, now_s: float, member: str) -> None:
        """Note that a worker's connection has ended; it may reconnect."""
        seat = self._seats.get(member)
        if seat is None or (self.is_fixed and seat.activity is Activity.LEFT):
            return
        seat.suffer(Trouble.DISCONNECTED, now_s, self.deadlines.reconnect_s)
        if self.is_fixed and self.formation is None:  # another process may take its place
            self._forget(seat)
        self._due_s = now_s

    def report(
        self,
        now_s: float,
        member: str,
        generation: int,
        standing: Standing | None,
        unreached: Iterable[str] = (),
    ) -> None:
        """Note that a worker waits for the next generation.

        Args:
            now_s: The time.
            member: Its id.
            generation: Its last generation; 0 for none.
            standing: The state that it holds; ``None`` without state.
            unreached: Members of that generation to which it could not connect.
        """
        seat = self._seats[member]
        if seat.activity is Activity.REFUSED:
            return
        if seat.activity is not Activity.READY:
            self._arrival_s = now_s
        seat.activity, seat.knows, seat.standing = Activity.READY, generation, standing
        seat.lease_end_s, seat.unreached = 0.0, frozenset(unreached)
        self._due_s = now_s

    def leave(self, now_s: float, member: str, *, finished: bool = False) -> None:
        """Note that a worker leaves for good, after its last window.

        Args:
            now_s: The time.
            member: Its id.
            finished: Whether the run has ended: it was completed, or the team was stopped.
        """
        seat = self._seats[member]
        seat.activity, seat.lease_end_s = Activity.LEFT, 0.0
        # Ranks need not leave a fixed team together at its end.
        if self.is_member(member) and not self.is_fixed:
            self.run_has_ended |= finished
            self._end(now_s, f"{member} left the team")
        self._due_s = now_s

    def beat(self, now_s: float, member: str, micro_batches: int, phase: str) -> bool:
        """Note a heartbeat; return whether it renews the member's lease."""
        seat = self._seats[member]
        seat.heard_s = now_s
        if micro_batches != seat.micro_batches:
            self._paces.append(now_s - seat.advanced_s)
        if self.is_fixed and phase == WAITING:  # the late rank may have been named before
            others = self._seats.values()
            if not any(one.phase == WAITING for one in others):
                for one in others:
                    one.named_s = None
        if (micro_batches, phase) != (seat.micro_batches, seat.phase):
            seat.micro_batches, seat.phase, seat.advanced_s = micro_batches, phase, now_s
        renews = seat.activity is Activity.WORKING and self.is_member(member) and not self._over
        if renews:
            seat.lease_end_s = now_s + self.deadlines.lease_s
        return renews

    def process(self, now_s: float, member: str, state: ProcessState, reason: str) -> None:
        """Note a supervisor's report of a worker's process."""
        if member not in self._seats:
            return
        seat = self._seats[member]
        if state is ProcessState.CONTINUED:
            seat.troubles.pop(Trouble.STOPPED, None)
        elif state is ProcessState.STOPPED:
            seat.suffer(Trouble.STOPPED, now_s, self.deadlines.stopped_s)
        else:
            seat.troubles[Trouble.GONE] = (now_s, reason or Trouble.GONE.value)
            seat.lease_end_s = 0.0
            # The worker has reported it itself, but perhaps to an earlier coordinator.
            self.run_has_ended |= state is ProcessState.FINISHED and self.is_member(member)
        self._due_s = now_s

    def attend(self, now_s: float, members: Iterable[str]) -> None:
        """Note the workers whose processes run, by their supervisor's repeated reports."""
        self._attended_s |= dict.fromkeys(members, now_s)

    # ── what is due ──────────────────────────────────────────────────────────────────────────────

    def tick(self, now_s: float) -> None:
        """Do what is due at this time."""
        self._due_s = None
        self._listen(now_s)
        for seat in self._members():
            if why := seat.why_lost(now_s):
                self._end(now_s, f"{seat.member} is lost: {why}")
        self._answer(now_s)
        self._consider_forming(now_s)
        self._sweep(now_s)
        living = tuple([seat.member for seat in self._seats.values() if seat.lives(now_s)])
        if living != self.living:
            self.living = living
            self._number(now_s, self._inside)
        is_headless = self.formation is not None and self._inside.isdisjoint(living)
        self._leader = living[0] if living and is_headless else ""
        self._inform(now_s)
        self._name_late(now_s)

    def _members(self) -> list[Seat]:
        members = self.formation.members if self.formation else ()
        return [self._seats[member] for member in members]

    def _listen(self, now_s: float) -> None:
        """Note which workers are silent.

        A worker may be silent for long. Its supervisor is another process of its host: both are
        silent only if the host or the network to it has failed, or if both are stopped.
        """
        was_stopped = now_s - self._looked_s > self.deadlines.lease_s  # this coordinator itself
        self._looked_s = now_s
        patience_s = self.deadlines.host_lease_s
        for seat in self._seats.values():
            if was_stopped:
                seat.heard_s = now_s  # messages of that time are not read yet
            if now_s - max(seat.heard_s, self._attended_s.get(seat.member, inf)) < patience_s:
                seat.troubles.pop(Trouble.SILENT, None)
                continue
            lived = seat.lives(now_s)
            seat.suffer(Trouble.SILENT, now_s - patience_s, patience_s)
            if lived:
                self._log(f"{seat.member} is lost: {seat.why_lost(now_s)}")

    def _end(self, now_s: float, why: str) -> None:
        if not self._over:
            self._over, self._over_s = why, now_s

    def _answer(self, now_s: float) -> None:
        """Send ready workers their generation, or that the team continued without them.

        The first message may not have reached them.
        """
        for seat in self._seats.values():
            if seat.activity is not Activity.READY:
                continue
            if not self.is_member(seat.member):
                if seat.standing is not None:
                    seat.activity = Activity.WORKING  # it asks again
                    self._send(seat.member, "left_out", {"generation": self.generation})
            elif seat.knows >= self.generation:
                self._end(now_s, f"{seat.member} has left it")
            elif not self._over:
                self._enter(seat)

    def _sweep(self, now_s: float) -> None:
        """Forget workers that are lost and not in the newest generation."""
        for seat in [*self._seats.values()]:
            if not (seat.lives(now_s) or seat.is_connected or self.is_member(seat.member)):
                self._forget(seat)

    def _forget(self, seat: Seat) -> None:
        self._forgotten_lease_s = max(self._forgotten_lease_s, seat.lease_end_s)
        del self._seats[seat.member]
        self.living = ()  # another worker may get the same place: numbers are assigned again

    def _number(self, now_s: float, first: Container[str]) -> None:
        """Assign a number to every living worker, as long as numbers are free.

        Workers in ``first`` come before others, and workers with a number before those without.
        """
        free, ascending = set(range(self.most)), iter(range(self.most))
        seats = [*self._seats.values()]
        seats.sort(key=lambda seat: (seat.member not in first, seat.number == NO_NUMBER))
        for seat in seats:
            seat.number = NO_NUMBER
            if free and seat.lives(now_s):
                if seat.wish not in free:
                    seat.wish = next(number for number in ascending if number in free)
                seat.number = seat.wish
                free.remove(seat.number)

    def _inform(self, now_s: float) -> None:
        """Notify workers that their generation shall end, or is over."""
        inside = self._inside
        waits = any(seat.can_join and seat.member not in inside for seat in self._seats.values())
        # If a team left its generation before the next one may form, it would wait idly.
        wanted = self.is_open(now_s) and len(inside) < (self.most if waits else self.least)
        # Members that leave a generation together need no message.
        is_due = self._over and (
            now_s - self._over_s >= self.deadlines.gather_s
            or any(seat.why_lost(now_s) for seat in self._members())
        )
        wish = {"value": wanted}
        for seat in self._seats.values():
            why = self._over if is_due else ""
            if seat.member in inside:
                self._send_if_new(seat, "wanted", wish)
            else:
                why = f"the team continued without {seat.member}, to generation {self.generation}"
            if seat.knows and why and seat.activity is Activity.WORKING:
                self._send_if_new(seat, "over", {"generation": seat.knows, "why": why})

    def _name_late(self, now_s: float) -> None:
        """Name living members for which others wait too long; do not end them.

        Ranks of a fixed team report only long waits, so a short time for the last report suffices.
        """
        waiting = [
            seat
            for seat in self._members()
            if seat.activity is Activity.READY or seat.phase == WAITING
        ]
        if not waiting:
            return
        first_s = min(seat.advanced_s for seat in waiting)
        deadline_s = _TELLING_S if self.is_fixed else silence_deadline_s(self._paces)
        for seat in self._awaited(now_s):
            since_s, silent_s = max(first_s, seat.advanced_s), now_s - seat.heard_s
            is_working = seat.phase not in (WAITING, PARKED) or self._over
            if is_working and now_s - since_s >= deadline_s and seat.named_s != seat.advanced_s:
                seat.named_s = seat.advanced_s
                names = [one.member for one in waiting]
                if self.is_fixed:
                    names = [f"rank {number}" for number in sorted(one.number for one in waiting)]
                    whom = f"rank {seat.number} ({seat.member}); `py-spy dump` shows what it does"
                else:
                    last = f"; its last heartbeat came {silent_s:.0f} s ago" if silent_s > 1 else ""
                    whom = (
                        f"{seat.member}, which has made no progress for {now_s - since_s:.0f} s "
                        f"(it is {seat.phase}, after {seat.micro_batches} micro-batches{last})"
                    )
                verb = "wait" if names[1:] else "waits"
                self._log(f"{_name(names)} {verb} for {whom}; they do so until timeout_s is over")

    def _awaited(self, now_s: float) -> list[Seat]:
        """Return the living members that have not left the newest generation."""
        return [
            seat
            for seat in self._members()
            if seat.activity is Activity.WORKING and seat.lives(now_s)
        ]

    # ── the next generation ──────────────────────────────────────────────────────────────────────

    def _consider_forming(self, now_s: float) -> None:
        """Form the next generation, or refuse workers for which it cannot form."""
        if not (self._over and self.is_open(now_s)):
            return
        is_patient = now_s - self._over_s < self.deadlines.timeout_s
        if is_patient and self._awaited(now_s):
            return
        self._part()
        ready = [seat.member for seat in self._seats.values() if seat.can_join]
        if not ready:
            return
        if self.run_has_ended and not any(map(self.is_member, ready)):
            # They would train a finished run again. A script of its members may begin another run.
            why = (
                f"the team's run has ended, in generation {self.generation}: it was completed or "
                "stopped; to train another run, start another coordinator (with its own ledger, "
                "if any)"
            )
            self._refuse(ready, "ended", why)
            return
        members = [seat for seat in self._members() if seat.can_join]
        standings = {seat.member: seat.standing for seat in members if seat.standing is not None}
        if any(held.phase != TRAINING for held in standings.values()):
            # No worker can join now, for example in an evaluation. The remaining members continue
            # alone, even if they are fewer than the least: their next window ends the generation.
            ready = [*standings]
        elif len(ready) < self.least:
            self._wait_for_more(now_s, ready)
            return
        is_gathered = len(ready) >= self.most or now_s >= self._arrival_s + self.deadlines.gather_s
        leases_s = [seat.lease_end_s for seat in self._seats.values()]
        are_expired = now_s >= max([self._forgotten_lease_s, *leases_s])
        if standings or (is_gathered and are_expired):
            self._form(now_s, ready, standings)

    def _part(self) -> None:
        """Refuse ready members that could not connect to others, until all remaining ones could.

        Which end of a broken connection is at fault is unknown. So the newest worker is refused,
        and workers without state before members that train, so that a joiner never ends a team. A
        worker without connections to several others is refused before those.
        """
        ready = {seat.member: seat for seat in self._members() if seat.can_join}
        order = {member: place for place, member in enumerate(ready)}
        broken = {
            frozenset((seat.member, other))
            for seat in ready.values()
            for other in seat.unreached & ready.keys() - {seat.member}
        }
        while broken:
            num_broken = Counter(member for pair in broken for member in pair)
            joiners = [member for member in num_broken if ready[member].standing is None]
            parted = max(joiners or num_broken, key=lambda m: (num_broken[m], order[m]))
            others = [m for m in ready if frozenset((parted, m)) in broken]
            self._refuse([parted], "failed", self._why_parted(ready[parted], others))
            broken = {pair for pair in broken if parted not in pair}

    def _why_parted(self, parted: Seat, others: list[str]) -> str:
        def place(member: str) -> str:
            address = self._seats[member].address
            return f"{member} (at {address})" if address else member

        far = [m for m in others if m in parted.unreached]
        near = [m for m in others if parted.member in self._seats[m].unreached]
        ways = [
            f"it does not reach {_name([*map(place, far)])}" if far else "",
            f"{_name(near)} {'do' if near[1:] else 'does'} not reach it" if near else "",
        ]
        why = (
            f"{place(parted.member)} reaches the coordinator, but not the other workers: "
            f"{' and '.join(filter(None, ways))}; let the workers' machines connect to one another "
            "(firewall, routes), or give the address that the others reach (--address)"
        )
        self._log(f"{why}; the team forms without it")
        return why

    def _mixture(self, new: Seat) -> str:
        """Return why a worker's address does not match those of the others; empty if it does."""
        seats = (self._seats[member] for member in self.living if member != new.member)
        other = next((seat for seat in seats if seat.address), None)  # like all others
        if not new.address or other is None or other.is_local == new.is_local:
            return ""
        local, far = (new, other) if new.is_local else (other, new)
        return (
            f"{local.member} is reached at {local.address}, where only its own machine connects, "
            f"and {far.member} at {far.address}; let all workers connect to an address of the "
            "coordinator that every machine reaches (`evener coordinator --bind`), or start "
            f"{local.member} with its address (--address)"
        )

    def _wait_for_more(self, now_s: float, ready: list[str]) -> None:
        if self.is_fixed:  # each rank has its own deadline, and then asks for the missing ranks
            return
        since_s, timeout_s = max(self._arrival_s, self._over_s), self.deadlines.timeout_s
        few = f"{len(ready)} of at least {self.least} workers"
        if now_s - since_s >= timeout_s:
            why = (
                f"only {few} came within {timeout_s:g} s (timeout_s); start more workers, or "
                "allow fewer (--elastic MIN:MAX)"
            )
            self._log(why)
            self._refuse(ready, "failed", why)
        elif now_s - since_s >= _SILENT_S and self._short_s != since_s:
            self._short_s = since_s
            self._log(f"{few} are ready; the team waits {timeout_s:g} s for more (timeout_s)")

    def _refuse(self, members: Iterable[str], kind: str, why: str) -> None:
        for member in members:
            self._seats[member].activity = Activity.REFUSED
            self._send(member, kind, {"why": why})

    def _form(self, now_s: float, ready: list[str], standings: dict[str, Standing]) -> None:
        before = self._members()
        joiners = [member for member in ready if member not in standings]
        if self.formation is None:
            # By number, so that rank 0 is the main process; workers without one come last. Later
            # the order is that of arrival. Otherwise, if no member holds state, the first worker
            # could be one that was parked and holds an older state.
            joiners.sort(key=lambda m: self._seats[m].number % (self.most + 1))
        members = tuple([*standings, *joiners][: self.most])
        best = max(standings.values(), key=attrgetter("applied", "committed"), default=None)
        source = next((m for m, held in standings.items() if held is best), members[0])
        same = {m for m, held in standings.items() if best and held.is_as(best)}
        if before and not standings and not self.run_has_ended:
            self._log(
                f"no member is left that holds the state of generation {self.generation}, so the "
                "next one begins with a checkpoint that its first worker loads, or from the start"
            )
        self._number(now_s, frozenset(members))
        unheard_s = [self._over_s - seat.heard_s for seat in before if seat.why_lost(now_s)]
        self._begin(
            Formation(
                generation=self.generation + 1,
                members=members,
                numbers=tuple(self._seats[member].number for member in members),
                base=best.applied if best else 0,
                has_state=best is not None,
                source=source,
                receivers=tuple(m for m in members if m not in same and m != source),
                detect_s=max([0.0, *unheard_s]),
            )
        )
        self._has_formed = True
        for seat in self._members():
            self._enter(seat)

    def _begin(self, formation: Formation) -> None:
        self.formation, self._inside = formation, frozenset(formation.members)
        self._over, self.run_has_ended = "", False

    def _misfit(self, new: Seat) -> str:
        """Return why a worker cannot be in this fixed team; empty if it can.

        With ranks of different world sizes the team cannot become complete, so all are refused.
        """
        others = [seat for seat in self._seats.values() if seat.session != new.session]
        for seat in others:
            ranks = sorted((one.wish, one.facts["world_size"]) for one in (seat, new))
            (rank, size), (other, their_size) = ranks
            if size != their_size:
                why = (
                    f"rank {rank} was started for {size} ranks and rank {other} for {their_size}: "
                    "give all the same world size (WORLD_SIZE)"
                )
                if self.formation is None:
                    self._refuse(list(self._seats), "failed", why)
                return why
            if rank == other:
                return (
                    f"two processes were started as rank {rank}, {seat.member} and {new.member}: "
                    "give each process of a team a different number (RANK)"
                )
        return ""

    def _difference(self, seat: Seat) -> str:
        """Return the fact in which a worker differs from another, and the remedy; empty if none."""
        # The facts of the team's members count; before that, those of the first workers. A worker
        # that is not in the team, and differs, must not end a member.
        is_inside = self.is_member(seat.member)
        for others in (self._members(), [] if is_inside else self._seats.values()):
            for other in others:
                if other.member == seat.member or other.activity is Activity.REFUSED:
                    continue
                if other.facts != seat.facts and (why := _describe_difference(seat, other)):
                    return why
        return ""

    # ── messages ─────────────────────────────────────────────────────────────────────────────────

    def _enter(self, seat: Seat) -> None:
        assert self.formation is not None
        seat.activity, seat.knows, seat.unreached = Activity.WORKING, self.generation, frozenset()
        seat.last_sent.clear()
        if self._formed.get("generation") != self.generation:
            self._formed = asdict(self.formation)
        self._send(seat.member, "formed", self._formed)

    def _send_if_new(self, seat: Seat, kind: str, content: Mapping[str, Any]) -> None:
        """Send a message, unless it was the last one of its type on this connection."""
        if seat.last_sent.get(kind) != content:
            seat.last_sent[kind] = content
            self._send(seat.member, kind, content)

    def _send(self, member: str, kind: str, content: Mapping[str, Any]) -> None:
        self._outgoing.append(Outgoing(member, kind, content))

    def _log(self, text: str) -> None:
        self._send("", "say", {"text": text})


def _name(members: list[str]) -> str:
    """Return the names of workers; if there are many, the first ones."""
    rest = f" and {len(members) - 3} more" if len(members) > 4 else ""
    names = members[:3] if rest else members
    return f"{', '.join(names)}{rest}" if rest else " and ".join(names)


def _describe_difference(seat: Seat, other: Seat) -> str:
    for name in sorted(seat.facts.keys() & other.facts.keys()):
        mine, theirs = seat.facts[name], other.facts[name]
        if mine != theirs:
            return (
                f"{name} of {seat.member} is {short(mine)}, and that of {other.member} in "
                f"the team is {short(theirs)}; start every worker with the same code, "
                "options, data and versions"
            )
    return ""
