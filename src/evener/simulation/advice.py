"""Advice from predictions: which policy to choose, and which devices are worth adding. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from evener.observe.numbers import human_duration
from evener.planning.policies import ApplyPolicy
from evener.simulation.prediction import TeamPrediction, TeamSpec, predict

AS_GOOD: Final = 0.97
"""A policy with this part of the fastest one's throughput is preferred if its mathematics is nearer
to that of one machine; predictions are no more exact than that."""

NOTEWORTHY: Final = 0.01
"""A change of the throughput by less than this part is none."""

Predictions = Mapping[ApplyPolicy, TeamPrediction]


@dataclass(frozen=True, slots=True, kw_only=True)
class Worth:
    """The throughput that a rank adds to a team.

    Attributes:
        rank: The rank.
        name: For people.
        samples_per_s: Throughput of the team with it, under the policy that is best then.
        without: The same of the team without it.
    """

    rank: int
    name: str
    samples_per_s: float
    without: float

    @property
    def gain(self) -> float:
        """Return by which part the rank raises the throughput; below 0 if it lowers it."""
        return self.samples_per_s / self.without - 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """The advice for a team.

    Attributes:
        team: The team.
        predictions: By policy.
        best: The policy to choose.
        reason: Why.
        worth: By rank; empty for a team of one.
        kept: Ranks of the fastest known team: the others cost more than they contribute.
        samples_per_s: Its throughput.
    """

    team: TeamSpec
    predictions: Predictions
    best: ApplyPolicy
    reason: str
    worth: tuple[Worth, ...]
    kept: tuple[int, ...]
    samples_per_s: float


def advise(team: TeamSpec) -> Advice:
    """Predict every policy for a team, and for the team without each of its ranks."""
    predictions = predict_all(team)
    best = best_policy(predictions)
    whole = predictions[best].samples_per_s
    others = _without_each(team)
    worth = tuple(
        Worth(
            rank=rank,
            name=team.ranks[rank].name,
            samples_per_s=whole,
            without=speed,
        )
        for rank, speed in enumerate(others)
    )
    kept, speed = _drop_costly(team, whole, others)
    return Advice(
        team=team,
        predictions=predictions,
        best=best,
        reason=_reason(team, predictions, best),
        worth=worth,
        kept=kept,
        samples_per_s=speed,
    )


def predict_all(team: TeamSpec) -> Predictions:
    """Predict every policy; the one that is nearest to one machine comes first."""
    return {policy: predict(team, policy) for policy in ApplyPolicy}


def best_policy(predictions: Predictions) -> ApplyPolicy:
    """Return the first policy that is as good as the fastest."""
    fastest = max(one.samples_per_s for one in predictions.values())
    return next(
        policy for policy, one in predictions.items() if one.samples_per_s >= AS_GOOD * fastest
    )


def _speed(team: TeamSpec) -> float:
    predictions = predict_all(team)
    return predictions[best_policy(predictions)].samples_per_s


def _without_each(team: TeamSpec) -> list[float]:
    """Return the throughput without each rank; equal ranks are simulated once."""
    if len(team.ranks) < 2:
        return []
    kinds = [replace(rank, name="") for rank in team.ranks]
    known = {first: _speed(team.without(first)) for first in {*map(kinds.index, kinds)}}
    return [known[kinds.index(kind)] for kind in kinds]


def _drop_costly(
    team: TeamSpec, whole: float, others: Sequence[float]
) -> tuple[tuple[int, ...], float]:
    """Leave ranks out, the most costly one first, for as long as that helps."""
    kept = tuple(range(len(team.ranks)))
    while others and max(others) > (1.0 + NOTEWORTHY) * whole:
        dropped = max(range(len(others)), key=lambda rank: others[rank])
        whole, kept = others[dropped], (*kept[:dropped], *kept[dropped + 1 :])
        team = team.without(dropped)
        others = _without_each(team)
    return kept, whole


def _reason(team: TeamSpec, predictions: Predictions, best: ApplyPolicy) -> str:
    chosen, sync = predictions[best], predictions[ApplyPolicy.SYNC]
    fastest = max(predictions.values(), key=lambda one: one.samples_per_s)
    ahead = fastest.samples_per_s / chosen.samples_per_s - 1.0
    faster = f"only {ahead:.1%} faster" if ahead >= NOTEWORTHY else "no faster"
    if chosen is sync:
        told = "its result is that of one machine with the same batch"
        if fastest is chosen:
            return f"nothing is faster, and {told}"
        return f"{told}, and {fastest.policy} is {faster}"
    told = f"it is {chosen.samples_per_s / sync.samples_per_s - 1.0:.0%} faster than sync, which "
    if sync.parked:
        parked = " and ".join(map(str, sync.parked))
        exchange_s = team.link.exchange_s(len(team.ranks))
        why = f"all ranks would exchange for {human_duration(exchange_s)} in each step"
        if not exchange_s:
            why = f"a batch of {team.batch_size} has too few samples for all"
        told += f"parks rank {parked}, as {why}"
    else:
        parts = {"waiting": sync.wait, "exchanges": sync.exchange, "bookkeeping": sync.bookkeeping}
        largest = max(parts, key=lambda name: parts[name])
        told += f"loses {parts[largest]:.0%} of its time to {largest}"
    if fastest is not chosen:
        told += f"; {fastest.policy} is {faster}, and averages late"
    return told
