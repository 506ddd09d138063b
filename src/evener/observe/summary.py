"""The summary of a run: a JSON file for programs, a table and a verdict for people."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evener.errors import EvenerError, UsageError
from evener.files import write_file
from evener.observe.event_lines import strict_json
from evener.observe.multiples import SPEEDS_CHANGED, Multiples, multiples
from evener.observe.numbers import human_count, human_duration

if TYPE_CHECKING:
    from rich.table import Table

# A contribution below this part of the run is within what two equal runs differ by.
_NEGLIGIBLE = 0.01
# If ranks side by side do less than this part of what each does alone, a run allows no verdict.
# A rank that does this part of the best other rank's speed alone is as fast as that one.
_EQUAL = 0.9
_ALIKE = "as any other"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSummary:
    """One rank over the whole run.

    Attributes:
        rank: Its rank at the end.
        member: Its id.
        device: Its device, for people, such as ``cuda:0 (L40S)``.
        samples: Committed samples that it did.
        weight: Their weight (tokens, or samples).
        wait_fraction: Part of its time in which it waited for others, from 0 to 1.
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
            team, in windows of those that are there at the end. ``None`` when they were too few.
        solo_tokens_per_s: Speed of each rank alone, by rank: what it did per second of its own
            compute time in the windows of ``tokens_per_s``; ``None`` where unknown, and for those
            that are gone.
        heldout_loss: Mean loss on held-out data at the end, if it was evaluated.
        heldout_samples: Samples behind it: all that are held out, unless the run was stopped.
        committed_tokens: Weight of all committed windows, in ``unit``.
        committed_samples: Samples of all committed windows.
        steps: Optimizer steps.
        world_size: Ranks in the team; of an elastic team, those that are there at the end.
        policy: Apply policy.
        backend: What carried the exchange.
        checkpoint: Path of the newest checkpoint, if there is one.
        run_folder: Where the files of the run are.
        elapsed_s: Seconds of training, from the start of each session to its end.
        unit: What weights count: ``tokens`` or ``samples``. The keys say tokens in either case.
        ranks: One row for each of them, by rank.
        gone_weight: Weight of the work of ranks that have left an elastic team.
        emulated: Ranks that are slowed down on purpose, and the factor.
        parked: Ranks that got no share, since the team is faster without them.
        machine: Facts about the machine (JSON).
        versions: Versions of what took part, by name.
        details: Further figures of the job, by key of the JSON file.

    Raises:
        UsageError: A figure of ``details`` has the name of a key that the file has itself.
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
    machine: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        own = {each.name for each in fields(self)} | {"of_ideal"}
        if taken := sorted(own.intersection(self.details)):
            raise UsageError(
                f"the task's figures hold {', '.join(map(repr, taken))}, which summary.json has "
                "itself; return them from Task.figures under other names. The checkpoint is "
                "written: start with resume to write the summary"
            )

    @property
    def solos(self) -> dict[int, float]:
        """Return the speeds of ranks alone that are known, by rank."""
        return {r: solo for r, solo in enumerate(self.solo_tokens_per_s) if solo is not None}

    @property
    def active(self) -> dict[int, float]:
        """Return those of ranks that are not parked."""
        return {r: solo for r, solo in self.solos.items() if r not in self.parked}

    @property
    def multiples(self) -> Multiples:
        """Return how many times as fast the team was as its ranks alone."""
        if not self.has_all_solos:
            return Multiples()
        return multiples(self.tokens_per_s, self.solos.values())

    @property
    def has_all_solos(self) -> bool:
        """Return whether it is known what each rank alone does, but for parked ones."""
        return len(self.solos.keys() | {*self.parked}) == self.world_size and bool(self.solos)

    def to_json(self) -> dict[str, Any]:
        """Return all figures, also the derived ones, as values that ``json.dumps`` accepts."""
        document = strict_json(self)
        details = document.pop("details")
        return {**document, **details, "of_ideal": self.multiples.of_ideal}

    def write(self, path: Path) -> None:
        """Write the JSON file, whole or not at all.

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


def best_speed_without(summary: RunSummary, rank: int) -> float | None:
    """Return the speed of the best team that the other ranks could have formed.

    Other ranks together do the sum of their solo speeds times what this team reached of the sum of
    its own, unless the fastest of them alone does more. Parked ranks are on neither side.

    Returns:
        Tokens (or samples) per second; ``None`` when there is no other rank or speeds are unknown.
    """
    total = sum(summary.active.values())
    others = [speed for other, speed in summary.active.items() if other != rank]
    team = summary.tokens_per_s
    if summary.multiples.of_ideal is None or team is None or not others:
        return None
    together = min(1.0, team / total) * sum(others)
    return max(*others, together)


def contribution(summary: RunSummary, rank: int) -> float | None:
    """Return what the run would have lacked without a rank, as a part of the run.

    In the time that the run took, the best team without the rank (``best_speed_without``) would
    have done ``best_speed_without`` over the team's speed of the work. The rest is the rank's
    contribution. It is at most 1. Contributions do not add up to 1, since the others share out the
    work of one that is missing.

    Returns:
        From 0 to 1, a part of the work; negative for a rank without which the work would have been
        done sooner: the part of the run's time that it cost, down to -1. ``None`` when speeds are
        unknown, or nobody else is there to do the work.
    """
    without, team = best_speed_without(summary, rank), summary.tokens_per_s
    if not without or not team:
        return None
    return 1.0 - without / team if without <= team else team / without - 1.0


def closing_table(summary: RunSummary) -> "Table":
    """Return a rich table with a row per rank: device, share, speed alone, wait, contribution."""
    from rich.table import Table

    table = Table(title=_headline(summary), title_justify="left", title_style="")
    table.add_column("rank", justify="right")
    table.add_column("device")
    table.add_column("share", justify="right")
    table.add_column(f"{summary.unit}/s alone", justify="right")
    table.add_column("wait", justify="right")
    table.add_column("contribution")
    total = _total_weight(summary)
    for row in summary.ranks:
        solo = summary.solos.get(row.rank)
        factor = summary.emulated.get(row.rank)
        table.add_row(
            str(row.rank),
            row.device + (f", emulated {factor:g}x slower" if factor is not None else ""),
            f"{row.weight / total:.0%}" if total > 0 else "–",
            human_count(solo) if solo is not None else "?",
            f"{row.wait_fraction:.0%}",
            _contribution(summary, row.rank),
        )
    return table


def verdict(summary: RunSummary) -> list[str]:
    """Return the last lines for a person: what the table does not say."""
    lines = []
    if summary.tokens_per_s is None:
        lines.append("the run was too short, or its team changed too late, to measure its speed")
    elif summary.world_size > 1:
        lines += _team(summary)
    if summary.gone_weight > 0:
        part = summary.gone_weight / _total_weight(summary)
        lines.append(f"departed ranks processed {part:.0%} of the {summary.unit}")
    lines.append(f"run folder: {summary.run_folder}")
    return lines


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


def _team(summary: RunSummary) -> list[str]:
    solos, times = summary.solos, summary.multiples
    if not summary.has_all_solos:
        return ["what each rank does alone is not known"]
    if times.speeds_changed:
        return [f"the team is not compared with its ranks alone: {SPEEDS_CHANGED}"]
    # Of equals the lowest rank is the one to compare with.
    best = max(solos, key=lambda rank: (solos[rank], -rank))
    lines = [
        f"the team did {times.of_best:.2f}x rank {best} alone (by what each rank did per second of "
        "its own compute time)"
    ]
    words = {r: _contribution(summary, r) for r in summary.active}
    costly = [str(r) for r, told in words.items() if told.startswith("cost") and r != best]
    if costly:
        lines.append(f"leave out rank {' or '.join(costly)}: the others are faster by themselves")
    alike = [str(rank) for rank, told in words.items() if told == _ALIKE]
    if alike:
        lines.append(
            f"the team is no faster with rank {' or '.join(alike)}, which is as fast alone as any "
            "other: ranks compete for the same cores, or exchanging takes what sharing saves"
        )
    return lines


def _contribution(summary: RunSummary, rank: int) -> str:
    if rank in summary.parked:
        return "parked: faster without it"
    part = contribution(summary, rank)
    if part is None:
        return "–"
    if part >= _NEGLIGIBLE:
        return f"{part:.0%} of the work"
    if _is_equal(summary, rank):
        return _ALIKE
    return "none" if part > -_NEGLIGIBLE else f"cost {-part:.0%} of the time"


def _is_equal(summary: RunSummary, rank: int) -> bool:
    """Return whether a rank alone is about as fast as the fastest other: both are useful."""
    speeds = summary.active
    own = speeds.pop(rank, 0.0)
    best = max(speeds.values(), default=0.0)
    return min(best, own) >= _EQUAL * max(best, own)
