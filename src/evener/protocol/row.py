"""The row: all that a rank says when it meets the others, for every policy and purpose. Pure.

Rows travel as float64. One codec serves rows, reports and plans: the fields of a dataclass in
order. Decoding checks and never repairs: a row that does not add up means that ranks run different
code, and training on it would be worse than stopping.
"""

import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum, IntEnum
from functools import cache
from typing import Any, Final, TypeVar, get_type_hints

from evener.errors import ProtocolError
from evener.planning.plan import WindowPlan
from evener.planning.report import NOTHING, Report

T = TypeVar("T")

ALL: Final = -1
"""In place of the number of one optimizer: all of them."""

ADMIT: Final = -1
"""The planner's wish to take parked ranks back."""

CALL: Final = -2
"""The planner's wish to ask parked ranks whether they are still there."""

_LARGEST_EXACT: Final = 2**53
"""Whole numbers up to here survive the journey as float64."""

_LEAST: Final = {"part": ALL, "change": CALL, "non_finite": -2}
"""Where a whole number may be negative."""


class Purpose(IntEnum):
    """What a rank wants when it meets the others; all must want the same."""

    PLAN = 1
    PROBE = 2
    WINDOW = 3
    REST = 4
    VALUE = 5
    SAVE = 6
    REHEARSE = 7
    AWAY = 8
    CALL = 9
    IDLE = 10
    STEP = 11
    EVALUATE = 12
    GATHER = 13
    CHANGE = 14

    @property
    def deed(self) -> str:
        """The purpose in words, for errors."""
        return _DEEDS[self]


_DEEDS: Final = {
    Purpose.PLAN: "starting an epoch (loader.epoch)",
    Purpose.PROBE: "timing its device before the first window",
    Purpose.WINDOW: "closing a window (ddp.step, or the loader of a rank without a share)",
    Purpose.REST: "ending an epoch (the loader is exhausted, or break has left it)",
    Purpose.VALUE: "averaging a value (ddp.weighted_mean)",
    Purpose.SAVE: "saving (ddp.save)",
    Purpose.REHEARSE: "measuring speeds",
    Purpose.AWAY: "parked, waiting to be called back",
    Purpose.CALL: "calling parked ranks",
    Purpose.IDLE: "waiting in the loader, with nothing to do in this window",
    Purpose.STEP: "closing a window (ddp.step, outside of a map-style ddp.loader)",
    Purpose.EVALUATE: "starting an evaluation (iterating over its loader)",
    Purpose.GATHER: "gathering rows (ddp.gather, or the end of an evaluation's loop)",
    Purpose.CHANGE: "changing the team (a rank is parked or called back)",
}


class Drop(IntEnum):
    """Whether, and why, nobody may apply the window."""

    NO = 0
    STOP = 1
    """This rank was told to stop in mid-window: its samples stay uncommitted."""
    REDO = 2
    """Its share cannot be finished after it was announced: all compute the window again."""
    LEFT = 3
    """Its loop was left by ``break`` after it had announced the window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one rank says in one round.

    A row that is not *final* is an announcement: its ``report`` says nothing yet, and it permits
    one thing, that gradients begin to travel once every rank has announced the same window.

    Attributes:
        purpose: What it wants.
        window: Number of the window that it is in.
        generation: Number of the generation that it belongs to.
        attempt: How often the window was begun anew.
        final: Whether the report is valid.
        stop: Whether it wants the team to stop after this window.
        drop: Whether it asks that nobody applies the window.
        left: Whether its loop was left by ``break``.
        gone: Whether it wants to leave the team after this window.
        busy: Whether an exchange of its own has not landed (ASYNC).
        late: Whether a gradient came into a bucket that had left.
        part: Optimizer that is to be stepped alone; ``ALL`` closes the window.
        turns: Optimizers' turns taken in this window.
        change: The planner's wish: 0 for none, r + 1 to park rank r, ``ADMIT``, ``CALL``.
        trainable: How many of its parameters are trainable: those that are averaged.
        rates: Digest of its learning rates.
        may_skip: Whether what is not finite on it may be left out: an overflow of fp16 that a
            smaller scale may mend, or the user's wish.
        report: Its part of the window.
        body: Further numbers; what they are depends on the purpose.
    """

    purpose: Purpose
    window: int
    generation: int = 0
    attempt: int = 0
    final: bool = True
    stop: bool = False
    drop: Drop = Drop.NO
    left: bool = False
    gone: bool = False
    busy: bool = False
    late: bool = False
    part: int = ALL
    turns: int = 0
    change: int = 0
    trainable: int = 0
    rates: float = 0.0
    may_skip: bool = False
    report: Report = NOTHING
    body: tuple[float, ...] = ()


def room_of(world_size: int) -> int:
    """Most numbers of a body: the longest plan, and what a rank says of its data."""
    return 16 + 3 * world_size


def encode(row: Row, world_size: int) -> list[float]:
    """The row as numbers, as many for each purpose; the last one is a checksum.

    Raises:
        ProtocolError: The body is too long.
    """
    room = room_of(world_size)
    if len(row.body) > room:
        raise ProtocolError(f"payload of {len(row.body)} numbers, room for {room}")
    numbers = pack(row)
    numbers += [float(len(row.body)), *row.body, *[0.0] * (room - len(row.body))]
    return [*numbers, _checksum(numbers)]


