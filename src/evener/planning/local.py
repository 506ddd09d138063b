"""CADENCE and ASYNC windows as numbers: the plan that all follow, the report that each gives. Pure.

Both travel as float64 rows. Decoding checks and never repairs, as for ``WindowPlan``.
"""

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, fields

from evener.errors import ProtocolError
from evener.planning.guard import Verdict

_VERDICTS = tuple(Verdict)
_BY_RANK = ("steps", "most", "queues")
_NUM_SCALARS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPlan:
    """What each rank does until the next averaging.

    Attributes:
        window: Global number of the window.
        epoch: Epoch whose samples it takes.
        window_s: Seconds from the last average until ranks should stop; ``inf`` when counts alone
            close the window.
        blocking: Whether ranks wait for the average of this window at its end, also in ASYNC.
        steps: Local steps expected of each rank.
        most: Local steps that a rank does at most; with ``blocking`` off, also how many it may do
            of the next window before the average of this one has landed.
        queues: Batches that each rank's queue is filled up to when the window begins.
        least: Local steps that a rank does whatever the clock says, as far as its ``most`` goes.
        anchor: The anchor that it rests on.
        verdict: What the divergence guard has said.

    Raises:
        ProtocolError: A number is out of range, or tuples are not of one length.
    """

    window: int
    epoch: int
    window_s: float
    blocking: bool
    steps: tuple[int, ...]
    most: tuple[int, ...]
    queues: tuple[int, ...]
    least: int = 0
    anchor: int = 1
    verdict: Verdict = Verdict.STABLE

    def __post_init__(self) -> None:
        """Refuse a plan that makes no sense, wherever it comes from."""
        whole = (
            self.window,
            self.epoch,
            self.least,
            self.anchor,
            *self.steps,
            *self.most,
            *self.queues,
        )
        if min(whole) < 0 or not self.window_s > 0:
            raise ProtocolError(f"{self} holds a number that is out of range")
        if len({len(self.steps), len(self.most), len(self.queues)}) != 1:
            raise ProtocolError(f"{self} does not speak of one number of ranks")

    @property
    def total_steps(self) -> int:
        """Local steps expected of all ranks."""
        total = 0
        for count in self.steps:
            total += count
        return total


def local_plan_length(world_size: int) -> int:
    """Numbers in an encoded plan."""
    return _NUM_SCALARS + len(_BY_RANK) * world_size + 1


def encode_local_plan(plan: LocalPlan) -> list[float]:
    """The plan as numbers, the last one a checksum."""
    row = [
        float(plan.window),
        float(plan.epoch),
        plan.window_s,
        float(plan.blocking),
        float(plan.least),
        float(plan.anchor),
        float(_VERDICTS.index(plan.verdict)),
        *(float(x) for name in _BY_RANK for x in getattr(plan, name)),
    ]
    return [*row, _checksum(row)]


def decode_local_plan(row: Sequence[float], world_size: int) -> LocalPlan:
    """Undoes ``encode_local_plan``.

    Raises:
        ProtocolError: The row is damaged, or for another number of ranks.
    """
    *values, checksum = row
    if len(row) != local_plan_length(world_size) or checksum != _checksum(values):
        raise ProtocolError(
            f"an encoded plan of {len(row)} numbers does not check for {world_size} ranks: do all "
            "ranks run the same version of evener?"
        )
    window, epoch, window_s, blocking, least, anchor, verdict = values[:_NUM_SCALARS]
    by_rank = [int(x) for x in values[_NUM_SCALARS:]]
    steps, most, queues = (
        tuple(by_rank[k * world_size : (k + 1) * world_size]) for k in range(len(_BY_RANK))
    )
    return LocalPlan(
        window=int(window),
        epoch=int(epoch),
        window_s=window_s,
        blocking=bool(blocking),
        steps=steps,
        most=most,
        queues=queues,
        least=int(least),
        anchor=int(anchor),
        verdict=_VERDICTS[int(verdict)],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalReport:
    """One rank's row about its part of a window.

    Attributes:
        weight: Sum of the weights of its local steps; those left out count nothing.
        loss_sum: Sum of weight times loss.
        compute_s: Seconds of compute.
        busy_s: Seconds of compute, and of waiting for data in between.
        micro_batches: Micro-batches computed.
        samples: Samples computed, those of steps left out included.
        steps: Batches of its queue that it has done; what the header calls "done".
        skipped: How many of these it left out, because they were not finite.
        non_finite: 0 if everything is finite; k > 0 if the gradient of trainable parameter k - 1 is
            not; -1 if the loss is not; -2 if the parameters are not.
        leaving: 1 when it wants the team to stop after this window.
        left: 1 when its loop over the epoch was left by ``break``.
        buffers_changed: 1 when a buffer of its model was written.
        divergence: How far it was from the average of the window before, relative to that.
        wait_s: Seconds in which it waited for others in the window before.
        sync_s: Seconds that averaging then took of its time.
        stale_steps: Local steps that it had done in the meantime.
        overflows: How many steps it left out because fp16 overflowed.
        loss_scale: Its own loss scale at the end of the window; 0 where it computes in no fp16.
        limit: Largest micro-batch that fits into its memory; 0 while there was enough.
        rates: Digest of its learning rates after the window before, the same on every rank.
        warmup_steps: How many of its steps tell nothing of its speed, as they held the first
            micro-batch of a size: that pays for what is set up once.
        warmup_samples: How many of its samples these had.
        warmup_s: How much of ``compute_s`` they took.
        warmup_busy_s: And how much of ``busy_s``.
    """

    weight: float = 0.0
    loss_sum: float = 0.0
    compute_s: float = 0.0
    busy_s: float = 0.0
    micro_batches: int = 0
    samples: int = 0
    steps: int = 0
    skipped: int = 0
    non_finite: int = 0
    leaving: int = 0
    left: int = 0
    buffers_changed: int = 0
    divergence: float = 0.0
    wait_s: float = 0.0
    sync_s: float = 0.0
    stale_steps: int = 0
    overflows: int = 0
    loss_scale: float = 0.0
    limit: int = 0
    rates: float = 0.0
    warmup_steps: int = 0
    warmup_samples: int = 0
    warmup_s: float = 0.0
    warmup_busy_s: float = 0.0


_FIELDS = tuple((f.name, f.type in (int, "int")) for f in fields(LocalReport))
LOCAL_REPORT_LENGTH = len(_FIELDS)
"""Numbers in an encoded report."""


def encode_local_report(report: LocalReport) -> list[float]:
    """The report as numbers."""
    return [float(getattr(report, name)) for name, _ in _FIELDS]


def decode_local_report(row: Sequence[float]) -> LocalReport:
    """Undoes ``encode_local_report``.

    Raises:
        ProtocolError: A count or the weight is negative.
    """
    values = {
        name: int(x) if whole and math.isfinite(x) else x
        for (name, whole), x in zip(_FIELDS, row, strict=True)
    }
    report = LocalReport(**values)  # type: ignore[arg-type]  # whole numbers were made int
    counts = (report.micro_batches, report.samples, report.steps, report.skipped)
    if min(counts) < 0 or not 0 <= report.weight < math.inf:
        raise ProtocolError(f"a rank reports {report}: ranks run different code")
    return report


def decode_local_reports(rows: Sequence[Sequence[float]]) -> tuple[LocalReport, ...]:
    """The reports of all ranks, from rows that may be longer."""
    return tuple(decode_local_report(row[:LOCAL_REPORT_LENGTH]) for row in rows)


def _checksum(values: Sequence[float]) -> float:
    text = ",".join(value.hex() for value in values)
    return float(zlib.crc32(text.encode()))
