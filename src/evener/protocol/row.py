"""The row: one rank's message to the others in one round, for every policy and purpose. Pure.

Rows travel as float64. One codec serves rows, reports and plans: the fields of a dataclass in
order. Decoding checks and never repairs. An inconsistent row means that ranks run different code,
and training on it would give wrong results, so the team stops.
"""

import math
import struct
import zlib
from collections.abc import Sequence
from enum import Enum, IntEnum
from functools import cache
from typing import Any, Final, NamedTuple, Self, TypeVar, get_args, get_type_hints

from evener.errors import ProtocolError
from evener.planning.plans import LocalPlan, WindowPlan
from evener.planning.report import NOTHING, Report

T = TypeVar("T")

ALL: Final = -1
"""In place of the number of one optimizer: all of them."""

DATA_LENGTH: Final = 3
"""Numbers in what a rank says of its data, at the beginning of the body of a PLAN row."""

_LARGEST_EXACT: Final = 2**53
"""Whole numbers up to here survive the journey as float64."""

_NUMBERS: Final = (int, bool, float)

_LEAST: Final = {"part": ALL, "non_finite": -2, "late_non_finite": -2, "round": -1}
"""Where a whole number may be negative."""


class Purpose(IntEnum):
    """The purpose of a rank in a round; it must be the same on all ranks.

    Attributes:
        deed: The purpose in words, for errors.
    """

    deed: str

    PLAN = 1, "starting an epoch (loader.epoch)"
    PROBE = 2, "timing its device before the first window"
    WINDOW = 3, "closing a window (ddp.step, or the loader of a rank without a share)"
    REST = 4, "ending an epoch (the loader is exhausted, or break has left it)"
    VALUE = 5, "averaging a value (ddp.weighted_mean)"
    SAVE = 6, "saving (ddp.save)"
    REHEARSE = 7, "measuring speeds"
    IDLE = 8, "waiting in the loader, with nothing to do in this window"
    STEP = 9, "closing a window (ddp.step, outside of a map-style ddp.loader)"
    EVALUATE = 10, "starting an evaluation (iterating over its loader)"
    GATHER = 11, "gathering rows (ddp.gather, or the end of an evaluation's loop)"
    CHANGE = 12, "changing the team (a rank is parked or called back, joins or leaves)"
    STATE = 13, "gathering optimizer state (optimizer.state_dict)"
    CLOSE = 14, "leaving the team (ddp.close)"
    FORM = 15, "beginning a generation, as a rank was lost or joins"

    def __new__(cls, number: int, deed: str) -> Self:
        """Make a member of its number and words."""
        self = int.__new__(cls, number)
        self._value_, self.deed = number, deed
        return self


class Row(NamedTuple):
    """One rank's message in one round.

    Attributes:
        purpose: What it wants.
        window: Number of the window that it is in.
        generation: Number of the generation that it belongs to.
        stop: Whether it wants the team to stop after this window.
        drop: Whether it was told to stop in mid-window, so that no rank may apply the window: its
            samples stay uncommitted.
        left: Whether its loop was left by ``break``.
        leaving: Whether it was told to leave an elastic team for good.
        busy: Whether an exchange of its own has not landed (ASYNC).
        part: Optimizer that is to be stepped alone; ``ALL`` closes the window.
        renew: Whether the planner wishes to end the generation, as the members of an elastic team
            are to change.
        trainable: How many of its parameters are trainable: those that are averaged.
        rates: Digest of its learning rates.
        hooked: Whether the user's hooks on its optimizers need all gradients and parameters.
        summed: Whether its loss is a sum, whose gradient is not divided by the weight.
        may_skip: Whether a window that is not finite on it may be skipped: an overflow of fp16 that
            a smaller scale may prevent, or the user's option.
        late_non_finite: ``non_finite`` of the previous window, if a device decides whether an
            update is made. The host did not wait for the device, so that window's report did not
            have it.
        report: Its part of the window.
        body: Further numbers; their meaning depends on the purpose.
    """

    purpose: Purpose
    window: int
    generation: int = 0
    stop: bool = False
    drop: bool = False
    left: bool = False
    leaving: bool = False
    busy: bool = False
    part: int = ALL
    renew: bool = False
    trainable: int = 0
    rates: float = 0.0
    hooked: bool = False
    summed: bool = False
    may_skip: bool = False
    late_non_finite: int = 0
    report: Report = NOTHING
    body: tuple[float, ...] = ()


def room_of(world_size: int) -> int:
    """Return the most numbers of a body: the longest plan, or a rank's description of its data."""
    return 16 + 3 * world_size


def encode(row: Row, world_size: int) -> list[float]:
    """Return the row as numbers, as many for each purpose; the last one is a checksum.

    Raises:
        ProtocolError: The body is too long.
    """
    room = room_of(world_size)
    if len(row.body) > room:
        raise ProtocolError(f"payload of {len(row.body)} numbers, room for {room}")
    numbers = [*pack(row), *pack(row.report), float(len(row.body)), *row.body]
    numbers += [0.0] * (room - len(row.body))
    return [*numbers, checksum(numbers)]


