"""Who waits for whom: a rank that waits for long says so at the terminal, and why.

A rank that is halted (stopped, or held by a debugger) is named at once. One that is merely silent
is named after an adaptive deadline: it may be busy with what the others do not do, such as an
evaluation on rank 0 alone. Nothing is ended here; that is up to ``timeout_s`` of the exchanges.
"""

import socket
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import final

from evener.comm.base import Call, Communicator, WaitListener
from evener.comm.messages import name_ranks
from evener.planning.silence import silence_deadline_s
from evener.team.child import is_supervised
from evener.team.members import Member
from evener.team.process_state import KernelState, clock_time, describe_halt, state_of
from evener.team.terminal import say

# Looks of a long wait are further and further apart: each may ask the coordinator.
_FIRST_LOOK_S = 1.0
_LOOKS_PER_WAIT = 8


@dataclass(slots=True)
class _LongWait:
    """What is known of a wait that has not ended.

    Attributes:
        look_at_s: Length of the wait at which this rank looks who is absent.
        absent: Who was at the last look; ``None`` where nobody could tell.
        halted: Ranks that were halted when this was looked at last.
        told: Ranks that people were told about.
        has_spoken: Whether they were told that a rank is silent.
    """

    look_at_s: float = _FIRST_LOOK_S
    absent: frozenset[int] | None = None
    halted: frozenset[int] = frozenset()
    told: set[int] = field(default_factory=set)
    has_spoken: bool = False


@final
class WaitWatch(WaitListener):
    """Names ranks for which this one waits; only the lowest of the ranks that wait speaks.

    Where a supervisor has started the ranks, that names those which are halted.

    Args:
        me: This rank.
        members: What each rank is.
        windows_s: Seconds that the latest windows took, kept by the caller: they decide when a
            silent rank is named.
    """

    def __init__(self, me: int, members: Sequence[Member], windows_s: Sequence[float]) -> None:
        self._me = me
        self._windows_s = windows_s
        self._members = {member.rank: member for member in members}
        self._waits: dict[Communicator, _LongWait] = {}
        host = socket.gethostname()
        self._neighbours = frozenset(
            m.rank for m in members if m.host == host and m.rank != me and _has_state(m.pid)
        )

    def still_waits(self, comm: Communicator, call: Call, waited_s: float) -> None:
        """Name who is halted, and after the deadline who is silent."""
        wait = self._waits.setdefault(comm, _LongWait())
        if not is_supervised():
            self._name_halted(comm, call, waited_s, wait)
        if waited_s < wait.look_at_s:
            return
        wait.look_at_s = waited_s + max(_FIRST_LOOK_S, waited_s / _LOOKS_PER_WAIT)
        absent, before = comm.find_absent(), wait.absent
        wait.absent = absent
        # A rank may be on its way to say that it is here, so one look does not count. A call that
        # has a longer deadline than others is one that some ranks make for hours.
        is_usual = call.timeout_s <= comm.timeout_s and not wait.has_spoken
        is_late = waited_s >= silence_deadline_s(tuple(self._windows_s))
        if is_usual and is_late and absent == before:
            self._name_silent(comm, call, waited_s, wait)

    def wait_over(self, comm: Communicator, *, succeeded: bool) -> None:
        """Say that those who were named have come."""
        wait = self._waits.pop(comm, None)
        if wait is not None and succeeded and (wait.told or wait.has_spoken):
            who = name_ranks([*wait.told]) if wait.told else "the others"
            have = "has" if len(wait.told) == 1 else "have"
            say(f"evener: {who} {have} come: training continues")

    def _name_halted(
        self, comm: Communicator, call: Call, waited_s: float, wait: _LongWait
    ) -> None:
        states = {
            rank: state_of(self._members[rank].pid)
            for rank in self._neighbours.intersection(comm.numbers)
        }
        halted = frozenset(rank for rank, state in states.items() if state.is_halted)
        # A tool that reads a process's stack holds it for a moment.
        new = (halted & wait.halted) - wait.told
        wait.halted = halted
        if not new:
            return
        absent = comm.find_absent()
        awaited = new if absent is None else new & absent
        here = self._neighbours | {self._me}
        waiting = here.intersection(comm.numbers) - (absent or halted)
        if self._me != min(waiting):
            return
        now = time.time()
        deadline = clock_time(now - waited_s + call.timeout_s)
        for rank in sorted(awaited):
            wait.told.add(rank)
            words = f"{_who_waits(waiting)} for it until {deadline} (timeout_s)"
            pid = self._members[rank].pid
            say(describe_halt(f"rank {rank} (pid {pid})", pid, states[rank], now, words))

    def _name_silent(
        self, comm: Communicator, call: Call, waited_s: float, wait: _LongWait
    ) -> None:
        waiting = {self._me} if wait.absent is None else set(comm.numbers) - wait.absent
        states = {rank: self._state_of(rank) for rank in sorted(wait.absent or ())}
        if is_supervised():  # which names those that are halted
            states = {rank: state for rank, state in states.items() if not state.is_halted}
        if self._me != min(waiting) or (wait.absent is not None and not states):
            return
        wait.has_spoken = True
        wait.told |= states.keys()
        began = time.time() - waited_s
        whom = name_ranks([*states]) if states else "others (which of them is not known)"
        reasons = "; ".join(self._describe(rank, state) for rank, state in states.items())
        say(
            f"evener: {_who_waits(waiting)} since {clock_time(began)} for {whom} in {call.what!r}"
            f"{': ' if reasons else ''}{reasons}. This ends nothing before "
            f"{clock_time(began + call.timeout_s)} (timeout_s)"
        )

    def _state_of(self, rank: int) -> KernelState:
        near = rank in self._neighbours
        return state_of(self._members[rank].pid) if near else KernelState.UNKNOWN

    def _describe(self, rank: int, state: KernelState) -> str:
        member = self._members[rank]
        if state is KernelState.UNKNOWN:
            return f"rank {rank} is on {member.host} (pid {member.pid})"
        text = f"rank {rank} (pid {member.pid}) is {state}"
        if state is KernelState.GONE:
            return text
        return f"{text}, and `py-spy dump --pid {member.pid}` shows where"


def _has_state(pid: int) -> bool:
    return state_of(pid) not in (KernelState.GONE, KernelState.UNKNOWN)


def _who_waits(waiting: Collection[int]) -> str:
    return f"{name_ranks([*waiting])} {'waits' if len(waiting) == 1 else 'wait'}"
