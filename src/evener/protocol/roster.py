"""Who is in an elastic team, and when its next generation may form. Pure: time is a number.

The coordinator owns a ``Roster``. It tells it what has happened, with the time, and sends out the
orders that ``take`` returns. Terms:

- A worker is *ready* when it waits for a generation: a joiner, or a member that has left its own.
- A generation is *over* when one of its members has left it or is lost. It then renews no lease.

A commit in generation g needs the rows of all members of g. So once a single member has left g,
nothing that it has not applied can be committed there, and g + 1 may form at once. If no member
has left g, g + 1 forms only after every lease of g has run out: members commit nothing later.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from dataclasses import fields as dataclass_fields
from enum import StrEnum
from typing import Any, Final, NamedTuple

from evener.errors import ConfigError
from evener.parsing import Fields, whole

NO_NUMBER: Final = -1
"""The number of a worker for which there is none as long as others have them all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What a member that has left its generation holds.

    Attributes:
        member: Its id.
        generation: The last generation that it was in.
        applied: Windows that it has applied.
        committed: Windows that it has committed; at most ``applied``.
        digest: Of its state after ``applied``, in hexadecimal; members with the same digest hold
            the same bits.
        phase: What it was doing, such as ``training``; for messages.
    """

    member: str
    generation: int
    applied: int
    committed: int
    digest: str
    phase: str = "training"


@dataclass(frozen=True, slots=True, kw_only=True)
class Formation:
    """A generation, as the coordinator has formed it.

    Attributes:
        generation: Its number, from 1.
        members: Ids in the order of ranks: members that stay keep their order, joiners follow.
        numbers: By member, a number below the most members of a team. A member keeps it from one
            generation to the next.
        base: The windows that the state in which all members begin has seen.
        has_state: Whether a member holds state. Otherwise the team begins, anew or from a
            checkpoint, and ``base`` is 0.
        donor: The member whose state counts.
        receivers: Members that must receive the donor's state; the others hold the same bits.
        lease_s: So long after a heartbeat a member may commit.
    """

    generation: int
    members: tuple[str, ...]
    numbers: tuple[int, ...]
    base: int
    has_state: bool
    donor: str
    receivers: tuple[str, ...]
    lease_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Every deadline of an elastic team, in seconds.

    Attributes:
        lease_s: So long after a heartbeat a member may commit. Also how long a coordinator that
            has just started waits for members of an earlier generation to report.
        beat_s: Between two heartbeats of a worker.
        reconnect_s: A worker whose connection ended is lost unless it connects again so soon.
        stopped_s: A worker whose process is stopped (state T) is lost after so long.
        gather_s: So long after the last arrival a first generation of fewer than the most workers
            forms. Also how long members may take to leave a generation together.
        hello_s: A connection that has not said who it is closes after so long.
        floor_s: The adaptive deadline is at least so long.
        mads: The adaptive deadline is the median time between two micro-batches and so many median
            absolute deviations.
        patience_s: A worker waits so long for a coordinator that does not answer.
        timeout_s: A living member that does not come is waited for so long, and so are workers
            that are missing.
    """

    lease_s: float = 3.0
    beat_s: float = 0.25
    reconnect_s: float = 1.0
    stopped_s: float = 1.0
    gather_s: float = 0.5
    hello_s: float = 5.0
    floor_s: float = 5.0
    mads: float = 8.0
    patience_s: float = 60.0
    timeout_s: float = 600.0


class ProcessState(StrEnum):
    """What a supervisor reports of a worker's process."""

    GONE = "gone"
    STOPPED = "stopped"
    CONTINUED = "continued"


class Outgoing(NamedTuple):
    """A message that follows from what has happened.

    Attributes:
        to: The member that it is for; empty for the terminal.
        type: ``formed``, ``over``, ``wanted``, ``left_out``, ``failed``; ``say`` for the terminal.
        content: What it says, as JSON.
    """

    to: str
    type: str
    content: Mapping[str, Any]


