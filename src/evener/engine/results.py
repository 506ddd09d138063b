"""The result of a window, what led to it, and the progress of the team: plain values."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, NamedTuple

from pydantic import TypeAdapter

from evener.data.cursor import Slice
from evener.planning.report import RankRecord
from evener.planning.stragglers import Straggler


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What the team has applied so far; the same on every rank.

    Attributes:
        window: Windows closed, skipped ones included.
        steps: Optimizer steps.
        samples: Samples behind those steps.
        weight: Their weight: samples, or tokens for a language model.
        skipped: Optimizer steps skipped, because gradients were not finite or had no weight.
    """

    window: int = 0
    steps: int = 0
    samples: int = 0
    weight: float = 0.0
    skipped: int = 0

    @property
    def optimizer_steps(self) -> int:
        """Return the number of optimizer steps, skipped ones included."""
        return self.steps + self.skipped


@dataclass(frozen=True, slots=True, kw_only=True)
class CadenceRecord:
    """How a window of local steps was planned, and the verdict of the divergence guard.

    Attributes:
        anchor: Local steps of the slowest rank.
        window_s: Its planned seconds; ``inf`` if a number of steps closes it.
        divergence: The largest ``‖p - average‖ / ‖average‖`` over ranks when it was averaged; known
            when it is committed, and 0 before.
        guard: The guard's verdict on the windows before: ``stable``, ``suppress_growth`` or
            ``nudge_down``.
    """

    anchor: int
    window_s: float
    divergence: float = 0.0
    guard: str = "stable"


@dataclass(frozen=True, kw_only=True)
class WindowResult:
    """An applied window; the same on every rank, except times of this moment.

    On one rank with a GPU and a fused optimizer, ``ddp.step()`` returns before the GPU has done its
    work. Then ``loss``, ``grad_norm`` and ``skipped`` wait for the GPU when they are read. Until
    the window is committed, ``progress`` assumes that the step was made.

    Attributes:
        window: Its number, counted over the whole run.
        epoch: Its epoch.
        start: First position of the epoch's permutation.
        size: Samples over all ranks.
        loss: Mean loss per unit of weight, over all ranks.
        weight: Units behind that mean: samples, or tokens.
        grad_norm: 2-norm of the averaged gradient, before clipping; ``nan`` without a step.
        lr: Learning rate of the optimizer's first parameter group.
        skipped: True if nothing was applied: no weight, or a non-finite gradient with
            ``non_finite="skip"``.
        progress: What the team has applied, this window included.
        applied_t: When this rank applied it, in unix seconds.
        ranks: A record per rank. Waiting and exchange times are filled in when the window
            is committed, and 0 before.
        ranges: The ranges of the epoch's permutation that it covers, ends exclusive.
        cadence: How it was planned, in CADENCE and ASYNC.
        stragglers: Ranks that have become slow, or have stopped being slow, with the window before;
            known when this one is committed, on the main process alone.
        generation: The generation that applied it.
        parked: The parked ranks.
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
    ranges: tuple[tuple[int, int], ...] = ()
    cadence: CadenceRecord | None = None
    stragglers: tuple[Straggler, ...] = ()
    generation: int = 0
    parked: tuple[int, ...] = ()

    @property
    def committed(self) -> tuple[int, int]:
        """Return the range of the epoch's permutation of a SYNC window, end exclusive."""
        return self.start, self.start + self.size

    @property
    def optimizer_steps(self) -> int:
        """Return the number of optimizer steps of all ranks in it, skipped ones included."""
        return 1 if self.cadence is None else sum(record.steps for record in self.ranks)


class Work(NamedTuple):
    """The next work of a rank.

    Attributes:
        window: Number of the window.
        positions: Of the epoch: a share or a batch, and those after it, to be fetched ahead.
    """

    window: int
    positions: list[range]


class Applied(NamedTuple):
    """A window that this rank has applied and that is not known to be committed.

    Attributes:
        result: Its result.
        leases: The samples that it took from the epoch.
        late_fields: The fields ``LATE_FIELDS`` of this rank's next report, which are known only
            after the window, such as seconds of waiting for others.
    """

    result: WindowResult
    leases: Sequence[Slice]
    late_fields: Mapping[str, Any]


def pack_applied(applied: Applied) -> dict[str, Any]:
    """Return a window that was applied, in JSON, for a rank that has missed it."""
    return {
        "result": asdict(applied.result),
        "leases": [asdict(lease) for lease in applied.leases],
        "late_fields": dict(applied.late_fields),
    }


def unpack_applied(packed: Mapping[str, Any]) -> Applied:
    """Undo ``pack_applied``."""
    return _APPLIED.validate_python(packed)


_APPLIED: Final = TypeAdapter(Applied)
