"""Advice from predictions: which policy to choose, and which devices are worth adding. Pure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from evener.observe.numbers import human_count, human_duration
from evener.planning.policies import ApplyPolicy
from evener.simulation.prediction import TeamPrediction, TeamSpec, predict

AS_GOOD: Final = 0.97
"""A policy that reaches this fraction of the fastest one's throughput is preferred if its result is
nearer to that of one device; predictions are not more exact than that."""

NOTEWORTHY: Final = 0.01
"""Changes of the throughput by less than this fraction are ignored."""

LONG_WINDOW_S: Final = 60.0
"""Longest window: ranks that average less often diverge, and a lost rank costs more work."""

Predictions = Mapping[ApplyPolicy, TeamPrediction]


@dataclass(frozen=True, slots=True, kw_only=True)
class Worth:
    """The throughput that a rank adds to a team.

    Attributes:
        rank: The rank.
        name: Its name.
        without: Throughput of the team without it, under the best policy.
        gain: Fraction by which the rank raises the throughput; below 0 if it lowers it.
        for_loss: The same for the same loss; see ``needed``.
        verdict: Whether the rank is worth having for that, in a sentence.
    """

    rank: int
    name: str
    without: float
    gain: float
    for_loss: float
    verdict: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TeamAdvice:
    """The advice for a team.

    Attributes:
        team: The team.
        predictions: By policy.
        best: The policy to choose.
        reason: Why, as a clause.
        worth: By rank; empty for a team of one.
    """

    team: TeamSpec
    predictions: Predictions
    best: ApplyPolicy
    reason: str
    worth: tuple[Worth, ...]


def advise(team: TeamSpec) -> TeamAdvice:
    """Predict every policy for a team, and for the team without each of its ranks."""
    predictions = predict_all(team)
    best = best_policy(predictions)
    kinds = [replace(rank, name="") for rank in team.ranks]
    without = {
        first: predict(team.without(first), best)
        for first in ({*map(kinds.index, kinds)} if len(kinds) > 1 else ())
    }
    whole = predictions[best]
    worth = [
        _worth(rank, team.ranks[rank].name, whole, without[kinds.index(kind)])
        for rank, kind in enumerate(kinds)
        if without
    ]
    reason = _reason(predictions, best)
    return TeamAdvice(
        team=team, predictions=predictions, best=best, reason=reason, worth=tuple(worth)
    )


def predict_all(team: TeamSpec) -> Predictions:
    """Predict every policy; the one whose result is nearest to that of one device comes first."""
    return {policy: predict(team, policy) for policy in ApplyPolicy}


def needed(prediction: TeamPrediction) -> float:
    """Return how many samples a team needs for the held-out loss of SYNC, relative to SYNC.

    Averaging rarely costs more the more ranks there are that share the samples: 1.2, 1.5 and 1.9
    times as many for 2, 4 and 8 equal ranks, measured with 16 local steps, and 1.1 times as many
    again if averages land late (docs/experiments.md). A rank with a small share counts little.

    That is if ranks divide the batch of SYNC. With whole batches for each they make fewer steps,
    and two ranks need 1.8 times as many samples.
    """
    if prediction.policy is ApplyPolicy.SYNC:
        return 1.0
    num_equal = 1.0 / sum(share**2 for share in prediction.shares)
    batches = max(1.0, num_equal * prediction.batch_size / prediction.sync_batch_size)
    late = 1.1 if prediction.policy is ApplyPolicy.ASYNC else 1.0
    return math.pow(num_equal, 0.3) * math.pow(batches, 0.55) * late


def useful(prediction: TeamPrediction) -> float:
    """Return the throughput in samples of SYNC: by it, speeds are compared for the same loss."""
    return prediction.samples_per_s / needed(prediction)


def best_policy(predictions: Predictions) -> ApplyPolicy:
    """Return the first policy that is as good as the best one with short windows.

    A policy is rated by its speed, divided by the samples that it needs relative to SYNC. It is
    SYNC if no other policy has short windows.
    """
    short = {
        policy: useful(one)
        for policy, one in predictions.items()
        if policy is ApplyPolicy.SYNC or one.window_s <= LONG_WINDOW_S
    }
    best = max(short.values())
    return next(policy for policy, speed in short.items() if speed >= AS_GOOD * best)


def _worth(rank: int, name: str, whole: TeamPrediction, without: TeamPrediction) -> Worth:
    gain = whole.samples_per_s / without.samples_per_s - 1.0
    for_loss = useful(whole) / useful(without) - 1.0
    gains = f"{gain:+.0%}"
    if whole.policy is not ApplyPolicy.SYNC:
        gains += f", {for_loss:+.0%} for the same loss"
    verdict = (
        f"under {whole.policy} the team does {human_count(whole.samples_per_s)} samples/s with it "
        f"and {human_count(without.samples_per_s)} without ({gains})"
    )
    kind = "worth having" if for_loss >= NOTEWORTHY else "not worth having"
    return Worth(
        rank=rank,
        name=name,
        without=without.samples_per_s,
        gain=gain,
        for_loss=for_loss,
        verdict=f"{kind if for_loss > -NOTEWORTHY else 'leave it out'}: {verdict}",
    )


def _reason(predictions: Predictions, best: ApplyPolicy) -> str:
    chosen, sync = predictions[best], predictions[ApplyPolicy.SYNC]
    fastest = max(predictions.values(), key=lambda one: one.samples_per_s)
    ahead = fastest.samples_per_s / chosen.samples_per_s - 1.0
    only = "only " if ahead < 1.0 / AS_GOOD - 1.0 else ""
    faster = f"{only}{ahead:.1%} faster" if ahead >= NOTEWORTHY else "no faster"
    beside = "" if fastest is chosen else f", and {fastest.policy} is {faster}"
    if fastest.policy is not ApplyPolicy.SYNC and fastest.window_s > LONG_WINDOW_S:
        beside = (
            f"; {fastest.policy} is {faster}, but averages only every "
            f"{human_duration(fastest.window_s)}, which max_anchor limits"
        )
    elif beside and needed(fastest) > needed(chosen) and ahead >= NOTEWORTHY:
        more = needed(fastest) / needed(chosen) - 1.0
        beside += f", but may need {more:.0%} more samples for the same loss"
    if chosen is sync:
        return f"its result is that of one device with the same batch{beside}"
    losses = {"waiting": sync.wait, "exchanges": sync.exchange, "bookkeeping": sync.bookkeeping}
    largest = max(losses, key=lambda name: losses[name])
    lost = f"loses {losses[largest]:.0%} of its time to {largest}"
    if sync.parked:
        lost = f"parks rank {' and '.join(map(str, sync.parked))}"
    gain = chosen.samples_per_s / sync.samples_per_s - 1.0
    for_loss = useful(chosen) / useful(sync) - 1.0
    faster = f"{gain:.0%} faster than sync ({for_loss:.0%} for the same loss)"
    return f"it is {faster}, which {lost}{beside}"