@dataclass(slots=True)
class _Seat:
    """A worker, as the roster sees it."""

    member: str
    session: str
    facts: Mapping[str, Any]
    number: int = NO_NUMBER
    connected: bool = True
    connection_s: float = 0.0  # when that changed
    gone: str = ""  # why
    stopped_s: float | None = None
    ready: bool = False
    knows: int = 0  # the generation that it was in when it reported
    standing: Standing | None = None
    lease_end_s: float = 0.0
    micro_batches: int = 0
    phase: str = "joining"
    advanced_s: float = 0.0
    named: bool = False


@dataclass(slots=True)
class Roster:
    """The state machine of membership.

    Each event takes the time, in seconds, which must not go back.

    Attributes:
        least: Fewest members of a generation.
        most: Most members of a generation.
        deadlines: Those of the team.
        started_s: When the coordinator started.
    """

    least: int
    most: int
    deadlines: Deadlines
    started_s: float
    formation: Formation | None = None
    _seats: dict[str, _Seat] = field(default_factory=dict)
    _orders: list[Outgoing] = field(default_factory=list)
    _over: str = ""  # why the generation is over
    _over_s: float = 0.0
    _left: bool = False  # a member has left the generation: nothing more is committed in it
    _told_over: bool = False
    _wanted: bool = False
    _arrival_s: float = 0.0

    # ── events ───────────────────────────────────────────────────────────────────────────────────

    def arrive(
        self,
        now_s: float,
        member: str,
        session: str,
        facts: Mapping[str, Any],
        held: Formation | None,
    ) -> str:
        """Take in a worker that has connected, for the first time or again.

        Args:
            now_s: The time.
            member: Its id.
            session: A text that only this process of that id has.
            facts: What must be the same on all members.
            held: The last generation that it was in, where there is one.

        Returns:
            Why it is refused; empty if it is not.
        """
        seat = self._seats.get(member)
        if seat is not None and seat.session and seat.session != session:
            if seat.connected and not seat.gone:
                return (
                    f"another worker of this team is called {member!r}; give each worker a name "
                    "of its own (EVENER_MEMBER)"
                )
            seat = None
        if seat is None:
            self._seats.pop(member, None)  # so that the newcomer is the last in the order
            seat = self._seats[member] = _Seat(member, session, facts, advanced_s=now_s)
        seat.session, seat.facts = session, facts
        seat.connected, seat.connection_s, seat.gone = True, now_s, ""
        self._adopt(now_s, held)
        if seat.number == NO_NUMBER:
            seat.number = self._free_number()
        if self._wanted:
            self._orders.append(Outgoing(member, "wanted", {"value": True}))
        self._consider(now_s)
        return ""

    def depart(self, now_s: float, member: str, session: str) -> None:
        """Note that a worker's connection has ended; it may come again."""
        seat = self._seats.get(member)
        if seat is not None and seat.session == session:
            seat.connected, seat.connection_s = False, now_s
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
        formation = self.formation
        is_member = formation is not None and member in formation.members
        if is_member and not self._over and generation < self.generation:
            self._send_formation(member)  # the first one did not reach it
            return
        if standing is not None and not is_member:
            self._orders.append(
                Outgoing(
                    member, "left_out", {"generation": formation.generation if formation else 0}
                )
            )
            return
        if not seat.ready:
            self._arrival_s = now_s
        seat.ready, seat.knows, seat.standing = True, generation, standing
        if is_member:
            self._left = True
            self._end(now_s, f"{member} has left it", tell=False)
        self._consider(now_s)

    def leave(self, now_s: float, member: str) -> None:
        """Note that a worker leaves for good, after its last window."""
        seat = self._seats.get(member)
        if seat is None:
            return
        seat.gone, seat.ready = "it left the team", False
        if self.formation is not None and member in self.formation.members:
            self._left = True
            self._end(now_s, f"{member} left the team", tell=False)
        self._consider(now_s)

    def beat(self, now_s: float, member: str, micro_batches: int, phase: str) -> bool:
        """Note a heartbeat; return whether it renews the member's lease."""
        seat = self._seats[member]
        if micro_batches != seat.micro_batches or phase != seat.phase:
            seat.micro_batches, seat.phase = micro_batches, phase
            seat.advanced_s, seat.named = now_s, False
        formation = self.formation
        if formation is None or self._over or member not in formation.members or seat.ready:
            return False
        seat.lease_end_s = now_s + formation.lease_s
        return True

    def process(self, now_s: float, member: str, state: ProcessState, reason: str = "") -> None:
        """Note what a supervisor reports of a worker's process."""
        seat = self._seats.get(member)
        if seat is None:
            return
        if state is ProcessState.GONE:
            seat.gone, seat.ready, seat.connected = reason or "its process ended", False, False
        elif state is ProcessState.CONTINUED:
            seat.stopped_s = None
        elif seat.stopped_s is None:
            seat.stopped_s = now_s
        self._consider(now_s)

    def tick(self, now_s: float) -> None:
        """Note that time has passed."""
        self._consider(now_s)

    def take(self) -> list[Outgoing]:
        """Return the orders since the last call."""
        orders, self._orders = self._orders, []
        return orders

    # ── what follows ─────────────────────────────────────────────────────────────────────────────

    def _consider(self, now_s: float) -> None:
        formation = self.formation
        for member in formation.members if formation else ():
            if why := self._why_lost(member, now_s):
                self._end(now_s, f"{member} is lost: {why}", tell=True)
        if self._over and not self._told_over and now_s - self._over_s >= self.deadlines.gather_s:
            self._tell_over()
        self._want()
        if self._may_form(now_s):
            self._form(now_s)

    def _why_lost(self, member: str, now_s: float) -> str:
        seat = self._seats[member]
        if seat.gone:
            return seat.gone
        if seat.stopped_s is not None and now_s - seat.stopped_s >= self.deadlines.stopped_s:
            return f"its process has been stopped for {self.deadlines.stopped_s:g} s (stopped_s)"
        if not seat.connected and now_s - seat.connection_s >= self.deadlines.reconnect_s:
            return (
                f"its connection ended and did not come back for {self.deadlines.reconnect_s:g} s "
                "(reconnect_s)"
            )
        return ""

    def _end(self, now_s: float, why: str, *, tell: bool) -> None:
        if not self._over:
            self._over, self._over_s = why, now_s
        if tell and not self._told_over:
            self._tell_over()

    def _tell_over(self) -> None:
        self._told_over = True
        assert self.formation is not None
        for member in self.formation.members:
            if not self._seats[member].ready:
                content = {"generation": self.formation.generation, "why": self._over}
                self._orders.append(Outgoing(member, "over", content))

    def _want(self) -> None:
        formation = self.formation
        joiners = [s for s in self._ready() if formation and s.member not in formation.members]
        wanted = bool(joiners) and formation is not None and len(formation.members) < self.most
        if wanted != self._wanted and formation is not None:
            self._wanted = wanted
            for member in formation.members:
                self._orders.append(Outgoing(member, "wanted", {"value": wanted}))

    def _ready(self) -> list[_Seat]:
        """Workers that can be in the next generation, in the order of arrival."""
        return [
            seat
            for seat in self._seats.values()
            if seat.ready and seat.connected and not seat.gone and seat.stopped_s is None
        ]

    def _may_form(self, now_s: float) -> bool:
        ready = self._ready()
        if len(ready) < self.least:
            return False
        formation = self.formation
        if formation is None:
            if now_s - self.started_s < self.deadlines.lease_s:
                return False  # members of an earlier coordinator's generation may still report
            gathered = now_s - self._arrival_s >= self.deadlines.gather_s
            return len(ready) >= self.most or gathered
        if not self._over:
            return False
        seats = [self._seats[member] for member in formation.members]
        missing = [s for s in seats if not s.ready and not self._why_lost(s.member, now_s)]
        if missing and now_s - self._over_s < self.deadlines.timeout_s:
            return False
        proven = self._left or all(seat.gone for seat in seats)
        return proven or all(now_s >= seat.lease_end_s for seat in seats)

    def _form(self, now_s: float) -> None:
        before = self.formation
        order = before.members if before else ()
        ready = {seat.member: seat for seat in self._ready()}
        stay = [m for m in order if m in ready and ready[m].standing is not None]
        members = tuple([*stay, *(m for m in ready if m not in stay)][: self.most])
        standings = {m: s for m in stay if (s := ready[m].standing) is not None}
        base = max((s.applied for s in standings.values()), default=0)
        donor = next((m for m in stay if standings[m].applied == base), members[0])
        bits = {m: (s.applied, s.digest) for m, s in standings.items()}
        receivers = tuple(
            m for m in members if m != donor and (m not in bits or bits[m] != bits.get(donor))
        )
        for member in order:
            if member not in members:
                self._seats[member].number = NO_NUMBER
                self._forget(member)
        for member in members:
            if ready[member].number == NO_NUMBER:
                ready[member].number = self._free_number()
        self.formation = Formation(
            generation=self.generation + 1,
            members=members,
            numbers=tuple(ready[member].number for member in members),
            base=base,
            has_state=bool(standings),
            donor=donor,
            receivers=receivers,
            lease_s=self.deadlines.lease_s,
        )
        self._over, self._left, self._told_over = "", False, False
        for member in members:
            seat = self._seats[member]
            seat.ready, seat.standing = False, None
            seat.lease_end_s = now_s + self.deadlines.lease_s
            seat.advanced_s = now_s
            self._send_formation(member)
        self._want()

    def _forget(self, member: str) -> None:
        if self._seats[member].gone:
            del self._seats[member]

    def _send_formation(self, member: str) -> None:
        assert self.formation is not None
        self._orders.append(Outgoing(member, "formed", formation_fields(self.formation)))

    def _adopt(self, now_s: float, held: Formation | None) -> None:
        """Continue from a generation that a coordinator before this one formed."""
        known = self.formation.generation if self.formation else 0
        if held is None or held.generation <= known:
            return
        self.formation = replace(held, lease_s=self.deadlines.lease_s)
        for member, number in zip(held.members, held.numbers, strict=True):
            seat = self._seats.get(member)
            if seat is None:
                seat = self._seats[member] = _Seat(member, "", {}, connected=False)
                seat.connection_s = seat.advanced_s = now_s
            seat.number = number
            seat.lease_end_s = now_s + self.deadlines.lease_s

    def _free_number(self) -> int:
        used = {seat.number for seat in self._seats.values() if not seat.gone}
        return next((n for n in range(self.most) if n not in used), NO_NUMBER)

    @property
    def generation(self) -> int:
        """The highest generation that has been formed; 0 for none."""
        return self.formation.generation if self.formation else 0

    def number_of(self, member: str) -> int:
        """Return the number of a worker; ``NO_NUMBER`` as long as others have them all."""
        return self._seats[member].number


