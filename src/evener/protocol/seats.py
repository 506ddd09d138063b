"""A worker of an elastic team, as its coordinator sees it. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from evener.parsing import short
from evener.protocol.formation import NO_NUMBER, Deadlines, Standing

#: What to do where workers differ in a fact, by the first word of its name.
_REMEDIES: Final = {
    "evener": "install the same version of evener on every machine",
    "torch": "install the same version of torch on every machine",
    "model": "build the same model with the same settings on every worker",
    "data": "give every worker the same data, in the same order",
    "option": "give Ddp.setup and DdpConfig the same options on every worker",
    "optimizers": "make the same optimizers and schedulers on every worker",
    "backend": "start every worker with the same backend",
    "nccl": "install the same version of NCCL on every machine",
}


@dataclass(slots=True)
class Seat:
    """A worker.

    Attributes:
        member: Its id.
        session: A text that only this process of that id has; empty until it has connected.
        number: Its number in the team.
        wish: The number that it has if that is free: its last one, or its place on its launcher.
        facts: What must be the same on all workers.
        ready: Whether it waits for a generation.
        knows: The last generation that it was in, as it said then.
        standing: What it held then.
        gone: Why its process has ended.
        has_left: Whether it has left for good.
        refused: Why it cannot be in the team.
        lease_end_s: The last time at which it may commit.
        micro_batches: How many it has done.
        phase: What it is doing, in its own words.
        advanced_s: When one of the two changed.
        heard_s: When its last heartbeat came, or it arrived.
        attended_s: When its supervisor last reported that its process runs; ``None`` without one.
        is_silent: Whether neither of the two came for ``host_lease_s``.
    """

    member: str
    session: str = ""
    number: int = NO_NUMBER
    wish: int = NO_NUMBER
    facts: Mapping[str, Any] = field(default_factory=dict)
    ready: bool = False
    knows: int = 0
    standing: Standing | None = None
    gone: str = ""
    has_left: bool = False
    refused: str = ""
    lease_end_s: float = 0.0
    micro_batches: int = 0
    phase: str = "joining"
    advanced_s: float = 0.0
    heard_s: float = 0.0
    attended_s: float | None = None
    is_silent: bool = False
    _disconnected_s: float | None = None
    _stopped_s: float | None = None

    @property
    def can_join(self) -> bool:
        """Return whether it may be in the next generation."""
        is_there = self.is_connected and self._stopped_s is None
        return self.ready and is_there and not (self.has_left or self.refused)

    @property
    def may_commit(self) -> bool:
        """Return whether it may commit until its lease ends: it has not said that it has left."""
        return not (self.ready or self.gone or self.has_left)

    @property
    def is_connected(self) -> bool:
        """Return whether it has a connection, and its host has been heard of lately."""
        return self._disconnected_s is None and not (self.gone or self.is_silent)

    def connect(self, now_s: float, session: str, facts: Mapping[str, Any]) -> None:
        """Note that it has connected."""
        self.heard_s = now_s
        self.session, self.facts = session, {**self.facts, **facts}
        self._disconnected_s, self.gone = None, ""

    def disconnect(self, now_s: float) -> None:
        """Note that its connection has ended."""
        self._disconnected_s = now_s

    def describe(self, facts: Mapping[str, Any]) -> None:
        """Take in more of what must be the same on all workers."""
        self.facts = {**self.facts, **facts}

    def refuse(self, why: str) -> None:
        """Note that it cannot be in the team."""
        self.refused = why

    def end(self, why: str) -> None:
        """Note that its process has ended."""
        self.gone, self.ready = why, False

    def leave(self) -> None:
        """Note that it has left for good."""
        self.has_left, self.ready = True, False

    def stop(self, now_s: float) -> None:
        """Note that its process is stopped."""
        self._stopped_s = now_s if self._stopped_s is None else self._stopped_s

    def continue_(self) -> None:
        """Note that its process runs again."""
        self._stopped_s = None

    def wait(self, knows: int, standing: Standing | None) -> None:
        """Note that it waits for a generation."""
        self.ready, self.knows, self.standing = True, knows, standing

    def work(self, number: int) -> None:
        """Note that it is a member of a generation that has formed."""
        self.ready, self.standing, self.number = False, None, number

    def give_up_number(self) -> None:
        """Note that others may have its number; it asks for it again."""
        self.wish = self.wish if self.number == NO_NUMBER else self.number
        self.number = NO_NUMBER

    def give_number(self, number: int) -> None:
        """Note its number."""
        self.number = number

    def lease(self, end_s: float) -> None:
        """Let it commit until ``end_s``."""
        self.lease_end_s = max(self.lease_end_s, end_s)

    def advance(self, now_s: float, micro_batches: int, phase: str) -> float | None:
        """Note its progress; return the seconds since the last micro-batch if it did one."""
        self.heard_s = now_s
        if (micro_batches, phase) == (self.micro_batches, self.phase):
            return None
        took_s = now_s - self.advanced_s if micro_batches != self.micro_batches else None
        self.micro_batches, self.phase, self.advanced_s = micro_batches, phase, now_s
        return took_s

    def falls_silent(self, now_s: float, since_s: float, deadlines: Deadlines) -> bool:
        """Note whether its host is silent; return whether it is lost for that from now on.

        A worker alone may be silent for long, as in a call that holds the interpreter's lock. Its
        supervisor is another process of its host: together they are silent only if the host, or
        the network to it, is gone, or if both are stopped.

        Args:
            now_s: The time.
            since_s: Since when the coordinator has listened without a pause.
            deadlines: Those of the team.
        """
        if self.attended_s is None:
            return False
        was_lost = self.has_left or self.why_lost(now_s, deadlines)
        last_s = max(since_s, self.heard_s, self.attended_s)
        self.is_silent = now_s - last_s >= deadlines.host_lease_s
        return self.is_silent and not was_lost

    def why_lost(self, now_s: float, deadlines: Deadlines) -> str:
        """Return why it is lost; empty while it lives."""
        if self.gone:
            return self.gone
        if self.is_silent:
            return (
                "neither it nor its launcher has been heard of for "
                f"{deadlines.host_lease_s:g} s (host_lease_s): both are stopped, or their machine "
                "or the network to it is gone"
            )
        stopped_s, disconnected_s = self._stopped_s, self._disconnected_s
        if stopped_s is not None and now_s - stopped_s >= deadlines.stopped_s:
            return f"its process has been stopped for {deadlines.stopped_s:g} s (stopped_s)"
        if disconnected_s is not None and now_s - disconnected_s >= deadlines.reconnect_s:
            return (
                f"its connection has ended and did not come back within {deadlines.reconnect_s:g} "
                "s (reconnect_s)"
            )
        return ""

    def difference(self, other: "Seat") -> str:
        """Return in which fact it differs from another worker, and what to do; empty if in none."""
        for name in sorted(self.facts.keys() & other.facts.keys()):
            mine, theirs = self.facts[name], other.facts[name]
            if mine != theirs:
                kind = name.partition(" ")[0]
                remedy = _REMEDIES.get(kind, "start every worker in the same way")
                return (
                    f"{name} of {self.member} is {short(mine)}, and that of {other.member} in the "
                    f"team is {short(theirs)}; {remedy}"
                )
        return ""
