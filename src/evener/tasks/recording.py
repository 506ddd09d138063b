"""What a run leaves for people and programs: events, their sums, the summary, the closing table."""

import io
import math
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Final

from evener.checkpoint import Checkpoint
from evener.config.folders import EVENTS
from evener.errors import ConfigError
from evener.loop.event_stream import SinkMaker
from evener.loop.loop import Loop
from evener.observe.events import Event, Sink, Totals
from evener.observe.following import each_effective_event
from evener.observe.jsonl import JsonlSink
from evener.observe.progress_line import ProgressSink
from evener.observe.summary import RankSummary, RunSummary, closing_table, verdict
from evener.observe.tally import EventTally
from evener.observe.tensorboard import TensorBoardSink
from evener.team.terminal import say, warn

SUMS: Final = "sums.json"
"""Document of a checkpoint with the sums of a run's events up to there."""

_EVENTS_S: Final = 1.0  # a summary waits no longer for a disk that hangs


class RunTally(Sink):
    """Adds up a run's events, over all of its sessions.

    Args:
        folder: The run folder.
        earlier: The sums at the checkpoint that the run resumes from, as ``to_json`` has told them.
            Without them, they are those of the events in the folder.
    """

    continues = True

    def __init__(self, folder: Path, earlier: Any = None) -> None:
        self._sums = EventTally()
        self._earlier = earlier
        self._next_window: int | None = None
        # Until this rank writes the start of the run, another one may have recorded what came
        # before.
        self._has_gaps = True
        self._path = folder / EVENTS

    def emit(self, event: Event) -> None:
        """Add an event."""
        if event["type"] == "run_resumed":
            self._sums = self._resumed(event["window"])
        self._sums.add(event)
        if event["type"] == "run_started":
            self._next_window, self._has_gaps = event["window"], False
        elif event["type"] == "window":
            self._has_gaps = self._has_gaps or event["window"] != self._next_window
            self._next_window = event["window"] + 1

    def _resumed(self, window: int) -> EventTally:
        if self._earlier is None:
            return self._read(window)
        try:
            return EventTally.from_json(self._earlier)
        except (TypeError, ValueError) as error:
            warn(f"{SUMS} of the checkpoint is damaged, events are summed up instead: {error}")
            return self._read(window)

    def _read(self, before: int | float = math.inf) -> EventTally:
        # The main process writes it with its first event; a checkpoint may be copied without it.
        if not self._path.exists():
            return EventTally()
        events = each_effective_event(self._path, self._skip)
        return EventTally.of(e for e in events if e["type"] != "window" or e["window"] < before)

    @property
    def sums(self) -> EventTally:
        """The sums of the events; of those in the file, if another rank has recorded some."""
        return self._read() if self._has_gaps else self._sums

    def to_json(self) -> dict[str, Any] | None:
        """Return the sums for a checkpoint; ``None`` if another rank has recorded some events."""
        return None if self._has_gaps else self._sums.to_json()

    def close(self) -> None:
        """Keep the sums."""

    def _skip(self, line: int, why: str) -> None:
        warn(f"{self._path}:{line} is not an event and is left out of the run's totals: {why}")


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
    most_mb: int = 1024,
    terminal: bool = False,
    tensorboard: bool = False,
    sinks: Sequence[SinkMaker] = (),
    resumed: Checkpoint | None = None,
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
        resumed: The checkpoint that the run resumes from.

    Returns:
        The sums of the events; to be read on the main process.

    Raises:
        ConfigError: A function returned something else than a sink, or the file cannot be opened.
    """
    has_sums = resumed is not None and SUMS in resumed.manifest.files
    tally = RunTally(folder, resumed.document(SUMS) if resumed and has_sums else None)
    # The tally reads the file before the event of a resume is written to it.
    most_bytes = most_mb * 10**6
    written = partial(JsonlSink, folder / EVENTS, most_bytes=most_bytes)
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
    checkpoint: Path | None,
    **figures: Any,
) -> RunSummary:
    """Build the summary of a run from its events; on the main process.

    Args:
        ddp: The team.
        tally: The run's events.
        folder: The run folder.
        checkpoint: The newest one.
        **figures: Further fields of the summary.
    """
    import psutil

    for written in ddp.events.pending():  # the tally may read the file
        written.wait(_EVENTS_S)
    assembly, sums, own = ddp.assembly, tally.sums, ddp.members[ddp.rank]
    team = assembly.team
    # Of an elastic team: who is there at the end, parked or not.
    members = [m for m in ddp.members if m.rank in team.everyone]
    done = [sums.members.get(m.member, Totals()) for m in members]
    gone = sums.members.keys() - {m.member for m in members}
    alone = sums.speeds_alone()
    by_rank = {m.rank: alone.get(m.member) for m in members}
    return RunSummary(
        tokens_per_s=sums.speed(),
        solo_tokens_per_s=tuple(by_rank.get(rank) for rank in range(max(by_rank) + 1)),
        solo_source="compute time",
        beside_solo_tokens_per_s=sums.speed(),
        equal_split_tokens_per_s=None,
        committed_tokens=ddp.progress.weight,
        committed_samples=ddp.progress.samples,
        steps=ddp.progress.steps,
        world_size=len(members),
        gone_weight=sum(sums.members[name].weight for name in gone),
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
