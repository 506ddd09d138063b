"""The row: one rank's message to the others in one round, for every policy and purpose. Pure.

Rows are sent as float64. One codec serves rows, reports and plans: the fields of a class in order.
Ranks have compared their versions before, so all use the same fields.
"""

import struct
import zlib
from collections.abc import Callable, Sequence
from enum import Enum, IntEnum
from functools import cache
from types import NoneType
from typing import Any, Final, NamedTuple, Self, TypeVar, get_args, get_type_hints

from evener.planning.plans import LocalPlan, WindowPlan
from evener.planning.report import NOTHING, Report

T = TypeVar("T")

Plan = WindowPlan | LocalPlan
_PLANS: Final = (NoneType, WindowPlan, LocalPlan)

ALL: Final = -1
"""In place of the number of one optimizer: all of them."""


class Purpose(IntEnum):
    """The purpose of a rank in a round; it must be the same on all ranks.

    Attributes:
        description: The purpose as text, for errors.
    """

    description: str

    PLAN = 1, "starting an epoch (loader.epoch)"
    WINDOW = 2, "closing a window (ddp.step, or the loader of a rank without a share)"
    STEP = 3, "closing a window (ddp.step, outside of a map-style ddp.loader)"
    IDLE = 4, "waiting in the loader, with nothing to do in this window"
    REST = 5, "ending an epoch (the loader is exhausted, or break has left it)"
    CHANGE = 6, "changing the team (a rank is parked or recalled, joins or leaves)"
    ASK = 7, "exchanging values outside of windows"

    def __new__(cls, number: int, description: str) -> Self:
        """Make a member with a number and a description."""
        self = int.__new__(cls, number)
        self._value_, self.description = number, description
        return self


class Row(NamedTuple):
    """One rank's message in one round.

    Attributes:
        purpose: The rank's purpose.
        window: Number of its window.
        generation: Number of its generation.
        stop: Whether it wants the team to stop after this window.
        drop: Whether it was asked to stop in mid-window, so that no rank may apply the window: its
            samples stay uncommitted.
        redo: Whether its share did not fit into memory after some of its gradients were sent, so
            that all ranks compute the window again.
        left: Whether its loop was left by ``break``.
        leaving: Whether it was asked to leave an elastic team for good.
        busy: Whether the average of its last exchange is not applied yet (ASYNC).
        begun: Whether its gradients are being exchanged during backward.
        late: Whether some gradients came after their exchange, which are exchanged in addition.
        order: Digest of the order in which backward has completed its gradients; 0 if not known.
        backward_s: Seconds of its last backward, during which gradients can be exchanged.
        slower: Fraction by which an exchange would slow that backward down.
        part: Optimizer that is to be stepped alone; ``ALL`` closes the window.
        renew: Whether the planner wishes to end the generation, so that the members of an elastic
            team can change.
        trainable: Number of its trainable parameters, which are averaged.
        rates: Digest of its learning rates.
        hooked: Whether the user's hooks on its optimizers need all gradients and parameters.
        summed: Whether its loss is a sum, whose gradient is not divided by the weight.
        may_skip: Whether a window that is not finite on it may be skipped: an overflow of fp16 that
            a smaller scale may prevent, or the user's option.
        digest: Digest of the state after the previous window, if ranks compare it; else 0.
        report: Its part of the window.
        num_samples: Size of the data set, from a rank that begins an epoch.
        batch_size: Batch size of its loader.
        seed: Seed of the order of samples, below 2**53.
        plan: The planner's plan: of the window after the next in SYNC, and of the next one in
            CADENCE, in ASYNC and at the beginning of an epoch.
    """

    purpose: Purpose
    window: int
    generation: int = 0
    stop: bool = False
    drop: bool = False
    redo: bool = False
    left: bool = False
    leaving: bool = False
    busy: bool = False
    begun: bool = False
    late: bool = False
    order: float = 0.0
    backward_s: float = 0.0
    slower: float = 0.0
    part: int = ALL
    renew: bool = False
    trainable: int = 0
    rates: float = 0.0
    hooked: bool = False
    summed: bool = False
    may_skip: bool = False
    digest: float = 0.0
    report: Report = NOTHING
    num_samples: int = 0
    batch_size: int = 0
    seed: int = 0
    plan: Plan | None = None

    @property
    def data(self) -> tuple[int, int, int]:
        """Return the values that must be the same on all ranks."""
        return self.num_samples, self.batch_size, self.seed


