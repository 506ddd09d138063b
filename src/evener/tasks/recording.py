"""What a run leaves for people and programs: events, the summary, the closing table."""

import io
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Final

from evener.config.folders import EVENTS
from evener.errors import ConfigError
from evener.loop.event_stream import SinkMaker
from evener.loop.loop import Loop
from evener.observe.events import Sink, wait_fraction
from evener.observe.following import each_event
from evener.observe.jsonl import JsonlSink
from evener.observe.progress_line import ProgressSink
from evener.observe.summary import RankSummary, RunSummary, closing_table, verdict
from evener.observe.table import SUMS, RunTable
from evener.observe.tensorboard import TensorBoardSink
from evener.team.terminal import say, warn

_NOTHING: Final = dict.fromkeys(SUMS, 0.0)  # of a member that did no window
_EVENTS_S: Final = 1.0  # a summary waits no longer for a disk that hangs


def find_sinks(paths: Sequence[str]) -> list[SinkMaker]:
    """Return the functions that the key ``sinks`` names; the current folder is searched, too.

    Raises:
        ConfigError: One cannot be imported.
    """
    if paths and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    makers: list[SinkMaker] = []
    for number, path in enumerate(paths):
        try:
            makers.append(resolve_name(path))
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(
                f"sinks[{number}] is {path!r}, which cannot be imported ({error}); give "
                "package.module:function of something that is installed, in the current folder, "
                "or on PYTHONPATH"
            ) from None
    return makers


def record(
    ddp: Loop,
    folder: Path,
    *,
    terminal: bool = False,
    tensorboard: bool = False,
    sinks: Sequence[SinkMaker] = (),
) -> None:
    """Write the team's events to ``events.jsonl``, and show them to people; all ranks call it.

    The main process writes and prints. If it is parked, the next main process continues.

    Args:
        ddp: The team.
        folder: The run folder.
        terminal: Show progress on standard error.
        tensorboard: Write files for TensorBoard.
        sinks: Make sinks of the user's own.

    Raises:
        ConfigError: A function returned something else than a sink, or the file cannot be opened.
    """
    makers: list[Sink | SinkMaker] = [partial(JsonlSink, folder / EVENTS), *sinks]
    if terminal:
        makers.append(partial(ProgressSink, sys.stderr))
    if tensorboard:
        makers.append(partial(TensorBoardSink, folder / "tensorboard"))
    ddp.events.report_to(makers)


def read_table(path: Path) -> RunTable:
    """Return the windows of a run; lines that are not events are left out with a warning."""
    skipped: list[str] = []
    table = RunTable.of(each_event(path, lambda line, why: skipped.append(f"line {line}: {why}")))
    if skipped:
        warn(
            f"{path} has {len(skipped):,} lines that are not events; they are left out of the "
            f"run's totals. The first is {skipped[0]}"
        )
    return table


def summarise(
    ddp: Loop,
    folder: Path,
    *,
    checkpoint: Path | None,
    **figures: Any,
) -> RunSummary:
    """Build the summary of a run from its events; on the main process.

    Args:
        ddp: The team.
        folder: The run folder.
        checkpoint: The newest one.
        **figures: Further fields of the summary.
    """
    import psutil

    for written in ddp.events.pending():
        written.wait(_EVENTS_S)
    assembly, own = ddp.assembly, ddp.members[ddp.rank]
    table = read_table(folder / EVENTS)
    done, speed = table.member_sums(), table.speed()
    team = assembly.team
    # Of an elastic team: who is there at the end, parked or not.
    members = [m for m in ddp.members if m.rank in team.everyone]
    gone = done.keys() - {m.member for m in members}
    alone = table.speeds_alone()
    by_rank = {m.rank: alone.get(m.member) for m in members}
    return RunSummary(
        tokens_per_s=speed,
        solo_tokens_per_s=tuple(by_rank.get(rank) for rank in range(max(by_rank) + 1)),
        solo_source="compute time",
        beside_solo_tokens_per_s=speed,
        equal_split_tokens_per_s=None,
        committed_tokens=ddp.progress.weight,
        committed_samples=ddp.progress.samples,
        steps=ddp.progress.steps,
        world_size=len(members),
        gone_weight=sum(done[name]["weight"] for name in gone),
        policy=str(assembly.apply_policy),
        backend=assembly.comm.backend,
        checkpoint=str(checkpoint) if checkpoint else None,
        run_folder=str(folder),
        elapsed_s=table.elapsed_s,
        ranks=tuple(
            RankSummary(
                rank=m.rank,
                member=m.member,
                device=f"{m.device} ({m.device_name})",
                samples=int(work["samples"]),
                weight=work["weight"],
                wait_fraction=wait_fraction([work]),
            )
            for m in members
            for work in (done.get(m.member, _NOTHING),)
        ),
        parked=ddp.events.parked,
        emulated={m.rank: m.emulated for m in members if m.emulated != 1},
        machine={
            "host": own.host,
            "cores": psutil.cpu_count(),
            "memory_bytes": psutil.virtual_memory().total,
        },
        versions=dict(own.versions),
        **figures,
    )


def show(summary: RunSummary) -> None:
    """Print the closing table and the lines for a person to stderr."""
    from rich.console import Console

    # A console that writes by itself would end the process when nobody reads any more. Which
    # characters draw boxes depends on the encoding.
    terminal = Console(stderr=True)
    text = io.TextIOWrapper(io.BytesIO(), encoding=terminal.encoding, errors="replace")
    console = Console(file=text, force_terminal=terminal.is_terminal, width=terminal.width)
    console.print(closing_table(summary))
    text.seek(0)
    say(text.read(), end="")
    for line in verdict(summary):
        say(line)
