"""What a run amounted to: gathers the figures, writes ``summary.json``, prints the verdict."""

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from evener.ddp import Ddp
from evener.observe.events import Totals
from evener.observe.summary import RankSummary, RunSummary, closing_table, verdict
from evener.observe.tally import EventTally
from evener.tasks.recording.recorder import RunRecorder
from evener.tasks.recording.rehearsal import Speeds
from evener.team.terminal import say

if TYPE_CHECKING:
    from rich.table import Table


def summarise(
    ddp: Ddp,
    recorder: RunRecorder,
    folder: Path,
    *,
    batch_size: int,
    policy: str,
    unit: str,
    heldout_loss: float | None,
    speeds: Speeds | None,
    checkpoint: Path | None,
    elapsed_s: float,
    skipped_records: int = 0,
    first_skipped_record: str = "",
) -> RunSummary:
    """Builds the summary of a run from its events; on rank 0.

    Args:
        ddp: The team.
        recorder: Knows the run's events.
        folder: The run folder.
        batch_size: Samples of a global batch.
        policy: Apply policy.
        unit: What weights count.
        heldout_loss: The last one, if any.
        speeds: What was measured; else solo speeds come from the speed model.
        checkpoint: The newest one.
        elapsed_s: Seconds of training, over all sessions of a resumed run.
        skipped_records: Records of the data that held no text and were left out.
        first_skipped_record: Where the first of them is, and what is wrong with it.
    """
    tally = recorder.tally
    solo, source = _solo_speeds(ddp, tally, batch_size, speeds)
    team = tally.speed()
    ranks = []
    for m in ddp.members:
        totals = tally.members.get(m.member, Totals())
        ranks.append(
            RankSummary(
                rank=m.rank,
                member=m.member,
                device=f"{m.device} ({m.device_name})",
                samples=totals.samples,
                weight=totals.weight,
                wait_fraction=totals.wait_fraction,
            )
        )
    return RunSummary(
        tokens_per_s=team.weight_per_s if team else None,
        solo_tokens_per_s=solo,
        solo_source=source,
        equal_split_tokens_per_s=speeds.equal_split if speeds else None,
        heldout_loss=heldout_loss,
        committed_tokens=ddp.progress.weight,
        committed_samples=ddp.progress.samples,
        steps=ddp.progress.steps,
        world_size=ddp.world_size,
        policy=policy,
        backend=ddp.assembly.comm.backend,
        checkpoint=str(checkpoint) if checkpoint else None,
        run_folder=str(folder),
        elapsed_s=elapsed_s,
        unit=unit,
        skipped_records=skipped_records,
        first_skipped_record=first_skipped_record or None,
        ranks=tuple(ranks),
        parked=recorder.parked,
        emulated={m.rank: m.emulated for m in ddp.members if m.emulated != 1},
        machine={"host": ddp.members[0].host, **_own_machine()},
        versions=dict(ddp.members[0].versions),
    )


def _own_machine() -> dict[str, Any]:
    import psutil

    return {"cores": psutil.cpu_count(), "memory_bytes": psutil.virtual_memory().total}


def show(summary: RunSummary) -> None:
    """Prints the closing table and the lines for a person to stderr."""
    say(_rendered(closing_table(summary)), end="")
    for line in verdict(summary):
        say(line)


def _rendered(table: "Table") -> str:
    """The table as text for standard error.

    A console that writes by itself would end the process when nobody reads any more.
    """
    from rich.console import Console

    terminal = Console(stderr=True)
    buffer = _Buffer()
    buffer.encoding = terminal.encoding
    console = Console(file=buffer, force_terminal=terminal.is_terminal, width=terminal.width)
    console.print(table)
    return buffer.getvalue()


class _Buffer(io.StringIO):
    """Text in memory with the encoding of a stream, which decides how boxes are drawn."""

    encoding = ""


def _solo_speeds(
    ddp: Ddp, tally: EventTally, batch_size: int, speeds: Speeds | None
) -> tuple[tuple[float | None, ...], Literal["measured", "speed model"]]:
    if speeds is not None:
        return speeds.solo, "measured"
    done = tally.total
    per_sample = done.weight / done.samples if done.samples else 1.0
    modelled = ddp.assembly.policy.solo_speeds(batch_size)
    return tuple(s * per_sample if s else None for s in modelled), "speed model"
