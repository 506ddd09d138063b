"""What a run leaves for people and programs: events, their sums, the summary, the closing table."""

import io
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from evener.config.folders import EVENTS
from evener.loop.loop import Loop
from evener.loop.reporting import SinkMaker
from evener.observe.events import Event, Sink, Totals
from evener.observe.jsonl import JsonlSink, read_events
from evener.observe.progress_line import ProgressSink
from evener.observe.summary import RankSummary, RunSummary, closing_table, verdict
from evener.observe.tally import EventTally
from evener.observe.tensorboard import TensorBoardSink
from evener.tasks.rehearsal import Speeds
from evener.team.terminal import say, warn


class RunTally(Sink):
    """Adds up a run's events; on resume also those that earlier sessions have left in its folder.

    Args:
        folder: The run folder.
    """

    continues = True

    def __init__(self, folder: Path) -> None:
        self._sums = EventTally()
        self._next_window: int | None = None
        self._has_gaps = False
        self._path = folder / EVENTS

    def emit(self, event: Event) -> None:
        """Add an event."""
        if event["type"] == "run_resumed":
            earlier = read_events(self._path, self._skip)
            self._sums = EventTally.of([*earlier, event])
        else:
            self._sums.add(event)
        if event["type"] == "run_started":
            self._next_window = event["window"]
        elif event["type"] == "window":
            self._has_gaps = self._has_gaps or event["window"] != self._next_window
            self._next_window = event["window"] + 1

    @property
    def sums(self) -> EventTally:
        """The sums of the events; of those in the file, if another rank has recorded some."""
        if self._has_gaps:
            return EventTally.of(read_events(self._path, self._skip))
        return self._sums

    def close(self) -> None:
        """Keep the sums."""

    def _skip(self, line: int, why: str) -> None:
        warn(f"{self._path}:{line} is not an event and is left out of the run's totals: {why}")


def record(
    ddp: Loop,
    folder: Path,
    *,
    most_mb: int = 1024,
    terminal: bool = False,
    tensorboard: bool = False,
    sinks: Sequence[SinkMaker] = (),
) -> RunTally:
    """Write the team's events to ``events.jsonl``, and show them to people; all ranks call it.

    The main process writes and prints. If it is parked, the next main process continues.

    Args:
        ddp: The team.
        folder: The run folder.
        most_mb: Size of all files of events together, in MB.
        terminal: Show progress on standard error.
        tensorboard: Write files for TensorBoard.
        sinks: Make sinks of the user's own.

    Returns:
        The sums of the events; to be read on the main process.

    Raises:
        ConfigError: A function returned something else than a sink.
        EvenerError: The file cannot be opened.
    """
    tally = RunTally(folder)
    # The tally reads the file before the event of a resume is written to it.
    most_bytes = most_mb * 10**6
    written = partial(JsonlSink, folder / EVENTS, on_warning=warn, most_bytes=most_bytes)
    makers: list[Sink | SinkMaker] = [tally, written, *sinks]
    if terminal:
        makers.append(partial(ProgressSink, sys.stderr))
    if tensorboard:
        makers.append(partial(TensorBoardSink, folder / "tensorboard"))
    ddp.events.report_to(makers)
    return tally


def summarise(
    ddp: Loop,
    tally: RunTally,
    folder: Path,
    *,
    batch_size: int,
    speeds: Speeds | None,
    checkpoint: Path | None,
    **figures: Any,
) -> RunSummary:
    """Build the summary of a run from its events; on the main process.

    Args:
        ddp: The team.
        tally: The run's events.
        folder: The run folder.
        batch_size: Samples of a global batch.
        speeds: What was measured; else solo speeds come from the speed model.
        checkpoint: The newest one.
        **figures: Further fields of the summary.
    """
    import psutil

    ddp.events.flush()  # the tally may read the file
    assembly, sums, members = ddp.assembly, tally.sums, ddp.members
    done = [sums.members.get(m.member, Totals()) for m in members]
    return RunSummary(
        tokens_per_s=sums.speed(),
        solo_tokens_per_s=speeds.solo if speeds else _modelled_speeds(ddp, sums, batch_size),
        solo_source="measured" if speeds else "speed model",
        side_by_side_tokens_per_s=speeds.side_by_side if speeds else None,
        equal_split_tokens_per_s=speeds.equal_split if speeds else None,
        committed_tokens=ddp.progress.weight,
        committed_samples=ddp.progress.samples,
        steps=ddp.progress.steps,
        world_size=ddp.world_size,
        policy=str(assembly.apply_policy),
        backend=assembly.comm.backend,
        checkpoint=str(checkpoint) if checkpoint else None,
        run_folder=str(folder),
        elapsed_s=sums.elapsed_s,
        ranks=tuple(
            RankSummary(
                rank=m.rank,
                member=m.member,
                device=f"{m.device} ({m.device_name})",
                samples=totals.samples,
                weight=totals.weight,
                wait_fraction=totals.wait_fraction,
            )
            for m, totals in zip(members, done, strict=True)
        ),
        parked=ddp.events.parked,
        emulated={m.rank: m.emulated for m in members if m.emulated != 1},
        machine={
            "host": members[0].host,
            "cores": psutil.cpu_count(),
            "memory_bytes": psutil.virtual_memory().total,
        },
        versions=dict(members[0].versions),
        **figures,
    )


def _modelled_speeds(ddp: Loop, sums: EventTally, batch_size: int) -> tuple[float | None, ...]:
    done = sums.total
    per_sample = done.weight / done.samples if done.samples else 1.0
    modelled = ddp.assembly.policy.solo_speeds(batch_size)
    return tuple(s * per_sample if s else None for s in modelled)


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