def decode(numbers: Sequence[float]) -> Row:
    """Inverse of ``encode``.

    Weight and loss pass as they are: both come from the user, and what is wrong with them is told
    in the user's terms where they are combined.

    Raises:
        ProtocolError: The row is damaged, or a number is out of range.
    """
    if numbers[-1] != _checksum(numbers[:-1]):
        raise ProtocolError(
            f"a received row of {len(numbers)} numbers does not match its checksum "
            f"{numbers[-1]:.0f}: it was damaged on the way, or ranks run different versions of "
            "evener"
        )
    head = _length(Row)
    length = int(numbers[head])
    return unpack(Row, numbers[:head], body=tuple(numbers[head + 1 : head + 1 + length]))


def pack(value: Any) -> list[float]:
    """The fields of a dataclass as float64; tuples one by one.

    Raises:
        ProtocolError: A whole number is too large to travel exactly.
    """
    numbers: list[float] = []
    whole: Any = type(value)
    for name, kind in _kinds(whole):
        field = getattr(value, name)
        if kind is float or kind is bool:
            numbers.append(float(field))
        elif kind is int:
            if field > _LARGEST_EXACT:
                raise ProtocolError(
                    f"{value} holds a number above 2**53, which float64 cannot carry"
                )
            numbers.append(float(field))
        elif kind is tuple:
            numbers += map(float, field)
        elif issubclass(kind, Enum):
            numbers.append(float(_members(kind).index(field)))
        else:
            numbers += pack(field)
    return numbers


def unpack(kind: type[T], numbers: Sequence[float], **given: Any) -> T:
    """Inverse of ``pack``.

    Args:
        kind: The dataclass. All its tuples have one length, which follows from that of ``numbers``.
        numbers: Its fields.
        **given: Fields that did not travel.

    Raises:
        ProtocolError: Wrong length, or a number that is not whole or out of range.
    """
    whole: Any = kind
    tuples = [name for name, of in _kinds(whole) if of is tuple]
    beyond = len(numbers) - _length(whole)
    if beyond < 0 or beyond % max(1, len(tuples)) or (beyond and not tuples):
        raise ProtocolError(
            f"an encoded {kind.__name__} of {len(numbers)} numbers was received, it has "
            f"{_length(whole)}: do all ranks run the same version of evener?"
        )
    values, at = dict(given), 0
    for name, of in _kinds(whole):
        length = beyond // len(tuples) if of is tuple else _length(of)
        values[name] = _value(name, of, numbers[at : at + length])
        at += length
    return kind(**values)


def _value(name: str, kind: Any, numbers: Sequence[float]) -> Any:
    if kind is tuple:
        return tuple(_whole(name, number) for number in numbers)
    if kind is int:
        return _whole(name, numbers[0])
    if kind is bool:
        return numbers[0] > 0
    if kind is float:
        if name.endswith("_s") and not numbers[0] >= 0:
            raise ProtocolError(f"received report has {name}={numbers[0]}, which is no duration")
        return numbers[0]
    if not issubclass(kind, Enum):
        return unpack(kind, numbers)
    members, index = _members(kind), _whole(name, numbers[0])
    if index >= len(members):
        raise ProtocolError(f"received {name} is {index}; known are 0 to {len(members) - 1}")
    return members[index]


def _whole(name: str, value: float) -> int:
    """Check that a received number is a whole one that float64 carries exactly."""
    if not math.isfinite(value) or value != math.floor(value):
        raise ProtocolError(f"received field {name!r} is {value}, which is not a whole number")
    least = _LEAST.get(name, 0)
    if not least <= value <= _LARGEST_EXACT:
        raise ProtocolError(f"received field {name!r} is {value:.0f}, outside {least}..2**53")
    return int(value)


@cache
def _kinds(kind: Any) -> tuple[tuple[str, Any], ...]:
    """Fields that travel, and their types; a body follows its row."""
    hints = get_type_hints(kind)
    of = ((f.name, hints[f.name]) for f in fields(kind) if f.name != "body")
    return tuple((name, getattr(hint, "__origin__", hint)) for name, hint in of)


@cache
def _length(kind: Any) -> int:
    """Numbers of a field; without those of tuples."""
    if not is_dataclass(kind):
        return 1
    assert isinstance(kind, type)
    return sum(0 if of is tuple else _length(of) for _, of in _kinds(kind))


@cache
def _members(kind: Any) -> tuple[Enum, ...]:
    return tuple(kind)


def _checksum(numbers: Sequence[float]) -> float:
    """CRC-32 of the numbers as little-endian float64; below 2**32, so float64 carries it."""
    return float(zlib.crc32(struct.pack(f"<{len(numbers)}d", *numbers)))


def unpack_plan(numbers: Sequence[float]) -> WindowPlan:
    """The plan that a row of SYNC carries.

    Raises:
        ProtocolError: It does not add up.
    """
    plan = unpack(WindowPlan, numbers)
    total = 0
    for share in plan.shares:
        total += share
    if total != plan.size:
        raise ProtocolError(
            f"plan of window {plan.window} has shares {plan.shares}, which sum to {total} "
            f"samples, but the window has {plan.size}"
        )
    return plan