def parse_team_limits(text: str) -> tuple[int, int]:
    """Return the fewest and the most members of a team from ``MIN:MAX``.

    Raises:
        ConfigError: It is something else.
    """
    least, colon, most = text.partition(":")
    if not (colon and least.isdecimal() and most.isdecimal() and 1 <= int(least) <= int(most)):
        raise ConfigError(
            f"--elastic is {text!r}; give the fewest and the most workers as MIN:MAX, such as 2:4"
        )
    return int(least), int(most)


def read_deadlines(fields: Fields) -> Deadlines:
    """Return deadlines from their JSON.

    Raises:
        ValueError: It is something else.
    """
    return Deadlines(
        **{one.name: fields.number(one.name, least=0.0) for one in dataclass_fields(Deadlines)}
    )


def formation_fields(formation: Formation) -> dict[str, Any]:
    """Return a generation as JSON."""
    return asdict(formation)


def read_formation(fields: Fields) -> Formation:
    """Return a generation from its JSON.

    Raises:
        ValueError: It is not one.
    """
    return Formation(
        generation=fields.whole("generation", least=1),
        members=tuple(fields.texts("members")),
        numbers=tuple(whole(number, "a number of a member") for number in fields.items("numbers")),
        base=fields.whole("base"),
        has_state=fields.flag("has_state"),
        donor=fields.text("donor"),
        receivers=tuple(fields.texts("receivers")),
        lease_s=fields.number("lease_s", least=0.0),
    )


def read_standing(fields: Fields) -> Standing:
    """Return what a member holds from its JSON.

    Raises:
        ValueError: It is something else.
    """
    return Standing(
        member=fields.text("member"),
        generation=fields.whole("generation"),
        applied=fields.whole("applied"),
        committed=fields.whole("committed"),
        digest=fields.text("digest"),
        phase=fields.text("phase"),
    )
