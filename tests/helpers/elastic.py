"""An elastic team of threads: members die, join and leave, and a roster forms generations.

    team = ElasticThreads(3)
    fates = team.run(train)                   # train(membership), on a thread for each member
    assert fates[0].value == ...

A member dies where a ``Kill`` says: before, after or in the middle of an exchange that it is in.
Others then see what they would see of a process that is gone.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from evener.comm.base import Communicator, Sum, Transport, Wait
from evener.comm.calls import Call
from evener.comm.threads import ThreadTeam, ThreadTransport
from evener.errors import (
    LaunchError,
    LeftOutError,
    PeerLostError,
    RunEndedError,
    TeamRefusedError,
)
from evener.protocol.formation import Deadlines, Formation, ProcessState, Standing
from evener.protocol.roster import Roster
from evener.team.membership import Formed, Membership
from helpers.limits import PATIENCE_S


class Died(BaseException):
    """Ends the thread of a member that is killed."""


@dataclass
class Fate:
    """What became of a member."""

    member: str
    value: Any = None
    error: BaseException | None = None


@dataclass
class Kill:
    """Where a member dies.

    Attributes:
        member: Who.
        what: Part of the words for an exchange, such as ``"gradients of window 2"``.
        skip: How many of these pass first.
        when: ``"before"`` it is there; ``"after"`` all have finished; ``"inside"``: it has brought
            its part, and the members of ``told`` have received the result, the others not.
        told: See ``when``.
    """

    member: str
    what: str
    skip: int = 0
    when: str = "before"
    told: Sequence[str] = ()
    seen: dict[str, int] = field(default_factory=dict)


class ElasticThreads:
    """The members of one team, and the roster of a coordinator in virtual time.

    Time passes only where all living workers wait: then gathering ends and leases run out.
    """

    def __init__(self, founders: int, *, most: int = 0, kills: Sequence[Kill] = ()) -> None:
        self.most = most or max(5, founders + 1)
        self.kills = list(kills)
        self.condition = threading.Condition()
        self.deadlines = Deadlines()
        self.now_s = self.deadlines.lease_s
        self.roster = Roster(1, self.most, self.deadlines, 0.0)
        self.formations: list[Formation] = []
        self.formed: dict[str, Formation] = {}  # by member that has not heard of it yet
        self.left_out: set[str] = set()
        self.refused: dict[str, TeamRefusedError] = {}
        self.transports: dict[str, MortalTransport] = {}
        self.wanted: dict[str, bool] = {}
        self.waiting: set[str] = set()
        self.living: list[str] = []
        self.numbers: dict[str, int] = {}
        self.facts: dict[str, Any] = {}
        self.threads: list[threading.Thread] = []
        self.fates: list[Fate] = []
        self.team: ThreadTeam | None = None
        self.founders = [f"w{k}" for k in range(founders)]

    # ── what tests call ──────────────────────────────────────────────────────────────────────────

    def run(self, function: Callable[["ThreadMembership"], Any]) -> list[Fate]:
        """Runs ``function(membership)`` for each founder, and waits for all, joiners included."""
        self.function = function
        for member in self.founders:
            self.start(member)
        while alive := [thread for thread in self.threads if thread.is_alive()]:
            alive[0].join(PATIENCE_S)
            assert not alive[0].is_alive(), f"{alive[0].name} did not end"
        return self.fates

    def start(
        self, member: str, function: Callable[["ThreadMembership"], Any] | None = None
    ) -> None:
        """Starts a worker; one that comes when the team has begun joins it."""
        with self.condition:
            assert not self.roster.arrive(self.now_s, member, member, {}, None)
            self.numbers[member] = self.roster.number_of(member)
            self.living.append(member)
            self._heed()
            membership = ThreadMembership(self, member, joins=bool(self.formations))
            fate = Fate(member)
            self.fates.append(fate)

        def body() -> None:
            try:
                fate.value = (function or self.function)(membership)
            except BaseException as error:
                fate.error = error
            finally:
                self.end(member)

        thread = threading.Thread(target=body, name=member, daemon=True)
        self.threads.append(thread)
        thread.start()

    def add(self, member: str, function: Callable[["ThreadMembership"], Any] | None = None) -> None:
        """Starts a worker, and returns when it waits to be taken in; again, it does nothing."""
        if member not in self.numbers:
            self.start(member, function)
            while member not in self.joiners:
                time.sleep(0.001)

    def run_to_end(self, function: Callable[["ThreadMembership"], Any]) -> dict[str, Any]:
        """As ``run``; returns what each member has that came to the end of it.

        Raises:
            BaseException: The error of a member that neither was killed nor told to leave.
        """
        ends = (type(None), Died, KeyboardInterrupt)
        fates = self.run(function)
        for fate in fates:
            if not isinstance(fate.error, ends):
                raise fate.error
        return {fate.member: fate.value for fate in fates if fate.error is None}

    def kill_due(self, member: str, what: str) -> Kill | None:
        """Who dies here, of ``kills``; a member passes such places one after the other."""
        kill = next((k for k in self.kills if k.what in what), None)
        if kill is None:
            return None
        passed = kill.seen[member] = kill.seen.get(member, -1) + 1
        return kill if passed == kill.skip else None

    def fate(self, member: str) -> Fate:
        return next(fate for fate in self.fates if fate.member == member)

    @property
    def joiners(self) -> list[str]:
        """Workers that wait to be taken in."""
        here = self.formations[-1].members if self.formations else ()
        return [member for member in self.living if member in self.waiting and member not in here]

    # ── the coordinator ──────────────────────────────────────────────────────────────────────────

    def end(self, member: str, *, finished: bool = False) -> None:
        """A worker's process is gone, or has done the run to its end."""
        with self.condition:
            if member in self.living:
                self.living.remove(member)
                self.waiting.discard(member)
                self._break(member)
                if finished:
                    self.roster.leave(self.now_s, member, finished=True)
                else:
                    self.roster.process(self.now_s, member, ProcessState.GONE, "its thread ended")
                self._heed()

    def leave_out(self, member: str) -> None:
        """A member is stopped for so long that the others go on without it."""
        with self.condition:
            number = len(self.formations)
            self.living.remove(member)
            self._break(member)
            self.roster.process(self.now_s, member, ProcessState.STOPPED, "")
            self.now_s += self.deadlines.stopped_s
            self.roster.tick(self.now_s)
            self._heed()
            while len(self.formations) == number:
                assert self.condition.wait(PATIENCE_S)
            self.roster.process(self.now_s, member, ProcessState.CONTINUED, "")
            self.living.append(member)
            self._heed()

    def die(self, member: str) -> None:
        """Ends the thread that calls it, as that of a member which is killed."""
        self.end(member)
        raise Died(member)

    def next_generation(
        self, member: str, generation: int, standing: Standing | None
    ) -> tuple[Formation, Communicator]:
        with self.condition:
            # Gloo ends the waits of others only where each member drops its broken group.
            left = self.transports.pop(member, None)
            assert left is None or left.is_released, f"{member} keeps the group that it has left"
            self.waiting.add(member)
            self._break(member)
            self.roster.report(self.now_s, member, generation, standing)
            self._heed()
            while member not in self.formed:
                if member in self.left_out:
                    self.left_out.remove(member)
                    raise LeftOutError(f"the team continued without {member}")
                if member in self.refused:
                    raise self.refused[member]
                if not self.condition.wait(PATIENCE_S):
                    raise LaunchError(f"{member} waited for a generation with {self.waiting}")
            formation, team = self.formed.pop(member), self.team
            assert team is not None
        place = formation.members.index(member)
        inner = ThreadTransport(team, place)
        self.transports[member] = MortalTransport(self, member, inner, formation.numbers)
        return formation, Communicator(self.transports[member], timeout_s=PATIENCE_S)

    def _break(self, member: str) -> None:
        """Ends the exchanges of the others that wait for a member which has left."""
        if self.team is not None and member in self.formations[-1].members:
            self.team.fail(self.formations[-1].members.index(member))

    def _heed(self) -> None:
        """Does what the roster says, and lets time pass where all wait."""
        self._take()
        have_come = bool(self.formations) or len(self.waiting) == len(self.founders)
        if have_come and self.waiting.issuperset(self.living):
            self.now_s += self.deadlines.lease_s
            self.roster.tick(self.now_s)
            self._take()
        self.condition.notify_all()

    def _take(self) -> None:
        for kind, member, content in ((o.type, o.to, o.content) for o in self.roster.take()):
            if kind == "formed":
                formation = self.roster.formation
                assert formation is not None
                if formation not in self.formations:
                    self.formations.append(formation)
                    self.team = ThreadTeam(len(formation.members), timeout_s=PATIENCE_S)
                self.formed[member] = formation
                self.waiting.discard(member)
                self.wanted[member] = False
            elif kind == "wanted":
                self.wanted[member] = content["value"]
            elif kind == "left_out":
                self.left_out.add(member)
            elif kind == "failed":
                self.refused[member] = TeamRefusedError(content["why"])
            elif kind == "ended":
                self.refused[member] = RunEndedError(content["why"])


