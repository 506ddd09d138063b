"""Advice of ``evener plan`` as text and as JSON. Pure."""

from typing import Any, Final

from evener.observe.event_lines import strict_json
from evener.observe.numbers import aligned, human_bytes, human_count, human_duration, wrapped
from evener.planning.policies import ApplyPolicy
from evener.simulation.prediction import MeasuredRun, TeamPrediction, TeamSpec
from evener.simulation.team_advice import TeamAdvice
from evener.version import __version__


def document(advice: TeamAdvice) -> dict[str, Any]:
    """Return the advice as values that ``json.dumps`` accepts."""
    team = advice.team
    plan: dict[str, Any] = strict_json(
        {
            "version": __version__,
            "source": team.source,
            "notes": team.notes,
            "ranks": [
                {"rank": rank, "name": spec.name, "samples_per_s": spec.alone(team.batch_size)}
                for rank, spec in enumerate(team.ranks)
            ],
            "batch_size": team.batch_size,
            "local_batch_size": team.batch_of(ApplyPolicy.CADENCE),
            "micro_batch_size": team.ranks[0].micro_batch_size,
            "measured": None if team.measured is None else _measured_document(team.measured),
            "policies": [*advice.predictions.values()],
            "best": advice.best,
            "reason": advice.reason,
            "worth": advice.worth,
        }
    )
    return plan


def _measured_document(run: MeasuredRun) -> dict[str, Any]:
    estimate = run.estimate
    return {
        "policy": run.policy,
        "samples_per_s": estimate.speed,
        "of_fastest": estimate.of_fastest,
        "of_ideal": estimate.of_ideal,
        "adds": [estimate.adds(rank) for rank in sorted(estimate.alone)],
        **{part: run.parts.get(span) for part, span in _PARTS.items()},
        "window_s": run.window_s,
    }


_PARTS: Final = {"wait": "wait", "exchange": "sync", "data": "data"}


def text(advice: TeamAdvice) -> str:
    """Return the advice as text, 80 columns wide; see ``document``."""
    team = advice.team
    lines = [
        f"speeds from {team.source}",
        *(
            f"  {rank.name}: {human_count(rank.alone(team.batch_size))} samples/s alone"
            for rank in team.ranks
        ),
        "",
        *aligned([_HEAD, *_measured(team), *map(_row, advice.predictions.values())]),
        "",
    ]
    prose = [
        f"sync parks {team.ranks[rank].name}: the others are faster without it"
        for rank in advice.predictions[ApplyPolicy.SYNC].parked
    ]
    shares = advice.predictions[advice.best].shares
    if len(shares) > 1:
        shown = "/".join(f"{share:.0%}" for share in shares[:MOST_SHARES])
        prose.append(f"shares under {advice.best}: {shown}{'/…' * (len(shares) > MOST_SHARES)}")
    prose.append(f"best: {advice.best}, because {advice.reason}")
    prose += [f"{one.name}: {one.verdict}" for one in advice.worth]
    prose += [f"note: {note}" for note in (*team.notes, _NO_LOSS)]
    return "\n".join([*lines, *map(wrapped, prose)]) + "\n"


MOST_SHARES: Final = 8
_HEAD: Final = (
    *("policy", "samples/s", "ideal", "wait", "exchange", "other", "window", "sent/window"),
)
_NO_LOSS: Final = (
    "only sync keeps the loss; the others are rated by that of small models whose batch the ranks "
    "share: evener bench measures yours"
)


def _measured(team: TeamSpec) -> list[list[str]]:
    """Return the row of the run that measured the team, with the figures of its report."""
    run = team.measured
    if run is None or run.estimate.speed is None:
        return []
    parts = [f"{run.parts.get(span, 0.0):.1%}" for span in ("wait", "sync")]
    figures = [human_count(run.estimate.speed), _of_ideal(run.estimate.of_ideal), *parts]
    return [[f"measured: {run.policy}", *figures, "–", human_duration(run.window_s), ""]]


def _row(one: TeamPrediction) -> list[str]:
    return [
        str(one.policy),
        human_count(one.samples_per_s),
        _of_ideal(one.of_ideal),
        f"{one.wait:.1%}",
        f"{one.exchange:.1%}",
        f"{one.bookkeeping:.1%}",
        human_duration(one.window_s),
        human_bytes(one.sent_bytes) if one.sent_bytes is not None else "?",
    ]


def _of_ideal(part: float | None) -> str:
    return f"{part:.0%}" if part is not None else "–"
