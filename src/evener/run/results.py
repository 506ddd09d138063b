"""What a window came to, and how far the team has got: plain values, the same on every rank."""

from dataclasses import dataclass
from typing import Self

from evener.cadence.plan import WindowReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What the team has applied so far; the same on every rank.

    Attributes:
        window: Windows closed, skipped ones included.
        steps: Optimizer steps.
        samples: Samples behind those steps.
        weight: Their weight: samples, or tokens for a language model.
    """

    window: int = 0
    steps: int = 0
    samples: int = 0
    weight: float = 0.0

    def after(self, samples: int, weight: float, skipped: bool) -> "Progress":
        """The progress after one more window."""
        return Progress(
            window=self.window + 1,
            steps=self.steps + (not skipped),
            samples=self.samples + samples,
            weight=self.weight + weight,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """What one rank did in a window; times in seconds of its own clock."""

    samples: int
    weight: float
    loss_sum: float
    micro_batches: int
    compute_s: float
    wait_s: float = 0.0
    sync_s: float = 0.0

    @classmethod
    def of(cls, report: WindowReport) -> Self:
        """What the rank reported itself."""
        return cls(
            samples=report.samples,
            weight=report.weight,
            loss_sum=report.loss_sum,
            micro_batches=report.micro_batches,
            compute_s=report.compute_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowResult:
    """A window that has been applied; the same on every rank, but for times of this moment.

    Attributes:
        window: Its number, counted over the whole run.
        epoch: Its epoch.
        start: First position of the epoch's permutation.
        size: Samples over all ranks.
        loss: Mean loss per unit of weight, over all ranks.
        weight: Units behind that mean: samples, or tokens.
        grad_norm: 2-norm of the averaged gradient, before clipping; ``nan`` without a step.
        lr: Learning rate of the optimizer's first parameter group.
        skipped: True when nothing was applied: no weight, or a non-finite gradient with
            ``non_finite="skip"``.
        progress: What the team has applied, this window included.
        applied_t: When this rank applied it, in unix seconds.
        ranks: A record per rank. Waiting and exchange times are filled in when the window
            is committed, and 0 before.
    """

    window: int
    epoch: int
    start: int
    size: int
    loss: float
    weight: float
    grad_norm: float
    lr: float
    skipped: bool
    progress: Progress
    applied_t: float
    ranks: tuple[RankRecord, ...]

    @property
    def committed(self) -> tuple[int, int]:
        """The range of the epoch's permutation that the window covers, end exclusive."""
        return self.start, self.start + self.size