def encode(row: Row, world_size: int) -> list[float]:
    """Return the row as numbers; their count does not depend on whether it has a plan."""
    room = 16 + 3 * world_size  # for the longest plan
    plan = [] if row.plan is None else pack(row.plan)
    kind = float(_PLANS.index(type(row.plan)))
    fill = [0.0] * (room - len(plan))
    return [*pack(row), *pack(row.report), kind, float(len(plan)), *plan, *fill]


def decode(numbers: Sequence[float]) -> Row:
    """Invert ``encode``."""
    head, report = len(_layout(Row).scalars), len(_layout(Report).scalars)
    kind, length, *plan = numbers[head + report :]
    given: dict[str, Any] = {"report": unpack(Report, numbers[head : head + report])}
    if length:
        of: Any = _PLANS[int(kind)]
        given["plan"] = unpack(of, plan[: int(length)])
    return unpack(Row, numbers[:head], **given)


def pack(value: Any) -> list[float]:
    """Return the fields of a row, report or plan as float64: single numbers first, then tuples.

    An empty tuple is sent as zeros.
    """
    numbers: list[float] = []
    whole: Any = type(value)
    layout = _layout(whole)
    for name, kind in layout.scalars.items():
        field = getattr(value, name)
        numbers.append(float(kind.index(field) if isinstance(kind, tuple) else field))
    tuples = [getattr(value, name) for name in layout.tuples]
    longest = max(map(len, tuples), default=0)
    for field in tuples:
        numbers += map(float, field or (0,) * longest)
    return numbers


def unpack(kind: type[T], numbers: Sequence[float], **given: Any) -> T:
    """Invert ``pack``.

    Args:
        kind: The class. All its tuples have one length, which follows from the count of
            ``numbers``.
        numbers: Its fields.
        **given: Fields that are not in ``numbers``.
    """
    whole: Any = kind
    layout = _layout(whole)
    for (name, of), number in zip(layout.scalars.items(), numbers, strict=False):
        given[name] = of[int(number)] if isinstance(of, tuple) else of(number)
    count, num_tuples = len(layout.scalars), len(layout.tuples)
    size = (len(numbers) - count) // (num_tuples or 1)
    for place, name in enumerate(layout.tuples):
        first = count + place * size
        given[name] = tuple(map(int, numbers[first : first + size]))
    return kind(**given)


class _Layout(NamedTuple):
    """The encoding of a class.

    Attributes:
        scalars: Single numbers by name: their type, or the members of their enumeration.
        tuples: Tuples of whole numbers, all of one length.
    """

    scalars: dict[str, Callable[[float], Any] | tuple[Enum, ...]]
    tuples: tuple[str, ...]


@cache
def _layout(kind: Any) -> _Layout:
    scalars: dict[str, Any] = {}
    tuples = []
    for name, hint in get_type_hints(kind).items():
        if hint in (int, float, bool):
            scalars[name] = hint
        elif isinstance(hint, type) and issubclass(hint, Enum):
            scalars[name] = tuple(hint)
        elif get_args(hint) == (int, ...):
            tuples.append(name)
    return _Layout(scalars, tuple(tuples))


def checksum(numbers: Sequence[float]) -> float:
    """Return the CRC-32 of numbers as little-endian float64; float64 holds it exactly."""
    return float(zlib.crc32(struct.pack(f"<{len(numbers)}d", *numbers)))