class ThreadMembership(Membership):
    """A member's place in ``ElasticThreads``."""

    is_elastic = True

    def __init__(self, team: ElasticThreads, member: str, *, joins: bool) -> None:
        super().__init__(team.numbers[member], team.most)
        self.team, self.member, self._joins = team, member, joins
        self.is_told_to_leave = self.has_left = self.is_closed = False
        self.phase = "training"

    @property
    def is_joining(self) -> bool:
        return self._joins

    @property
    def wants_change(self) -> bool:
        return self.team.wanted.get(self.member, False)

    @property
    def is_leaving(self) -> bool:
        return self.is_told_to_leave and not self.has_left

    @property
    def is_over(self) -> bool:
        return False

    def next_generation(self, standing: Standing | None) -> Formed:
        try:
            formed = Formed(*self.team.next_generation(self.member, self.generation, standing))
        except LeftOutError:
            self._joins = True
            raise
        formation = formed.formation
        self._joins, self.generation = False, formation.generation
        self.number = formation.number_of(self.member)
        return formed

    def declare(self, phase: str, done: int = 0) -> str:
        before, self.phase = self.phase, phase
        return before

    def describe(self, facts: Mapping[str, Any]) -> None:
        self.facts = facts
        with self.team.condition:
            self.team.facts |= facts
            self.team.condition.notify_all()

    def leave(self, *, finished: bool) -> None:
        if not self.has_left:
            self.has_left = True
            self.team.end(self.member, finished=finished)

    def await_lease(self) -> None:
        with self.team.condition:
            newest = self.team.formations[-1].generation if self.team.formations else 0
        if self.generation < newest:
            raise PeerLostError(f"{self.member} may not commit in generation {self.generation}")

    def described(self, name: str, timeout_s: float) -> Any:
        told, condition = self.team.facts, self.team.condition
        with condition:
            condition.wait_for(
                lambda: name in told or self.team.roster.leads(self.member),
                min(timeout_s, PATIENCE_S),
            )
            return told.get(name)

    def close(self) -> None:
        self.is_closed = True


