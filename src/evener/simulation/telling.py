"""Advice as text for people, and as JSON for programs. Pure."""

from typing import Any

from evener.observe.event_lines import strict_json
from evener.observe.numbers import aligned, human_bytes, human_count, human_duration
from evener.planning.policies import ApplyPolicy
from evener.simulation.advice import NOTEWORTHY, Advice, Worth
from evener.simulation.prediction import TeamPrediction, TeamSpec
from evener.version import __version__


def document(advice: Advice) -> dict[str, Any]:
    """Return everything that is told, as values that ``json.dumps`` accepts."""
    team = advice.team
    knows_bytes = team.link.num_bytes > 0
    alone = [rank.alone(team.batch_size) for rank in team.ranks]
    policies: list[dict[str, Any]] = []
    for one in advice.predictions.values():
        row = strict_json(one)
        if not knows_bytes:
            row["sent_bytes"] = row["sent_bytes_per_s"] = None
        policies.append({**row, "lost": one.lost, "batch_size": team.batch_of(one.policy)})
    plan: dict[str, Any] = strict_json(
        {
            "version": __version__,
            "source": team.source,
            "notes": list(team.notes),
            "ranks": [
                {"rank": rank, "name": spec.name, "samples_per_s": speed}
                for (rank, spec), speed in zip(enumerate(team.ranks), alone, strict=True)
            ],
            "batch_size": team.batch_size,
            "local_batch_size": team.local_batch_size,
            "micro_batch_size": team.ranks[0].micro_batch_size,
            "policies": policies,
            "best": advice.best.value,
            "reason": advice.reason,
            "worth": [
                {**strict_json(one), "gain": one.gain, "verdict": verdict(one)}
                for one in advice.worth
            ],
            "kept": list(advice.kept),
            "samples_per_s": advice.samples_per_s,
        }
    )
    return plan


def text(advice: Advice) -> str:
    """Return the same for people; see ``document``."""
    team = advice.team
    names = [rank.name for rank in team.ranks]
    alone = [rank.alone(team.batch_size) for rank in team.ranks]
    lines = [f"speeds from {team.source}"]
    lines += [
        f"  {name}: {human_count(speed)} samples/s alone"
        for name, speed in zip(names, alone, strict=True)
    ]
    head = ["policy", "samples/s", "of ideal", "wait", "exchange", "bookkeeping", "window"]
    rows = [[*head, "sent per window", "shares"]]
    rows += [_row(team, one) for one in advice.predictions.values()]
    lines += ["", *aligned(rows), ""]
    parked = advice.predictions[ApplyPolicy.SYNC].parked
    lines += [f"sync parks {names[rank]}: the others are faster without it" for rank in parked]
    lines.append(f"best: {advice.best}, because {advice.reason}")
    lines += [f"{one.name}: {verdict(one)}" for one in advice.worth]
    if len(advice.kept) < len(names):
        lines.append(
            f"fastest with {' and '.join(names[rank] for rank in advice.kept)} only: "
            f"{human_count(advice.samples_per_s)} samples/s"
        )
    lines += [f"note: {note}" for note in team.notes]
    return "\n".join(lines) + "\n"


def verdict(worth: Worth) -> str:
    """Return whether a rank is worth having, in a sentence."""
    numbers = (
        f"the team does {human_count(worth.samples_per_s)} samples/s with it and "
        f"{human_count(worth.without)} without"
    )
    if worth.gain >= NOTEWORTHY:
        return f"worth having: {numbers} ({worth.gain:+.0%})"
    if worth.gain > -NOTEWORTHY:
        return f"not worth having: {numbers}"
    return f"leave it out: {numbers} ({worth.gain:+.0%})"


def _row(team: TeamSpec, one: TeamPrediction) -> list[str]:
    sent = human_bytes(one.sent_bytes) if team.link.num_bytes else "?"
    return [
        str(one.policy),
        human_count(one.samples_per_s),
        f"{one.of_ideal:.0%}" if one.of_ideal is not None else "–",
        f"{one.wait:.1%}",
        f"{one.exchange:.1%}",
        f"{one.bookkeeping:.1%}",
        human_duration(one.window_s),
        sent,
        "/".join(f"{share:.0%}" for share in one.shares[:8]) + "/..." * (len(one.shares) > 8),
    ]
