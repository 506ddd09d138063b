"""Messages between the coordinator and the workers of an elastic team. Pure.

A *standing* is the state that a member reports when it has left its generation. A *formation* is
the next generation.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from dataclasses import fields as dataclass_fields
from enum import StrEnum
from typing import Any, Final, NamedTuple, TypeVar

from evener.errors import ConfigError
from evener.parsing import Fields, short, whole

_Kind = TypeVar("_Kind")

NO_NUMBER: Final = -1
"""The number of a worker that has none, because other workers have all numbers."""

TRAINING: Final = "training"
"""The phase of a member whose next exchange is about plans: only then can a joiner take part."""

EVALUATING: Final = "evaluating"

WAITING: Final = "waiting"
"""The phase of a member that waits for others, in an exchange."""

PARKED: Final = "parked"
"""The phase of a parked member: the others train without it, and it waits to be called back."""


class FixedPlace(NamedTuple):
    """A rank's place in a fixed team, which its launcher or its user has decided.

    Attributes:
        team: Names the team to its coordinator, which may have several.
        rank: Number of the rank.
        world_size: Ranks of the team.
    """

    team: str
    rank: int
    world_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """The state of a member that has left its generation.

    Attributes:
        applied: Windows that it has applied.
        committed: Windows that it has committed; at most ``applied``.
        digest: Of its state after ``applied``, in hexadecimal; members with the same digest hold
            the same bits.
        phase: Its phase then: ``TRAINING``, or a text of its own.
    """

    applied: int
    committed: int
    digest: str
    phase: str = TRAINING

    def is_as(self, other: "Standing") -> bool:
        """Return whether both hold the same bits."""
        return (self.applied, self.digest) == (other.applied, other.digest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Formation:
    """A generation, as the coordinator has formed it.

    Attributes:
        generation: Its number, from 1.
        members: Ids in the order of ranks: members that stay keep their order, joiners follow.
        numbers: By member, a number below the most members of a team. A member keeps it from one
            generation to the next.
        base: How many windows the state has applied in which all members begin.
        has_state: Whether a member holds state. Otherwise the team starts over, from a checkpoint
            or not, and ``base`` is 0.
        source: The member whose state all members adopt.
        receivers: Members that must receive the source's state; the others hold the same bits.
        detect_s: Seconds from the last heartbeat of the lost member to the end of the previous
            generation; 0 if none was lost.
    """

    generation: int
    members: tuple[str, ...]
    numbers: tuple[int, ...]
    base: int
    has_state: bool
    source: str
    receivers: tuple[str, ...]
    detect_s: float = 0.0

    def __post_init__(self) -> None:
        if len(self.members) != len(self.numbers):
            raise ValueError(f"members are {short(self.members)}, numbers {short(self.numbers)}")

    def number_of(self, member: str) -> int:
        """Return the number of a member."""
        return self.numbers[self.members.index(member)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Every deadline of an elastic team, in seconds; the coordinator sends them to all workers.

    Attributes:
        lease_s: So long after a heartbeat a member may commit. Also how long a coordinator that
            has just started waits for members of an earlier generation.
        beat_s: Between two heartbeats of a worker.
        reconnect_s: A worker whose connection has ended is lost unless it connects again so soon.
        stopped_s: A worker whose process is stopped (state T) is lost after so long.
        host_lease_s: A worker is lost after so long without a sign of life from it and from its
            launcher.
        gather_s: So long after the last arrival the first generation, or one that starts over
            without any state, forms with fewer than the most workers. Also how long members may
            take to leave a generation together.
        connect_s: So long members of a new generation may take to connect to one another, and a
            worker may wait for a number that becomes free.
        hello_s: A connection that has not identified itself is closed after so long.
        patience_s: A worker waits so long for a coordinator that does not answer.
        timeout_s: So long a generation waits for living members that do not come, and for workers
            that are missing.
    """

    lease_s: float = 3.0
    beat_s: float = 0.25
    reconnect_s: float = 1.0
    stopped_s: float = 0.5
    host_lease_s: float = 10.0
    gather_s: float = 0.5
    connect_s: float = 10.0
    hello_s: float = 5.0
    patience_s: float = 60.0
    timeout_s: float = 600.0


class ProcessState(StrEnum):
    """The state of a worker's process, as its supervisor reports it."""

    GONE = "gone"
    FINISHED = "finished"
    """It has ended, with exit code 0: the run was done to its end."""
    STOPPED = "stopped"
    CONTINUED = "continued"


def read_team_limits(given: object, option: str = "elastic") -> tuple[int, int]:
    """Return the fewest and the most members of a team from ``"MIN:MAX"`` or ``(MIN, MAX)``.

    Args:
        given: What the user gave.
        option: Its name, for the message.

    Raises:
        ConfigError: It is something else.
    """
    parts = given.split(":") if isinstance(given, str) else given
    digits = [str(part) for part in parts] if isinstance(parts, tuple | list) else []
    # A team keeps lists with a place for each number, and int() refuses thousands of digits.
    if len(digits) == 2 and all(each.isdecimal() and len(each) <= 4 for each in digits):
        least, most = map(int, digits)
        if 1 <= least <= most:
            return least, most
    raise ConfigError(
        f"{option} is {short(given)}; give the fewest and the most as MIN:MAX, such as 2:4, with "
        "9999 at most"
    )


#: By the type of an attribute, what reads it from JSON.
_READERS: Final[Mapping[Any, Callable[[Fields, str], Any]]] = {
    bool: Fields.flag,
    int: Fields.whole,
    float: lambda fields, name: fields.number(name, least=0.0),
    str: Fields.text,
    tuple[str, ...]: lambda fields, name: tuple(fields.texts(name)),
    tuple[int, ...]: lambda fields, name: tuple(whole(n, name) for n in fields.items(name)),
}


def read_message(kind: type[_Kind], fields: Fields) -> _Kind:
    """Return a ``Standing``, ``Formation`` or ``Deadlines`` from the JSON of its attributes.

    Raises:
        ValueError: It is something else.
    """
    attributes = dataclass_fields(kind)  # type: ignore[arg-type]
    return kind(**{one.name: _READERS[one.type](fields, one.name) for one in attributes})
