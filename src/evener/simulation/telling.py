"""Advice as text for people, and as JSON for programs. Pure."""

from typing import Any

from evener.observe.event_lines import strict_json
from evener.observe.numbers import aligned, human_bytes, human_count, human_duration
from evener.planning.policies import ApplyPolicy
from evener.simulation.advice import Advice
from evener.simulation.prediction import TeamPrediction
from evener.version import __version__


def document(advice: Advice) -> dict[str, Any]:
    """Return everything that is told, as values that ``json.dumps`` accepts."""
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
            "local_batch_size": team.local_batch_size,
            "micro_batch_size": team.ranks[0].micro_batch_size,
            "policies": [*advice.predictions.values()],
            "best": advice.best,
            "reason": advice.reason,
            "worth": advice.worth,
        }
    )
    return plan


def text(advice: Advice) -> str:
    """Return the same for people; see ``document``."""
    team = advice.team
    lines = [f"speeds from {team.source}"]
    lines += [
        f"  {rank.name}: {human_count(rank.alone(team.batch_size))} samples/s alone"
        for rank in team.ranks
    ]
    head = ["policy", "samples/s", "of ideal", "wait", "exchange", "bookkeeping", "window"]
    rows = [[*head, "sent per window", "shares"], *map(_row, advice.predictions.values())]
    lines += ["", *aligned(rows), ""]
    lines += [
        f"sync parks {team.ranks[rank].name}: the others are faster without it"
        for rank in advice.predictions[ApplyPolicy.SYNC].parked
    ]
    lines.append(f"best: {advice.best}, because {advice.reason}")
    lines += [f"{one.name}: {one.verdict}" for one in advice.worth]
    lines += [f"note: {note}" for note in team.notes]
    return "\n".join(lines) + "\n"


def _row(one: TeamPrediction) -> list[str]:
    return [
        str(one.policy),
        human_count(one.samples_per_s),
        f"{one.of_ideal:.0%}" if one.of_ideal is not None else "–",
        f"{one.wait:.1%}",
        f"{one.exchange:.1%}",
        f"{one.bookkeeping:.1%}",
        human_duration(one.window_s),
        human_bytes(one.sent_bytes) if one.sent_bytes is not None else "?",
        "/".join(f"{share:.0%}" for share in one.shares[:8]) + "/..." * (len(one.shares) > 8),
    ]
