"""The row: one rank's message to the others in one round, for every policy and purpose. Pure.

Rows travel as float64. One codec serves rows, reports and plans: the fields of a class in order.
Ranks have compared their versions before, so what arrives is what was sent.
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
        description: The purpose in words, for errors.
    """

    description: str

    PLAN = 1, "starting an epoch (loader.epoch)"
    WINDOW = 2, "closing a window (ddp.step, or the loader of a rank without a share)"
    STEP = 3, "closing a window (ddp.step, outside of a map-style ddp.loader)"
    IDLE = 4, "waiting in the loader, with nothing to do in this window"
    REST = 5, "ending an epoch (the loader is exhausted, or break has left it)"
    CHANGE = 6, "changing the team (a rank is parked or called back, joins or leaves)"
    ASK = 7, "exchanging something outside of windows"

    def __new__(cls, number: int, description: str) -> Self:
        """Make a member of its number and words."""
        self = int.__new__(cls, number)
        self._value_, self.description = number, description
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
        redo: Whether its share did not fit into memory when some of its gradients had left, so that
            all ranks compute the window again.
        left: Whether its loop was left by ``break``.
        leaving: Whether it was told to leave an elastic team for good.
        busy: Whether an exchange of its own has not landed (ASYNC).
        begun: Whether its gradients have begun to travel, during backward.
        late: Whether some came after they had left, which are exchanged in addition.
        order: Digest of the order in which backward has completed its gradients; 0 if not known.
        backward_s: Seconds of its last backward, in which gradients can travel.
        slower: By which part an exchange would slow that backward down.
        part: Optimizer that is to be stepped alone; ``ALL`` closes the window.
        renew: Whether the planner wishes to end the generation, as the members of an elastic team
            are to change.
        trainable: How many of its parameters are trainable: those that are averaged.
        rates: Digest of its learning rates.
        hooked: Whether the user's hooks on its optimizers need all gradients and parameters.
        summed: Whether its loss is a sum, whose gradient is not divided by the weight.
        may_skip: Whether a window that is not finite on it may be skipped: an overflow of fp16 that
            a smaller scale may prevent, or the user's option.
        digest: Of the state after the previous window, where this rank compares it; else 0.
        report: Its part of the window.
        num_samples: Of the data set, as a rank says that begins an epoch.
        batch_size: Of its loader.
        seed: Of the order of samples, below 2**53.
        plan: The planner's plan: of the window after the next in SYNC, and of the next one in
            CADENCE, in ASYNC and where an epoch begins.
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
        """Return what must be the same on all ranks."""
        return self.num_samples, self.batch_size, self.seed


def encode(row: Row, world_size: int) -> list[float]:
    """Return the row as numbers, as many with a plan as without."""
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

    An empty tuple travels as zeros.
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
        kind: What to make of it. All its tuples have one length, which follows from how many
            ``numbers`` there are.
        numbers: Its fields.
        **given: Fields that did not travel.
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
    """How a class travels.

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
