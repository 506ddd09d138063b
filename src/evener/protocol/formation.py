"""Messages between the coordinator and the workers of an elastic team. Pure.

A *standing* is the state that a member reports when it has left its generation. A *formation* is
the next generation.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from dataclasses import fields as dataclass_fields
from enum import StrEnum
from typing import Any, Final

from evener.errors import ConfigError
from evener.parsing import Fields, short, whole

NO_NUMBER: Final = -1
"""The number of a worker that has none, because other workers have all numbers."""

WHOLE_RUN: Final = 0
"""Generation under which the coordinator keeps what holds for all generations."""

TRAINING: Final = "training"
"""The phase of a member whose next exchange is about plans: only then can a joiner take part."""

EVALUATING: Final = "evaluating"

WAITING: Final = "waiting"
"""The phase of a member that waits for others, in an exchange."""

PARKED: Final = "parked"
"""The phase of a parked member: the others train without it, and it waits to be called back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """The state of a member that has left its generation.

    Attributes:
        member: Its id.
        generation: The last generation that it was in.
        applied: Windows that it has applied.
        committed: Windows that it has committed; at most ``applied``.
        digest: Of its state after ``applied``, in hexadecimal; members with the same digest hold
            the same bits.
        phase: Its phase then: ``TRAINING``, or a text of its own.
    """

    member: str
    generation: int
    applied: int
    committed: int
    digest: str
    phase: str = TRAINING


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
        donor: The member whose state all members adopt.
        receivers: Members that must receive the donor's state; the others hold the same bits.
        lease_s: So long after a heartbeat a member may commit.
        detect_s: Seconds from the last heartbeat of the lost member to the end of the previous
            generation; 0 if none was lost.
    """

    generation: int
    members: tuple[str, ...]
    numbers: tuple[int, ...]
    base: int
    has_state: bool
    donor: str
    receivers: tuple[str, ...]
    lease_s: float
    detect_s: float = 0.0

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
        gather_s: So long after the last arrival the first generation forms with fewer than the
            most workers. Also how long members may take to leave a generation together.
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


def parse_team_limits(text: str) -> tuple[int, int]:
    """Return the fewest and the most members of a team from ``MIN:MAX``.

    Raises:
        ConfigError: It is something else.
    """
    limits = _limits_of(text.split(":"))
    if limits is None:
        raise ConfigError(
            f"--elastic is {short(text)}; give the fewest and the most workers as MIN:MAX, such as "
            "2:4, with 9999 at most"
        )
    return limits


def read_team_limits(given: object) -> tuple[int, int]:
    """Return the fewest and the most members of a team from ``"MIN:MAX"`` or ``(MIN, MAX)``.

    Raises:
        ConfigError: It is something else.
    """
    parts = given.split(":") if isinstance(given, str) else given
    limits = _limits_of(parts) if isinstance(parts, tuple | list) else None
    if limits is None:
        raise ConfigError(
            f"elastic is {short(given)}; give the fewest and the most workers, such as (2, 4) or "
            "'2:4', with 9999 at most"
        )
    return limits


def _limits_of(parts: Sequence[object]) -> tuple[int, int] | None:
    """Return two numbers of workers; ``None`` if these are not such numbers."""
    digits = [str(part) for part in parts]
    # A team keeps lists with a place for each number, and int() refuses thousands of digits.
    if len(digits) != 2 or not all(each.isdecimal() and len(each) <= 4 for each in digits):
        return None
    least, most = map(int, digits)
    return (least, most) if 1 <= least <= most else None


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
        detect_s=fields.number("detect_s", least=0.0),
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
