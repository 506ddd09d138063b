"""The summary of a run: a JSON file, and the table and last lines in the terminal."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evener.errors import EvenerError, UsageError
from evener.files import write_file
from evener.observe.estimate import Estimate, contribution
from evener.observe.event_lines import strict_json
from evener.observe.numbers import human_count, human_duration, wrapped

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSummary:
    """One rank over the whole run.

    Attributes:
        rank: Its rank at the end.
        member: Its id.
        device: Its device as text, such as ``cuda:0 (L40S)``.
        samples: Committed samples that it processed.
        weight: Their weight (tokens, or samples).
        wait_fraction: Fraction of its time in which it waited for others, from 0 to 1.
    """

    rank: int
    member: str
    device: str
    samples: int
    weight: float
    wait_fraction: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """The figures of a run, as in ``summary.json``.

    Attributes:
        tokens_per_s: Speed of the team after the warm-up, in ``unit`` per second; of an elastic
            team, in windows of its members at the end. ``None`` if there were too few.
        solo_tokens_per_s: Speed of each rank alone, by rank: units per second of its own compute
            time in the windows of ``tokens_per_s``; ``None`` if unknown, and for departed ranks.
        heldout_loss: Mean loss on held-out data at the end, if it was evaluated.
        heldout_samples: Samples behind it: all that are held out, unless the run was stopped.
        committed_tokens: Weight of all committed windows, in ``unit``.
        committed_samples: Samples of all committed windows.
        steps: Optimizer steps.
        world_size: Ranks in the team; of an elastic team, those at the end.
        policy: Apply policy.
        backend: The backend of the exchange.
        checkpoint: Path of the newest checkpoint, if there is one.
        run_folder: Where the files of the run are.
        elapsed_s: Seconds of training, from the start of each session to its end.
        unit: What weights count: ``tokens`` or ``samples``. The keys say tokens in either case.
        ranks: One row for each of them, by rank.
        gone_weight: Weight of the work of ranks that have left an elastic team.
        emulated: Ranks that are slowed down on purpose, and the factor.
        parked: Ranks without a share, since the team is faster without them.
        verdict: Whether each device is worth it, who waits for whom, and what to change.
        machine: Facts about the machine (JSON).
        versions: Versions of Python, torch, evener and other packages, by name.
        details: Further figures of the job, by key of the JSON file.

    Raises:
        UsageError: A figure of ``details`` has the name of a key of the file.
    """

    tokens_per_s: float | None
    solo_tokens_per_s: tuple[float | None, ...]
    heldout_loss: float | None
    committed_tokens: float
    committed_samples: int
    steps: int
    world_size: int
    policy: str
    backend: str
    checkpoint: str | None
    run_folder: str
    elapsed_s: float
    heldout_samples: int | None = None
    unit: str = "tokens"
    ranks: tuple[RankSummary, ...] = ()
    gone_weight: float = 0.0
    emulated: Mapping[int, float] = field(default_factory=dict)
    parked: tuple[int, ...] = ()
    verdict: tuple[str, ...] = ()
    machine: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        own = {each.name for each in fields(self)} | {"of_ideal"}
        if taken := sorted(own.intersection(self.details)):
            raise UsageError(
                f"the task's figures hold {', '.join(map(repr, taken))}, which are keys of "
                "summary.json; return them from Task.figures under other names. The checkpoint is "
                "written: start with resume to write the summary"
            )

    @property
    def estimate(self) -> Estimate:
        """Return the speeds of the team and of its ranks alone."""
        known = {r: solo for r, solo in enumerate(self.solo_tokens_per_s) if solo is not None}
        unknown = {row.rank for row in self.ranks} - known.keys() - {*self.parked}
        return Estimate(
            speed=self.tokens_per_s, alone=known, parked=frozenset(self.parked), unknown=unknown
        )

    def to_json(self) -> dict[str, Any]:
        """Return all figures, derived ones included, as values that ``json.dumps`` accepts."""
        document = strict_json(self)
        details = document.pop("details")
        return {**document, **details, "of_ideal": self.estimate.of_ideal}

    def write(self, path: Path) -> None:
        """Write the JSON file atomically.

        Raises:
            EvenerError: The file cannot be written.
        """
        text = json.dumps(self.to_json(), indent=2, allow_nan=False)
        try:
            write_file(path, f"{text}\n".encode())
        except OSError as error:
            raise EvenerError(
                f"run summary {path} cannot be written: {error}; free disk space there"
            ) from error


def closing_table(summary: RunSummary) -> "Table":
    """Return a rich table with a row per rank: device, share, speed alone, wait, contribution.

    No cell wraps in 80 columns: a device's name is cut if it is too long.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    title = _headline(summary)
    table = Table(
        title=title, title_justify="left", title_style="", box=SIMPLE_HEAD, min_width=len(title)
    )
    table.add_column("rank", justify="right", no_wrap=True)
    table.add_column("device")
    for name in ("share", f"{summary.unit}/s alone", "wait"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("contribution", no_wrap=True)
    total, estimate = _total_weight(summary), summary.estimate
    for row in summary.ranks:
        solo = estimate.alone.get(row.rank)
        table.add_row(
            str(row.rank),
            # Only this column shrinks: its cells are cut, the others are neither cut nor wrapped.
            Text(row.device.replace("NVIDIA GeForce ", ""), no_wrap=True, overflow="ellipsis"),
            f"{row.weight / total:.0%}" if total > 0 else "–",
            human_count(solo) if solo is not None else "?",
            f"{row.wait_fraction:.0%}",
            contribution(estimate, row.rank),
        )
    return table


def closing_lines(summary: RunSummary, program: str = "evener") -> list[str]:
    """Return the last lines in the terminal: the verdict, and facts that the table lacks.

    Args:
        summary: The run.
        program: The command by which the user runs ``evener``.
    """
    lines = [*map(wrapped, summary.verdict)]
    for rank, factor in sorted(summary.emulated.items()):
        lines.append(f"Rank {rank} is emulated {factor:g}× slower.")
    if summary.gone_weight > 0:
        part = summary.gone_weight / _total_weight(summary)
        lines.append(f"Departed ranks processed {part:.0%} of the {summary.unit}.")
    folder = summary.run_folder
    return [*lines, f"page: {program} report {folder}", f"run folder: {folder}"]


def _total_weight(summary: RunSummary) -> float:
    return summary.gone_weight + sum(row.weight for row in summary.ranks)


def _headline(summary: RunSummary) -> str:
    steps = f"{summary.steps:,} step{'s' if summary.steps != 1 else ''}"
    text = (
        f"{steps}, {human_count(summary.committed_tokens)} {summary.unit} "
        f"in {human_duration(summary.elapsed_s)}"
    )
    if summary.tokens_per_s is not None:
        text += f", {human_count(summary.tokens_per_s)} {summary.unit}/s"
    if summary.heldout_loss is not None:
        text += f", held-out loss {summary.heldout_loss:.4g}"
    return text
