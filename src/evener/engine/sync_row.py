"""What a rank says in the meeting that closes a window, as one row of numbers."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from evener.errors import UsageError
from evener.planning.plan import (
    REPORT_LENGTH,
    WindowReport,
    decode_report,
    encode_report,
    plan_length,
)

_NOTE_LENGTH = 11


def payload_length(world_size: int) -> int:
    """Length of a row: a report, a plan, a note."""
    return REPORT_LENGTH + plan_length(world_size) + _NOTE_LENGTH


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A rank's remarks beside its report.

    Attributes:
        park: The rank that should be parked; only rank 0's word counts.
        buffers_changed: Whether a buffer of its model was written in this window.
        wait_s: How long it waited for others in the window before: known only after it.
        sync_s: How long that window's exchange took.
        trainable: How many of its parameters are trainable: those that are averaged.
        part: The optimizer that is to be stepped alone; ``None`` closes the window.
        rates: Digest of its learning rates, which must be the same on every rank with a share.
        limit: Largest micro-batch that fits into its memory; 0 while there was enough.
        at_rest: Whether it does nothing in this window: it ends an epoch, or has no share.
        own_norm: 2-norm of its own gradient; 0 without one.
        calls: Whether parked ranks are to be called after this window; only rank 0's word counts.
    """

    park: int | None = None
    buffers_changed: bool = False
    wait_s: float = 0.0
    sync_s: float = 0.0
    trainable: int = 0
    part: int | None = None
    rates: float = 0.0
    limit: int = 0
    at_rest: bool = False
    own_norm: float = 0.0
    calls: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """What one rank said."""

    report: WindowReport
    plan: Sequence[float]
    note: Note


def seconds_of_exchange(rows: Sequence[Row], parked: Collection[int]) -> float:
    """What the exchange of the window before cost: the last one's wait, and moving bytes."""
    notes = [r.note for rank, r in enumerate(rows) if rank not in parked]
    return min(n.wait_s for n in notes) + max(n.sync_s for n in notes)


def encode_row(
    report: WindowReport, plan: Sequence[float], note: Note, world_size: int
) -> list[float]:
    """The row as numbers; a plan of no numbers says nothing about plans."""
    blank = [0.0] * (plan_length(world_size) - len(plan))
    remarks = (
        0.0 if note.park is None else note.park + 1.0,
        float(note.buffers_changed),
        note.wait_s,
        note.sync_s,
        float(note.trainable),
        0.0 if note.part is None else note.part + 1.0,
        note.rates,
        float(note.limit),
        float(note.at_rest),
        note.own_norm,
        float(note.calls),
    )
    return [*encode_report(report), *plan, *blank, *remarks]


def decode_row(numbers: Sequence[float]) -> Row:
    """Undoes ``encode_row``."""
    park, changed, wait_s, sync_s, trainable, part, rates, *rest = numbers[-_NOTE_LENGTH:]
    note = Note(
        park=int(park) - 1 if park else None,
        buffers_changed=changed > 0,
        wait_s=wait_s,
        sync_s=sync_s,
        trainable=int(trainable),
        part=int(part) - 1 if part else None,
        rates=rates,
        limit=int(rest[0]),
        at_rest=rest[1] > 0,
        own_norm=rest[2],
        calls=rest[3] > 0,
    )
    return Row(decode_report(numbers[:REPORT_LENGTH]), numbers[REPORT_LENGTH:-_NOTE_LENGTH], note)


def refuse_other_parameters(rows: Sequence[Row], absent: Collection[int]) -> None:
    """Checks that every rank trains the same parameters, before they are averaged.

    Raises:
        UsageError: On every rank, when some have made parameters trainable and others have not.
    """
    counts = {rank: row.note.trainable for rank, row in enumerate(rows) if rank not in absent}
    if len(set(counts.values())) > 1:
        said = ", ".join(f"{count} on rank {rank}" for rank, count in counts.items())
        raise UsageError(
            f"ranks train different numbers of parameter tensors ({said}): requires_grad_(True) "
            "was called on some of them only. Call it on every rank, at the beginning of an epoch "
            "or when ddp.window, which is the same everywhere, reaches a number"
        )


def agree_on_part(
    rows: Sequence[Row], working: Sequence[float], own: int | None = None
) -> int | None:
    """The optimizer that all ranks with work want to step; ``None`` for all together.

    Args:
        rows: Of all ranks.
        working: Larger than 0 for ranks with work; the others go along with them.
        own: What this rank wants.

    Raises:
        UsageError: On every rank, when they want different ones.
    """
    wanted = {rank: row.note.part for rank, row in enumerate(rows) if working[rank]}
    first = next(iter(wanted.values()), own)
    for rank, part in wanted.items():
        if part != first:
            words = ["all optimizers" if p is None else f"optimizer {p}" for p in (first, part)]
            raise UsageError(
                f"rank {next(iter(wanted))} steps {words[0]}, rank {rank} {words[1]}: every rank "
                "must step the same optimizers in the same order; decide by ddp.window, never by a "
                "local counter"
            )
    return first
