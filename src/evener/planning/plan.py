"""What a window is: who does which samples (the plan) and what came of it (the report).

One rank plans and all others learn the plan from the header that every window exchanges, so both
have a fixed-length form as float64 numbers. Decoding checks shape and sums and never repairs: a row
that does not add up means that ranks run different code, and training on it would be worse than
stopping.
"""

import math
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from evener.errors import ProtocolError

_LARGEST_EXACT = 2**53
"""Whole numbers up to here survive the journey as float64."""

_REPORT_FIELDS = (
    "weight",
    "loss_sum",
    "compute_s",
    "micro_batches",
    "samples",
    "non_finite",
    "leaving",
    "warmup_s",
    "warmup_micro_batches",
    "warmup_samples",
)
REPORT_LENGTH = len(_REPORT_FIELDS)
"""Numbers in an encoded report."""

_PLAN_FIELDS = ("window", "epoch", "start", "size")


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowReport:
    """One member's row about the window that it has just computed.

    Attributes:
        weight: Sum of the weights of its micro-batches.
        loss_sum: Sum of weight times loss over its micro-batches.
        compute_s: Seconds of compute, without any wait for other ranks.
        micro_batches: Micro-batches computed.
        samples: Samples computed; what the header calls "done".
        non_finite: 0 if everything is finite; k > 0 if the gradient of trainable parameter k - 1
            (in flat order) is not; -1 if the loss is not.
        leaving: 0 stays; 1 wants the team to stop after this window; 2 abandoned this window, which
            nobody may apply.
        warmup_s: How much of ``compute_s`` tells nothing of the rank's speed: the first micro-batch
            of each size pays for what is set up once (caches, autotuning, compiling).
        warmup_micro_batches: How many of ``micro_batches`` these were.
        warmup_samples: And how many of ``samples``.
    """

    weight: float = 0.0
    loss_sum: float = 0.0
    compute_s: float = 0.0
    micro_batches: int = 0
    samples: int = 0
    non_finite: int = 0
    leaving: int = 0
    warmup_s: float = 0.0
    warmup_micro_batches: int = 0
    warmup_samples: int = 0


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """Which samples of which epoch each rank computes in one window.

    Attributes:
        window: Global number of the window over the whole run, from 0; the only counter that is
            the same on every rank.
        epoch: Epoch whose permutation the positions refer to.
        start: First position of the window.
        size: Samples of the window over all ranks.
        shares: Whole samples for each rank, by rank; they sum to ``size``.

    Raises:
        ProtocolError: A number is negative or the shares do not sum to ``size``.
    """

    window: int
    epoch: int
    start: int
    size: int
    shares: tuple[int, ...]

    def __post_init__(self) -> None:
        """Refuse a plan that does not add up, wherever it comes from."""
        for name in _PLAN_FIELDS:
            value = getattr(self, name)
            if value < 0:
                raise ProtocolError(f"window plan has {name}={value}, which must not be negative")
        total = 0
        for rank, share in enumerate(self.shares):
            if share < 0:
                raise ProtocolError(
                    f"plan of window {self.window} gives rank {rank} a share of {share} samples"
                )
            total += share
        if total != self.size:
            raise ProtocolError(
                f"plan of window {self.window} has shares {self.shares}, which sum to {total} "
                f"samples, but the window has {self.size}"
            )

    @property
    def stop(self) -> int:
        """One past the last position of the window."""
        return self.start + self.size

    def positions(self, rank: int) -> range:
        """Positions of the epoch's permutation that ``rank`` computes: ranks take adjacent slices.

        Args:
            rank: Rank of the generation that the plan is for.

        Raises:
            ProtocolError: The plan has no such rank.
        """
        if not 0 <= rank < len(self.shares):
            raise ProtocolError(
                f"plan of window {self.window} is for {len(self.shares)} ranks; rank {rank} has no "
                "place in it"
            )
        first = self.start
        for share in self.shares[:rank]:
            first += share
        return range(first, first + self.shares[rank])


def plan_length(world_size: int) -> int:
    """Numbers in an encoded plan for ``world_size`` ranks."""
    return len(_PLAN_FIELDS) + world_size + 1