class MortalTransport(Transport):
    """A thread's transport that dies where the test says."""

    joins_processes = False

    def __init__(
        self, team: ElasticThreads, member: str, inner: ThreadTransport, numbers: Sequence[int]
    ) -> None:
        super().__init__("threads", inner.rank, numbers, [inner.cells])
        self._team, self._member, self._inner = team, member, inner
        self._is_inside = False  # of an exchange that begins with a swap
        self.is_released = False

    def _carry(self, call: Call, run: Callable[[], Any]) -> Any:
        if self._is_inside:
            return run()
        kill = self._team.kill_due(self._member, call.what)
        dies = kill is not None and kill.member == self._member
        if dies and kill.when == "before":
            self._team.die(self._member)
        self._is_inside = True
        try:
            result = run()
        finally:
            self._is_inside = False
        if dies:
            self._team.die(self._member)
        if kill is not None and kill.when == "inside" and self._member not in kill.told:
            raise PeerLostError(f"{kill.member} died in {call.what!r}")
        return result

    def _swap(self, cells: Sequence[memoryview], wait: Wait, call: Call) -> None:
        self._carry(call, lambda: self._inner._swap(cells, wait, call))

    def sum_each(self, sums: Sequence[Sum], wait: Wait) -> None:
        self._carry(wait.call, lambda: self._inner.sum_each(sums, wait))

    def copy(self, flat: Tensor, src: int, wait: Wait) -> None:
        self._carry(wait.call, lambda: self._inner.copy(flat, src, wait))

    def gather_parts(self, flat: Tensor, wait: Wait) -> None:
        self._carry(wait.call, lambda: self._inner.gather_parts(flat, wait))

    def split(self, members: tuple[int, ...], key: str, wait: Wait) -> Transport | None:
        inner = self._carry(wait.call, lambda: self._inner.split(members, key, wait))
        if inner is None:
            return None
        numbers = [self.numbers[member] for member in members]
        return MortalTransport(self._team, self._member, inner, numbers)

    def cut(self) -> None:
        self.is_released = True
        self._inner.cut()
