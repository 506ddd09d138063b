"""A worker of an elastic team, as its coordinator sees it. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from math import inf
from typing import Any

from evener.parsing import short
from evener.protocol.formation import NO_NUMBER, Standing


class Place(Enum):
    """What a worker does, by its own messages."""

    WORKING = auto()
    """It is set up, or is at work in a generation. Only here its lease is renewed."""
    READY = auto()
    """It waits for a generation, and commits nothing in the one that it was in."""
    REFUSED = auto()
    """It was told why it cannot be in the team."""
    LEFT = auto()
    """It has left for good."""


class Trouble(Enum):
    """What a worker is lost for, unless it ends in time. The value is the reason, for a message."""

    GONE = "its process has ended"
    STOPPED = "its process has been stopped for {:g} s (stopped_s)"
    DISCONNECTED = "its connection has ended and did not come back within {:g} s (reconnect_s)"
    SILENT = (
        "neither it nor its launcher has been heard of for {:g} s (host_lease_s): both are "
        "stopped, or their machine or the network to it is gone"
    )


@dataclass(slots=True, eq=False)
class Seat:
    """A worker. The roster writes the attributes.

    Attributes:
        member: Its id.
        session: A text that only this process of that id has; empty until it has connected.
        wish: The number that it gets if that is free: its last one, or its place on its launcher.
        number: Its number in the team.
        facts: What must be the same on all workers.
        place: What it does.
        knows: The last generation that it was in, as it or a message to it said.
        standing: What it held when it became ready.
        told: By type, the last message to it, of those that are sent once.
        lease_end_s: The last time at which it may commit.
        micro_batches: How many it has done.
        phase: What it is doing, in its own words.
        advanced_s: When one of the two changed.
        named_s: The value of ``advanced_s`` when the terminal named it as late.
        heard_s: When its last heartbeat came, or it arrived.
        attended_s: When its supervisor last reported that its process runs; infinite without one:
            a worker alone may be silent for long, as in a call that holds the interpreter's lock.
        troubles: From when on it is lost, and why.
    """

    member: str
    session: str = ""
    wish: int = NO_NUMBER
    number: int = NO_NUMBER
    facts: Mapping[str, Any] = field(default_factory=dict)
    place: Place = Place.WORKING
    knows: int = 0
    standing: Standing | None = None
    told: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    lease_end_s: float = 0.0
    micro_batches: int = 0
    phase: str = "joining"
    advanced_s: float = 0.0
    named_s: float | None = None
    heard_s: float = 0.0
    attended_s: float = inf
    troubles: dict[Trouble, tuple[float, str]] = field(default_factory=dict)

    @property
    def can_join(self) -> bool:
        """Return whether it may be in the next generation."""
        return self.place is Place.READY and not self.troubles

    @property
    def may_commit(self) -> bool:
        """Return whether it may commit until its lease ends: it has not said that it has left."""
        return self.place in (Place.WORKING, Place.REFUSED) and Trouble.GONE not in self.troubles

    @property
    def is_connected(self) -> bool:
        """Return whether it has a connection, and its host has been heard of lately."""
        return self.troubles.keys() <= {Trouble.STOPPED}

    def suffer(self, trouble: Trouble, since_s: float, patience_s: float = 0.0) -> None:
        """Note a trouble that it has since ``since_s``, and is lost for after ``patience_s``."""
        why = trouble.value.format(patience_s)
        self.troubles.setdefault(trouble, (since_s + patience_s, why))

    def why_lost(self, now_s: float) -> str:
        """Return why it is lost; empty while it is not."""
        return next((why for since_s, why in self.troubles.values() if now_s >= since_s), "")

    def lives(self, now_s: float) -> bool:
        """Return whether it neither left nor is lost."""
        return self.place is not Place.LEFT and not self.why_lost(now_s)

    def difference(self, other: "Seat") -> str:
        """Return in which fact it differs from another worker, and what to do; empty if in none."""
        for name in sorted(self.facts.keys() & other.facts.keys()):
            mine, theirs = self.facts[name], other.facts[name]
            if mine != theirs:
                return (
                    f"{name} of {self.member} is {short(mine)}, and that of {other.member} in the "
                    f"team is {short(theirs)}; start every worker with the same code, options, "
                    "data and versions"
                )
        return ""
