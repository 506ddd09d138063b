"""The members of an elastic team, and when its next generation may form. Pure: time is a number.

The coordinator owns a ``Roster``. It reports events with their time to the roster, and sends the
messages that ``take`` returns. Terms:

- A worker is *ready* when it waits for a generation: a joiner, or a member that has left its own.
- A generation is *over* when one of its members has left it or is lost. It then renews no lease.

A commit in generation g needs the rows of all members of g. So once a member has left g, nothing
that it has not applied can be committed there: with it, g + 1 may form at once. A generation
without any member that holds state starts over. It forms only when no other worker can still
commit: each has left, its process has ended, or its lease has run out.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

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
    formation_fields,
)
from evener.protocol.seats import Seat

_MOST_PACES: Final = 64
#: Workers that start together arrive within so long; nothing is printed before.
_SILENT_S: Final = 5.0


class Outgoing(NamedTuple):
    """A message that follows from an event.

    Attributes:
        to: The member that it is for; empty for the terminal.
        type: ``formed``, ``over``, ``wanted``, ``left_out``, ``failed``, ``ended``; ``say`` for the
            terminal.
        content: What it says, as JSON.
    """

    to: str
    type: str
    content: Mapping[str, Any]


@dataclass(slots=True)
class Roster:
    """The state machine of membership.

    Each event takes the time, in seconds, which must not go back.

    Attributes:
        least: Fewest members of a generation.
        most: Most members of a generation.
        deadlines: Those of the team.
        started_s: When the coordinator started.
        formation: The newest generation; ``None`` before the first.
    """

    least: int
    most: int
    deadlines: Deadlines
    started_s: float
    formation: Formation | None = None
    _seats: dict[str, Seat] = field(default_factory=dict)
    _outgoing: list[Outgoing] = field(default_factory=list)
    _looked_s: float = 0.0
    _awake_s: float = 0.0  # since when the coordinator has not been stopped itself
    _over: str = ""  # why the newest generation is over
    _over_s: float = 0.0
    _older_lease_s: float = 0.0  # no member of an older generation commits later
    _was_told: bool = False  # members were told that it is over
    _named: set[str] = field(default_factory=set)  # those that were named at the terminal
    _wanted: bool = False
    _arrival_s: float = 0.0
    _short_s: float | None = None  # since when too few workers are ready
    _said_short: bool = False
    _has_formed: bool = False  # a generation that this coordinator has formed
    #: Members of a generation that one of them has left because the run had ended.
    _finished: frozenset[str] = frozenset()
    _paces: deque[float] = field(default_factory=lambda: deque(maxlen=_MOST_PACES))

    @property
    def generation(self) -> int:
        """Return the highest generation that has been formed; 0 for none."""
        return self.formation.generation if self.formation else 0

    def number_of(self, member: str) -> int:
        """Return the number of a worker; ``NO_NUMBER`` as long as others have them all."""
        return self._seats[member].number

    def is_open(self, now_s: float) -> bool:
        """Return whether generations may form.

        Members of a generation that an earlier coordinator formed come back first: a new team
        beside theirs would commit windows that they have committed, too.
        """
        return now_s - self.started_s >= self.deadlines.lease_s

    def knows(self, member: str) -> bool:
        """Return whether a worker has arrived and is not forgotten; only such have events."""
        return member in self._seats

    def living(self, now_s: float) -> list[str]:
        """Return the ids of the workers that have come, and neither left nor are lost."""
        seats = self._seats.values()
        return [s.member for s in seats if not (s.has_left or s.why_lost(now_s, self.deadlines))]

    def is_member(self, member: str) -> bool:
        """Return whether a worker is in the newest generation."""
        return self.formation is not None and member in self.formation.members

    def leads(self, now_s: float, member: str) -> bool:
        """Return whether a worker decides how a team starts over that has no member left.

        It is the first one that lives. What members have told remains known: this is for what
        they could not tell any more.
        """
        seats = {seat.member: seat for seat in self._all() if not self._is_lost(now_s, seat)}
        if self.formation is None or not seats.keys().isdisjoint(self.formation.members):
            return False
        return member == next(iter(seats), "")

    def take(self) -> list[Outgoing]:
        """Return the messages since the last call."""
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
    ) -> str:
        """Take in a worker that has connected, for the first time or again.

        Args:
            now_s: The time.
            member: Its id.
            session: A text that only this process of that id has.
            facts: What must be the same on all members.
            held: The last generation that it was in, where there is one.
            wish: The number that it has if that is free, such as its place on its launcher.

        Returns:
            Why it is refused; empty if it is not.
        """
        seat = self._seats.get(member)
        is_another = seat is not None and seat.session not in ("", session)
        if seat is not None and is_another and seat.is_connected:
            return (
                f"another worker of this team is called {member!r}; give each worker a name of "
                "its own (EVENER_MEMBER)"
            )
        new = Seat(member, session, wish=wish, facts=facts, advanced_s=now_s)
        if why := self._difference(new):
            return why
        if seat is None or is_another:
            if seat is not None and self.is_member(member):  # its process has been replaced
                self._older_lease_s = max(self._older_lease_s, seat.lease_end_s)
                self._end(now_s, f"{member} is another process now", tell=True)
            self._seats.pop(member, None)  # so that the new worker is the last in the order
            self._seats[member] = new
        seat = self._seats[member]
        seat.connect(now_s, session, facts)
        self.remember(now_s, held)
        if seat.number == NO_NUMBER:
            seat.give_number(self._free_number(seat.wish))
        if self.is_member(member):
            self._send(member, "wanted", {"value": self._wanted})
            if self._was_told:
                self._send(member, "over", self._why_over())
        elif held is not None:
            why = f"the team continued without {member}, to generation {self.generation}"
            self._send(member, "over", {"generation": held.generation, "why": why})
        self._consider(now_s)
        return ""

    def remember(self, now_s: float, held: Formation | None) -> None:
        """Continue from a generation that a coordinator before this one has formed.

        Args:
            now_s: The time.
            held: A generation that a worker or a supervisor has heard of, where there is one.
        """
        if held is None or held.generation <= self.generation or self._has_formed:
            return
        self.formation = replace(held, lease_s=self.deadlines.lease_s)
        self._over, self._was_told, self._finished = "", False, frozenset()
        for member, number in zip(held.members, held.numbers, strict=True):
            if member not in self._seats:
                self._seats[member] = Seat(member, advanced_s=now_s)
                # It may take as long to come back as generations take to form again.
                came_s = self.started_s + self.deadlines.lease_s
                self._seats[member].disconnect(max(now_s, came_s))
            seat = self._seats[member]
            seat.lease(now_s + self.deadlines.lease_s)
            if seat.ready and seat.knows < held.generation:
                seat.work(number)
                self._send_formation(member)
            seat.give_number(number)
        for seat in self._all():
            if seat.ready and seat.standing is not None and not self.is_member(seat.member):
                self._leave_out(seat)

    def describe(self, now_s: float, member: str, facts: Mapping[str, Any]) -> None:
        """Take in more of what must be the same on all members."""
        seat = self._seats[member]
        seat.describe(facts)
        if why := self._difference(seat):
            seat.refuse(why)
            self._send(member, "failed", {"why": why})
        self._consider(now_s)

    def depart(self, now_s: float, member: str, session: str) -> None:
        """Note that a worker's connection has ended; it may come again."""
        seat = self._seats.get(member)
        if seat is not None and seat.session == session:
            seat.disconnect(now_s)
            self._consider(now_s)

    def report(self, now_s: float, member: str, generation: int, standing: Standing | None) -> None:
        """Note that a worker waits for the next generation.

        Args:
            now_s: The time.
            member: Its id.
            generation: The last generation that it was in; 0 for none.
            standing: What it holds; ``None`` without state.
        """
        seat = self._seats[member]
        if seat.refused:
            self._send(member, "failed", {"why": seat.refused})
            return
        is_member = self.is_member(member)
        if is_member and not self._over and generation < self.generation:
            self._send_formation(member)  # the first message did not reach it
            return
        # A restarted coordinator may still learn of the generation in which this worker was.
        is_known = self.is_open(now_s) or self.formation is not None
        if standing is not None and not is_member and is_known:
            self._send(member, "left_out", {"generation": self.generation})
            return
        if not seat.ready:
            self._arrival_s = now_s
        seat.wait(generation, standing)
        if is_member:
            self._end(now_s, f"{member} has left it", tell=False)
        self._consider(now_s)

    def leave(self, now_s: float, member: str, *, finished: bool = False) -> None:
        """Note that a worker leaves for good, after its last window.

        Args:
            now_s: The time.
            member: Its id.
            finished: Whether the run has ended: it was done to its end, or the team was stopped.
        """
        seat = self._seats[member]
        seat.leave()
        if self.is_member(member):
            if finished:
                self._finished |= {one.member for one in self._members()}
            self._end(now_s, f"{member} left the team", tell=False)
        self._consider(now_s)

    def beat(self, now_s: float, member: str, micro_batches: int, phase: str) -> bool:
        """Note a heartbeat; return whether it renews the member's lease."""
        seat = self._seats[member]
        if seat.number == NO_NUMBER:
            seat.give_number(self._free_number(seat.wish))
        pace_s = seat.advance(now_s, micro_batches, phase)
        if pace_s is not None:
            self._paces.append(pace_s)
        if seat.advanced_s == now_s:  # a worker that advances is slow, not dead
            self._named.discard(member)
        if self._over or not self.is_member(member) or seat.ready:
            return False
        seat.lease(now_s + self.deadlines.lease_s)
        return True

    def process(self, now_s: float, member: str, state: ProcessState, reason: str = "") -> None:
        """Note what a supervisor reports of a worker's process."""
        seat = self._seats.get(member)
        if seat is None:
            return
        if state in (ProcessState.GONE, ProcessState.FINISHED):
            seat.end(reason or "its process has ended")
            # The worker has told so itself, unless that was to a coordinator before this one.
            if state is ProcessState.FINISHED and self.is_member(member):
                self._finished |= {one.member for one in self._members()}
        elif state is ProcessState.CONTINUED:
            seat.continue_()
        else:
            seat.stop(now_s)
        self._consider(now_s)

    def attend(self, now_s: float, members: Iterable[str]) -> None:
        """Note the workers whose processes run, as their supervisor reports again and again."""
        for member in members:
            if member in self._seats:
                self._seats[member].attended_s = now_s

    def tick(self, now_s: float) -> None:
        """Note that time has passed."""
        self._consider(now_s)

    # ── the end of a generation ──────────────────────────────────────────────────────────────────

    def _consider(self, now_s: float) -> None:
        if now_s - self._looked_s > self.deadlines.lease_s:
            self._awake_s = now_s  # it was stopped, so what was sent meanwhile is yet to be heard
        self._looked_s = now_s
        for seat in self._all():
            if seat.falls_silent(now_s, self._awake_s, self.deadlines):
                self._say(f"{seat.member} is lost: {seat.why_lost(now_s, self.deadlines)}")
        for seat in self._members():
            if why := seat.why_lost(now_s, self.deadlines):
                self._end(now_s, f"{seat.member} is lost: {why}", tell=True)
        if self._over and now_s - self._over_s >= self.deadlines.gather_s:
            self._tell_over()
        self._sweep(now_s)
        self._tell_wanted(now_s)
        if self._may_form(now_s):
            self._form(now_s)
        elif self._over:
            self._name_awaited(now_s)
        else:
            self._name_idle(now_s)

    def _members(self) -> list[Seat]:
        return [
            self._seats[member] for member in (self.formation.members if self.formation else ())
        ]

    def _end(self, now_s: float, why: str, *, tell: bool) -> None:
        if not self._over:
            self._over, self._over_s = why, now_s
        if tell:
            self._tell_over()

    def _tell_over(self) -> None:
        if not self._was_told:
            self._was_told = True
            for seat in self._members():
                if not seat.ready:
                    self._send(seat.member, "over", self._why_over())

    def _why_over(self) -> dict[str, Any]:
        return {"generation": self.generation, "why": self._over}

    def _sweep(self, now_s: float) -> None:
        """Forget workers that are lost and not in the newest generation."""
        for seat in [*self._seats.values()]:
            is_lost = seat.has_left or (
                not seat.is_connected and seat.why_lost(now_s, self.deadlines)
            )
            if is_lost and not self.is_member(seat.member):
                del self._seats[seat.member]

    def _tell_wanted(self, now_s: float) -> None:
        members = self._members()
        waits = any(seat.can_join and not self.is_member(seat.member) for seat in self._all())
        # If a team left its generation before the next one may form, it would only wait.
        may_form = self.is_open(now_s)
        wanted = may_form and 0 < len(members) < (self.most if waits else self.least)
        if wanted != self._wanted:
            self._wanted = wanted
            for seat in members:
                self._send(seat.member, "wanted", {"value": wanted})

    def _name_awaited(self, now_s: float) -> None:
        """Name living members that do not leave a generation that is over; end none of them."""
        deadline_s = silence_deadline_s(self._paces)
        for seat in self._awaited(now_s):
            silent_s = now_s - max(self._over_s, seat.advanced_s)
            if silent_s >= deadline_s and seat.member not in self._named:
                self._named.add(seat.member)
                self._say(
                    f"generation {self.generation} is over ({self._over}), and {seat.member} has "
                    f"not left it for {silent_s:.0f} s (it is {seat.phase}, after "
                    f"{seat.micro_batches} micro-batches); the team waits for it until "
                    f"{self.deadlines.timeout_s:g} s are over (timeout_s)"
                )

    def _name_idle(self, now_s: float) -> None:
        """Name members that make no progress while others wait for them; end none of them."""
        waiting = [seat for seat in self._members() if seat.phase == WAITING]
        if not waiting:
            return
        deadline_s = silence_deadline_s(self._paces)
        first_s = min(seat.advanced_s for seat in waiting)
        for seat in self._members():
            idle_s = now_s - max(first_s, seat.advanced_s)
            is_working = seat.phase not in (WAITING, PARKED)
            if is_working and idle_s >= deadline_s and seat.member not in self._named:
                self._named.add(seat.member)
                silent_s = now_s - seat.heard_s
                last = f"; its last heartbeat came {silent_s:.0f} s ago" if silent_s > 1 else ""
                self._say(
                    f"{' and '.join(one.member for one in waiting)} wait for {seat.member}, which "
                    f"has made no progress for {idle_s:.0f} s (it is {seat.phase}, after "
                    f"{seat.micro_batches} micro-batches{last}); this ends nothing before "
                    "timeout_s of the exchange"
                )

    def _awaited(self, now_s: float) -> list[Seat]:
        """Return the living members that have not left the newest generation."""
        return [seat for seat in self._members() if not (seat.ready or self._is_lost(now_s, seat))]

    def _is_lost(self, now_s: float, seat: Seat) -> bool:
        return bool(seat.has_left or seat.why_lost(now_s, self.deadlines))

    # ── the next generation ──────────────────────────────────────────────────────────────────────

    def _all(self) -> list[Seat]:
        return list(self._seats.values())

    def _may_form(self, now_s: float) -> bool:
        if not self.is_open(now_s):
            return False
        formation = self.formation
        num_ready = sum(seat.can_join for seat in self._all())
        if formation is not None and not self._over:
            return False
        is_patient = now_s - self._over_s < self.deadlines.timeout_s
        if formation is not None and is_patient and self._awaited(now_s):
            return False
        if self._is_finished():
            self._refuse_ready(
                f"the team's run has ended, in generation {self.generation}: it was done to its "
                "end, or stopped. Nothing is left to do for workers that come later; to train "
                "another run, restart its coordinator",
                "ended",
            )
            return False
        if num_ready < self.least and self._takes_joiners:
            self._wait_for_more(now_s, num_ready)
            return False
        self._short_s = None
        if formation is None:
            gathered = now_s - self._arrival_s >= self.deadlines.gather_s
            return num_ready >= self.most or gathered
        members = self._members()
        if any(seat.can_join and seat.standing is not None for seat in members):
            return True
        latest_s = max((seat.lease_end_s for seat in members if seat.may_commit), default=0.0)
        return now_s >= max(latest_s, self._older_lease_s)

    @property
    def _takes_joiners(self) -> bool:
        """Return whether a joiner can follow all members that hold state.

        Elsewhere, such as in an evaluation, those who remain continue alone, even where they are
        fewer than the least: their next window ends the generation.
        """
        standings = [seat.standing for seat in self._members() if seat.can_join]
        return all(one is None or one.phase == TRAINING for one in standings)

    def _wait_for_more(self, now_s: float, num_ready: int) -> None:
        if not num_ready:
            self._short_s = None
        elif self._short_s is None:
            self._short_s, self._said_short = now_s, False
        elif not self._said_short and now_s - self._short_s >= _SILENT_S:
            self._said_short = True
            self._say(
                f"{num_ready} of at least {self.least} workers are ready; the team waits "
                f"{self.deadlines.timeout_s:g} s for more (timeout_s)"
            )
        elif now_s - self._short_s >= self.deadlines.timeout_s:
            self._short_s = None
            why = (
                f"only {num_ready} of at least {self.least} workers came within "
                f"{self.deadlines.timeout_s:g} s (timeout_s); start more workers, or allow fewer "
                "(--elastic MIN:MAX)"
            )
            self._say(why)
            self._refuse_ready(why)

    @property
    def run_has_ended(self) -> bool:
        """Whether a member has left because the run had ended, and no generation formed since."""
        return bool(self._finished)

    def _is_finished(self) -> bool:
        """Return whether only workers are ready that would train a finished run once more.

        A script may begin another run: its workers were members before.
        """
        ready = [seat for seat in self._all() if seat.can_join]
        return bool(ready and self._finished) and not any(
            seat.standing is not None or seat.member in self._finished for seat in ready
        )

    def _refuse_ready(self, why: str, kind: str = "failed") -> None:
        for seat in self._all():
            if seat.can_join:
                seat.refuse(why)
                self._send(seat.member, kind, {"why": why})

    def _form(self, now_s: float) -> None:
        before = self._members()
        ready = {seat.member: seat for seat in self._all() if seat.can_join}
        standings = {m.member: m.standing for m in before if m.member in ready and m.standing}
        joiners = [m for m in ready if m not in standings and self._takes_joiners]
        if self.formation is None:
            # By number, so that rank 0 is the main process; workers without one come last. Later
            # the order is that of arrival: if no member holds state, the first worker may be one
            # that was parked and holds an older state, and its replacement would send a new one.
            joiners.sort(key=lambda m: ready[m].number % (self.most + 1))
        order = [*standings, *joiners]
        members = tuple(order[: self.most])
        held = {m: (s.applied, s.committed) for m, s in standings.items()}
        donor = max(held, key=held.__getitem__, default=members[0])
        base, _ = held.get(donor, (0, 0))
        same = {
            m
            for m, s in standings.items()
            if (s.applied, s.digest) == (base, standings[donor].digest)
        }
        for seat in before:
            if seat.member not in members:
                seat.give_up_number()
                if seat.may_commit:
                    self._older_lease_s = max(self._older_lease_s, seat.lease_end_s)
        lost = [seat for seat in before if seat.why_lost(now_s, self.deadlines)]
        self._number([ready[member] for member in members])
        if before and not standings and not self._finished:
            self._say(
                f"no member is left that holds the state of generation {self.generation}, so the "
                "next one begins with what its first worker loads, or anew"
            )
        self._has_formed, self._finished = True, frozenset()
        self.formation = Formation(
            generation=self.generation + 1,
            members=members,
            numbers=tuple(ready[member].number for member in members),
            base=base,
            has_state=bool(standings),
            donor=donor,
            receivers=tuple(m for m in members if m not in same and m != donor),
            lease_s=self.deadlines.lease_s,
            detect_s=max([0.0, *(self._over_s - seat.heard_s for seat in lost)]),
        )
        self._over, self._was_told = "", False
        self._named.clear()
        for seat in self._members():
            seat.work(seat.number)
            # The member's own lease begins with a heartbeat; this one counts if the coordinator
            # gets none.
            seat.lease(now_s + self.deadlines.lease_s)
            self._send_formation(seat.member)
        for seat in self._all():
            if seat.ready and seat.standing is not None and not self.is_member(seat.member):
                self._leave_out(seat)
        self._sweep(now_s)
        self._wanted = False  # the order in which members enter a generation
        self._tell_wanted(now_s)

    def _leave_out(self, seat: Seat) -> None:
        self._send(seat.member, "left_out", {"generation": self.generation})
        seat.work(seat.number)  # it asks again

    def _difference(self, seat: Seat) -> str:
        others = [o for o in self._all() if o.facts and o.member != seat.member and not o.refused]
        # The facts of the team's members count; before there is a team, those of the first workers.
        others.sort(key=lambda other: not self.is_member(other.member))
        return next((why for other in others if (why := seat.difference(other))), "")

    def _number(self, members: list[Seat]) -> None:
        """Give a number to each member that has none; others may have to give theirs up."""
        taken = {seat.number for seat in members}
        free = [number for number in range(self.most) if number not in taken]
        for seat in members:
            if seat.number == NO_NUMBER:
                seat.give_number(seat.wish if seat.wish in free else free[0])
                free.remove(seat.number)
        taken = {seat.number for seat in members}
        for seat in self._all():
            if seat not in members and seat.number in taken:
                seat.give_up_number()

    def _free_number(self, wish: int) -> int:
        used = {seat.number for seat in self._all() if not (seat.gone or seat.has_left)}
        free = [number for number in range(self.most) if number not in used]
        return wish if wish in free else next(iter(free), NO_NUMBER)

    # ── messages ─────────────────────────────────────────────────────────────────────────────────

    def _send(self, member: str, kind: str, content: Mapping[str, Any]) -> None:
        self._outgoing.append(Outgoing(member, kind, content))

    def _send_formation(self, member: str) -> None:
        assert self.formation is not None
        self._send(member, "formed", formation_fields(self.formation))

    def _say(self, text: str) -> None:
        self._send("", "say", {"text": text})
