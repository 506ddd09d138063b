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
"""The number of a worker for which no number is free."""

TRAINING: Final = "training"
"""The phase of a member whose next exchange agrees on plans: only then can a joiner take part."""

EVALUATING: Final = "evaluating"

WAITING: Final = "waiting"
"""The phase of a member that waits for others, in an exchange."""

PARKED: Final = "parked"
"""The phase of a parked member: the others train without it, and it waits to be recalled."""


class FixedPlace(NamedTuple):
    """A rank's place in a fixed team, which the launcher or the user has chosen.

    Attributes:
        team: Name of the team; a coordinator may have several.
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
        digest: Digest of its state after ``applied``, in hexadecimal; members with the same digest
            hold the same bits.
        phase: Its phase then: ``TRAINING``, or another text.
    """

    applied: int
    committed: int
    digest: str
    phase: str = TRAINING

    def is_as(self, other: "Standing") -> bool:
        """Return whether both members hold the same bits."""
        return (self.applied, self.digest) == (other.applied, other.digest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Formation:
    """A generation, as the coordinator has formed it.

    Attributes:
        generation: Its number, from 1.
        members: Ids in the order of ranks: members that stay keep their order, joiners follow.
        numbers: By member, a number below the most members of a team. A member keeps it from one
            generation to the next.
        base: Number of applied windows of the state with which all members begin.
        has_state: Whether a member holds state. Otherwise the team starts over, from a checkpoint
            or not, and ``base`` is 0.
        source: The member whose state all members load.
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
        lease_s: Time after a heartbeat in which a member may commit. Also the time for which a
            coordinator that has just started waits for members of an earlier generation.
        beat_s: Time between two heartbeats of a worker.
        reconnect_s: Time to reconnect, after which a worker whose connection has ended is lost.
        stopped_s: Time after which a worker whose process is stopped (state T) is lost.
        host_lease_s: Time without a message from a worker and from its launcher after which the
            worker is lost.
        gather_s: Time after the last arrival after which the first generation, or one that starts
            over without any state, forms with fewer than the most workers. Also the time for
            members to leave a generation together.
        connect_s: Time for members of a new generation to connect to one another. Also the longest
            wait of a worker for a free number.
        hello_s: Time after which a connection that has not identified itself is closed.
        patience_s: Longest wait of a worker for a coordinator that does not answer.
        timeout_s: Longest wait of a generation for living members that do not come, and for missing
            workers.
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
    """It has ended with exit code 0: the run was completed."""
    STOPPED = "stopped"
    CONTINUED = "continued"


def read_team_limits(given: object, option: str = "elastic") -> tuple[int, int]:
    """Return the fewest and the most members of a team from ``"MIN:MAX"`` or ``(MIN, MAX)``.

    Args:
        given: The user's value.
        option: The option's name, for the message.

    Raises:
        ConfigError: The value is invalid.
    """
    parts = given.split(":") if isinstance(given, str) else given
    digits = [str(part) for part in parts] if isinstance(parts, tuple | list) else []
    # A team has lists with an entry for each number, and int() refuses thousands of digits.
    if len(digits) == 2 and all(each.isdecimal() and len(each) <= 4 for each in digits):
        least, most = map(int, digits)
        if 1 <= least <= most:
            return least, most
    raise ConfigError(
        f"{option} is {short(given)}; give the fewest and the most as MIN:MAX, such as 2:4, with "
        "9999 at most"
    )


#: By the type of an attribute, the function that reads it from JSON.
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
        ValueError: The JSON is not of that kind.
    """
    attributes = dataclass_fields(kind)  # type: ignore[arg-type]
    return kind(**{one.name: _READERS[one.type](fields, one.name) for one in attributes})
