"""What a window of local steps came to, in the terms of ``WindowResult``."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from evener.data.cursor import Slice
from evener.engine.local_window import Outcome
from evener.engine.results import CadenceRecord, Progress, RankRecord, WindowResult
from evener.planning.local import LocalReport


@dataclass(frozen=True, slots=True)
class AppliedWindow:
    """A window that this rank has applied and that is not known to be committed.

    Attributes:
        result: What it came to.
        leases: The batches done in it.
        wait_s: Seconds that this rank waited for others.
        sync_s: Seconds that averaging took of its time.
        divergence: How far this rank was from the average.
        stale_steps: Local steps that it had made when the average landed.
    """

    result: WindowResult
    leases: tuple[Slice, ...]
    wait_s: float
    sync_s: float
    divergence: float
    stale_steps: int


def report_of(done: LocalReport, before: AppliedWindow | None) -> LocalReport:
    """A rank's row about its window, and about the one before, of which it now knows all."""
    if before is None:
        return done
    return replace(
        done,
        divergence=before.divergence,
        wait_s=before.wait_s,
        sync_s=before.sync_s,
        stale_steps=before.stale_steps,
    )


def applied_of(
    outcome: Outcome,
    result: WindowResult,
    wait_s: float,
    spent_s: float,
    divergence: float,
    stale_steps: int,
) -> AppliedWindow:
    """A window that has just landed on this rank.

    Args:
        outcome: What ranks have exchanged.
        result: What it came to.
        wait_s: Seconds that this rank waited for others.
        spent_s: Seconds that averaging took of its time, the wait included.
        divergence: How far this rank was from the average.
        stale_steps: Local steps that it had made when the average landed.
    """
    leases = tuple(piece for queue in outcome.retired for piece in queue)
    sync_s = max(0.0, spent_s - wait_s)
    return AppliedWindow(result, leases, wait_s, sync_s, divergence, stale_steps)


def progress_after(progress: Progress, outcome: Outcome) -> Progress:
    """What the team has applied with one more window."""
    samples, skipped = sum(r.samples for r in outcome.reports), outcome.num_skipped
    return Progress(
        window=progress.window + 1,
        steps=progress.steps + outcome.num_steps - skipped,
        samples=progress.samples + samples,
        weight=progress.weight + outcome.weight,
        skipped=progress.skipped + skipped,
    )


def result_of(outcome: Outcome, progress: Progress, lr: float) -> WindowResult:
    """The result of a window of some steps, as it is known when it is applied.

    Args:
        outcome: What ranks have exchanged.
        progress: The team's, with this window.
        lr: Learning rate after it.
    """
    plan = outcome.plan
    ranges = merged([piece for queue in outcome.retired for piece in queue])
    return WindowResult(
        window=plan.window,
        epoch=plan.epoch,
        start=ranges[0][0],
        size=sum(stop - start for start, stop in ranges),
        loss=outcome.loss,
        weight=outcome.weight,
        grad_norm=math.nan,
        lr=lr,
        skipped=outcome.weight == 0,
        progress=progress,
        applied_t=time.time(),
        ranks=tuple(_record(r) for r in outcome.reports),
        ranges=ranges,
        cadence=CadenceRecord(anchor=plan.anchor, window_s=plan.window_s, guard=plan.verdict.value),
    )


def completed(result: WindowResult, reports: Sequence[LocalReport]) -> WindowResult:
    """The result with what ranks tell of it in the exchange after: waits, divergence."""
    ranks = tuple(
        replace(record, wait_s=r.wait_s, sync_s=r.sync_s, stale_steps=r.stale_steps)
        for record, r in zip(result.ranks, reports, strict=True)
    )
    assert result.cadence is not None
    cadence = replace(result.cadence, divergence=max(r.divergence for r in reports))
    return replace(result, ranks=ranks, cadence=cadence)


def merged(pieces: Sequence[Slice]) -> tuple[tuple[int, int], ...]:
    """Ranges of positions, sorted, adjacent ones as one."""
    ranges: list[tuple[int, int]] = []
    for piece in sorted(pieces, key=lambda p: p.start):
        if ranges and ranges[-1][1] == piece.start:
            ranges[-1] = (ranges[-1][0], piece.stop)
        else:
            ranges.append((piece.start, piece.stop))
    return tuple(ranges)


def _record(report: LocalReport) -> RankRecord:
    return RankRecord(
        samples=report.samples,
        weight=report.weight,
        loss_sum=report.loss_sum,
        micro_batches=report.micro_batches,
        compute_s=report.compute_s,
        steps=report.steps,
        warmup_s=report.warmup_s,
        warmup_samples=report.warmup_samples,
    )