def decode(numbers: Sequence[float]) -> Row:
    """Invert ``encode``.

    Weight and loss pass as they are: both come from the user, and what is wrong with them is told
    in the user's terms where they are combined.

    Raises:
        ProtocolError: The row is damaged, or a number is out of range.
    """
    if numbers[-1] != checksum(numbers[:-1]):
        raise ProtocolError(
            f"a received row of {len(numbers)} numbers does not match its checksum "
            f"{numbers[-1]:.0f}: it was damaged on the way, or ranks run different versions of "
            "evener"
        )
    head, report = len(_layout(Row).scalars), len(_layout(Report).scalars)
    said, rest = numbers[:head], numbers[head + report :]
    return unpack(
        Row,
        said,
        report=unpack(Report, numbers[head : head + report]),
        body=tuple(rest[1 : 1 + int(rest[0])]),
    )


def pack(value: Any) -> list[float]:
    """Return the fields of a row, report or plan as float64: single numbers first, then tuples.

    Raises:
        ProtocolError: A whole number is too large to travel exactly.
    """
    numbers: list[float] = []
    whole: Any = type(value)
    layout = _layout(whole)
    for name, kind, _, most in layout.scalars:
        field = getattr(value, name)
        if kind is int and field > most:
            raise ProtocolError(f"{value} holds a number above 2**53, which float64 cannot carry")
        numbers.append(float(field if kind in _NUMBERS else kind.index(field)))
    for name in layout.tuples:
        numbers += map(float, getattr(value, name))
    return numbers


def unpack(kind: type[T], numbers: Sequence[float], **given: Any) -> T:
    """Invert ``pack``.

    Args:
        kind: What to make of it. All its tuples have one length, which follows from how many
            ``numbers`` there are.
        numbers: Its fields.
        **given: Fields that did not travel.

    Raises:
        ProtocolError: Wrong length, or a number that is not whole or out of range.
    """
    whole: Any = kind
    layout = _layout(whole)
    count, num_tuples = len(layout.scalars), len(layout.tuples)
    size, over = divmod(len(numbers) - count, num_tuples or 1)
    if size < 0 or over or (size and not num_tuples):
        raise ProtocolError(
            f"an encoded {kind.__name__} of {len(numbers)} numbers was received, it has "
            f"{count}: do all ranks run the same version of evener?"
        )
    for (name, of, least, most), number in zip(layout.scalars, numbers, strict=False):
        if of is float:
            if number < least or (least == 0 and number != number):
                raise ProtocolError(f"received report has {name}={number}, which is not a duration")
            given[name] = number
            continue
        exact = _whole(name, number, least, most)
        given[name] = of(exact) if of in _NUMBERS else of[exact]
    for place, name in enumerate(layout.tuples):
        part = numbers[count + place * size : count + (place + 1) * size]
        given[name] = tuple(_whole(name, number, 0, _LARGEST_EXACT) for number in part)
    return kind(**given)


def _whole(name: str, value: float, least: float, most: float) -> int:
    """Check that a received number is a whole one within its range."""
    if least <= value <= most and value == int(value):
        return int(value)
    if not math.isfinite(value) or value != math.floor(value):
        raise ProtocolError(f"received field {name!r} is {value}, which is not a whole number")
    raise ProtocolError(f"received field {name!r} is {value:.0f}, outside {least}..{most}")


class _Layout(NamedTuple):
    """How a class travels: single numbers, each with its kind and range, and tuples of some."""

    scalars: tuple[tuple[str, Any, float, float], ...]
    tuples: tuple[str, ...]


@cache
def _layout(kind: Any) -> _Layout:
    scalars: list[tuple[str, Any, float, float]] = []
    tuples = []
    for name, hint in get_type_hints(kind).items():
        if hint is float:
            scalars.append((name, hint, 0 if name.endswith("_s") else -math.inf, math.inf))
        elif hint is int:
            scalars.append((name, hint, _LEAST.get(name, 0), _LARGEST_EXACT))
        elif hint is bool:
            scalars.append((name, hint, 0, 1))
        elif isinstance(hint, type) and issubclass(hint, Enum):
            scalars.append((name, tuple(hint), 0, len(hint) - 1))
        elif get_args(hint) == (int, ...):
            tuples.append(name)
    return _Layout(tuple(scalars), tuple(tuples))


def checksum(numbers: Sequence[float]) -> float:
    """Return the CRC-32 of numbers as little-endian float64; float64 holds it exactly."""
    return float(zlib.crc32(struct.pack(f"<{len(numbers)}d", *numbers)))


def unpack_plan(numbers: Sequence[float], world_size: int) -> WindowPlan:
    """Return the plan that a row of SYNC carries.

    Raises:
        ProtocolError: It does not add up, or is for another number of ranks.
    """
    plan = unpack(WindowPlan, numbers)
    if not len(plan.shares) == len(plan.parked) == world_size:
        raise ProtocolError(
            f"plan of window {plan.window} is for {len(plan.shares)} ranks, not for {world_size}"
        )
    total = sum(plan.shares)
    if total != plan.size:
        raise ProtocolError(
            f"plan of window {plan.window} has shares {plan.shares}, which sum to {total} "
            f"samples, but the window has {plan.size}"
        )
    return plan


def unpack_local_plan(numbers: Sequence[float]) -> LocalPlan:
    """Return the plan that a row of CADENCE or ASYNC carries.

    Raises:
        ProtocolError: A number is out of range.
    """
    plan = unpack(LocalPlan, numbers)
    if plan.window_s == 0:
        raise ProtocolError(f"{plan} holds a number that is out of range: window_s must be above 0")
    return plan