def encode_plan(plan: WindowPlan | None, world_size: int | None = None) -> list[float]:
    """Turn a plan into ``plan_length(world_size)`` float64 numbers, the last one a checksum.

    Args:
        plan: The plan, or ``None`` where there is none to tell, which encodes as all -1.
        world_size: Ranks of the generation; needed for ``None`` only, else checked.

    Raises:
        ProtocolError: The plan is for another number of ranks, ``None`` came without
            ``world_size``, or a number is too large to travel exactly.
    """
    if plan is None:
        if world_size is None:
            raise ProtocolError("an absent plan can be encoded only for a given world_size")
        return [-1.0] * plan_length(world_size)
    if world_size is not None and len(plan.shares) != world_size:
        raise ProtocolError(
            f"plan of window {plan.window} is for {len(plan.shares)} ranks, not for {world_size}"
        )
    values = (plan.window, plan.epoch, plan.start, plan.size, *plan.shares)
    if max(values) > _LARGEST_EXACT:
        raise ProtocolError(f"plan {values} holds a number above 2**53, which float64 cannot carry")
    floats = [float(value) for value in values]
    floats.append(_checksum(floats))
    return floats


def decode_plan(floats: Sequence[float], world_size: int) -> WindowPlan | None:
    """Inverse of ``encode_plan``; ``None`` where the sender had no plan to tell.

    Args:
        floats: The numbers as received.
        world_size: Ranks of the generation.

    Raises:
        ProtocolError: Wrong length, not whole, negative, damaged, or shares that do not sum to the
            size of the window.
    """
    if len(floats) != plan_length(world_size):
        raise ProtocolError(
            f"an encoded plan for {world_size} ranks has {plan_length(world_size)} numbers, "
            f"received {len(floats)}: do all ranks run the same version of evener?"
        )
    if all(value == -1.0 for value in floats):
        return None
    values = [_whole(value, _name_in_plan, k) for k, value in enumerate(floats[:-1])]
    if floats[-1] != _checksum(floats[:-1]):
        raise ProtocolError(
            f"received plan {values} does not match its checksum {floats[-1]:.0f}: it was damaged "
            "on the way, or ranks run different versions of evener"
        )
    window, epoch, start, size = values[:4]
    return WindowPlan(window=window, epoch=epoch, start=start, size=size, shares=tuple(values[4:]))


def encode_report(report: WindowReport) -> list[float]:
    """Turn a report into ``REPORT_LENGTH`` float64 numbers."""
    return [float(getattr(report, name)) for name in _REPORT_FIELDS]


def decode_report(floats: Sequence[float]) -> WindowReport:
    """Inverse of ``encode_report``.

    The weight and the loss pass as they are: both come from the user, and what is wrong with them
    is told in the user's terms where they are combined.

    Raises:
        ProtocolError: Wrong length, a count that is not whole or is out of range, or a time that is
            negative or not finite.
    """
    if len(floats) != REPORT_LENGTH:
        raise ProtocolError(
            f"an encoded report has {REPORT_LENGTH} numbers, received {len(floats)}: do all ranks "
            "run the same version of evener?"
        )
    weight, loss_sum, compute_s, micro_batches, samples, non_finite, leaving, *warmup = floats
    for name, seconds in (("compute_s", compute_s), ("warmup_s", warmup[0])):
        if not math.isfinite(seconds) or seconds < 0.0:
            raise ProtocolError(f"received report has {name}={seconds}, which is no duration")
    report = WindowReport(
        weight=weight,
        loss_sum=loss_sum,
        compute_s=compute_s,
        micro_batches=_whole(micro_batches, _name_in_report, 3),
        samples=_whole(samples, _name_in_report, 4),
        non_finite=_whole(non_finite, _name_in_report, 5, least=-1),
        leaving=_whole(leaving, _name_in_report, 6),
        warmup_s=warmup[0],
        warmup_micro_batches=_whole(warmup[1], _name_in_report, 8),
        warmup_samples=_whole(warmup[2], _name_in_report, 9),
    )
    if report.leaving > 2:
        raise ProtocolError(f"received report has leaving={report.leaving}; known are 0, 1 and 2")
    return report


def _whole(value: float, name: Callable[[int], str], number: int, *, least: int = 0) -> int:
    """Check that a received number is a whole one that float64 carries exactly."""
    if not math.isfinite(value) or value != math.floor(value):
        raise ProtocolError(f"received {name(number)} is {value}, which is not a whole number")
    if not least <= value <= _LARGEST_EXACT:
        raise ProtocolError(f"received {name(number)} is {value:.0f}, outside {least}..2**53")
    return int(value)


def _name_in_plan(number: int) -> str:
    first_share = len(_PLAN_FIELDS)
    if number < first_share:
        return f"plan field '{_PLAN_FIELDS[number]}'"
    return f"plan field 'share of rank {number - first_share}'"


def _name_in_report(number: int) -> str:
    return f"report field '{_REPORT_FIELDS[number]}'"


def _checksum(floats: Sequence[float]) -> float:
    """CRC-32 of the numbers as little-endian float64; below 2**32, so float64 carries it."""
    return float(zlib.crc32(struct.pack(f"<{len(floats)}d", *floats)))
