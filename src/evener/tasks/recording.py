"""The records of a run: events, the summary, the closing table."""

import io
import shutil
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
from evener.observe.jsonl import JsonlSink
from evener.observe.measuring import measure
from evener.observe.progress_line import ProgressSink
from evener.observe.summary import RankSummary, RunSummary, closing_lines, closing_table
from evener.observe.table import SUMS
from evener.observe.tensorboard import TensorBoardSink
from evener.observe.waiting import Waits
from evener.run_report.history import RunHistory
from evener.run_report.verdict import judge
from evener.run_report.writing import RunReader
from evener.simulation.changes import predict_changes
from evener.team.terminal import say, warn

_NOTHING: Final = dict.fromkeys(SUMS, 0.0)  # of a member without any window
_EVENTS_S: Final = 1.0  # longest wait of a summary for a slow disk


def find_sinks(paths: Sequence[str]) -> list[SinkMaker]:
    """Return the functions that the key ``sinks`` names; the current folder is searched, too.

    Raises:
        ConfigError: A function cannot be imported.
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
    """Write the team's events to ``events.jsonl`` and to the terminal; all ranks call it.

    The main process writes and prints. If it is parked, the next main process continues.

    Args:
        ddp: The team.
        folder: The run folder.
        terminal: Show progress on standard error.
        tensorboard: Write files for TensorBoard.
        sinks: Functions that make the user's sinks.

    Raises:
        ConfigError: A function did not return a sink, or the file cannot be opened.
    """
    makers: list[Sink | SinkMaker] = [partial(JsonlSink, folder / EVENTS), *sinks]
    if terminal:
        makers.append(partial(ProgressSink, sys.stderr))
    if tensorboard:
        makers.append(partial(TensorBoardSink, folder / "tensorboard"))
    ddp.events.report_to(makers)


def read_history(folder: Path) -> RunHistory:
    """Return the history of a run; lines that are not events are left out with a warning."""
    reader = RunReader(folder)
    history = reader.history()
    if reader.num_skipped:
        warn(
            f"{folder / EVENTS} has {reader.num_skipped:,} lines that are not events; they are "
            f"left out of the run's totals. The first: {reader.skipped[0]}"
        )
    return history


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
        checkpoint: The newest checkpoint.
        **figures: Further fields of the summary.
    """
    import psutil

    for written in ddp.events.pending():
        written.wait(_EVENTS_S)
    assembly, own = ddp.assembly, ddp.members[ddp.rank]
    history = read_history(folder)
    table = history.table
    done, estimate = table.member_sums(), measure(table)
    team = assembly.team
    # Of an elastic team: the members at the end, parked or not.
    members = [m for m in ddp.members if m.rank in team.everyone]
    gone = done.keys() - {m.member for m in members}
    highest = max(m.rank for m in members)
    verdict = judge(history, Waits.of(table), predict_changes(table, history.facts))
    return RunSummary(
        tokens_per_s=estimate.speed,
        solo_tokens_per_s=tuple(estimate.alone.get(rank) for rank in range(highest + 1)),
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
        verdict=tuple(verdict.lines),
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
    """Print the closing table and lines to stderr."""
    from rich.console import Console

    # A rich console would end the process if the reader of a pipe has ended, so it only renders.
    # The characters that draw boxes depend on the encoding.
    terminal = Console(stderr=True)
    text = io.TextIOWrapper(io.BytesIO(), encoding=terminal.encoding, errors="replace")
    console = Console(file=text, force_terminal=terminal.is_terminal, width=terminal.width)
    console.print(closing_table(summary))
    text.seek(0)
    say(text.read(), end="")
    for line in closing_lines(summary, _program()):
        say(line)


def _program() -> str:
    """Return the command by which the user runs ``evener``: its environment may not be active."""
    if shutil.which("evener"):
        return "evener"
    own = Path(sys.executable).with_name("evener")
    here = Path.cwd()
    return str(own.relative_to(here) if own.is_relative_to(here) else own)
