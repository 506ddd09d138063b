"""What would make a run faster: rules on its figures, each with a key and its gain. Pure.

A rule returns nothing if its case is within the difference between two equal runs.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, Literal

from evener.observe.estimate import NEGLIGIBLE, Estimate, added
from evener.observe.numbers import human_count, human_duration
from evener.planning.policies import ApplyPolicy
from evener.simulation.advice_text import MOST_SHARES
from evener.simulation.changes import Change, Predictor
from evener.simulation.team_advice import LONG_WINDOW_S

Kind = Literal[
    "slow_rank",
    "coarse_split",
    "data_wait",
    "exchange",
    "speed_changed",
    "memory",
    "window_length",
    "parked",
]

_NOTEWORTHY: Final = 0.03
"""Below this fraction, the time lost to one cause is not worth a change."""

_MUCH_EXCHANGE: Final = 0.15
_MUCH_DATA: Final = 0.05
_FINE_ENOUGH: Final = 0.01
_MOST_TIMES: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """The facts of a rank of the present team that rules use.

    Attributes:
        rank: The rank.
        name: A text such as ``rank 1 (cuda:1 P100)``.
        data: Fraction of its time in which it waited for data.
        joined: The window with which it joined the running team; ``None`` if it did not join.
        changed: Factor by which a sample takes longer at the end of the run than at its beginning.
        at_once: Most samples in one forward and backward.
        passes: Micro-batches in a window.
    """

    rank: int
    name: str
    data: float = 0.0
    joined: int | None = None
    changed: float = 1.0
    at_once: float = 0.0
    passes: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """The facts of a run that rules use.

    Attributes:
        policy: Its policy.
        estimate: Its speeds.
        ranks: The present team.
        unit: The unit of speeds.
        batch_size: Median samples of a window.
        window_s: Median seconds of a window.
        wait: Fraction of the ranks' time in which they waited for one another.
        exchange: Fraction in which they exchanged.
        data: Fraction in which they waited for data.
    """

    policy: ApplyPolicy
    estimate: Estimate
    ranks: tuple[RankFacts, ...]
    unit: str = "samples"
    batch_size: int = 0
    window_s: float = 0.0
    wait: float = 0.0
    exchange: float = 0.0
    data: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What to change.

    Attributes:
        kind: The rule.
        text: The figures and what to do, in one or two sentences.
        hint: What to do, in a few words, if no key does it.
        key: What to set, as in ``--set``; ``None`` if no key does it.
        change: The change for which ``gain`` is predicted.
        gain: Fraction by which the run would be faster, as ``evener plan`` predicts or by the
            measured speeds of the ranks.
    """

    kind: Kind
    text: str
    hint: str = ""
    key: str | None = None
    change: Change | None = None
    gain: float | None = None

    @property
    def brief(self) -> str:
        """Return what to do in a few words."""
        return self.hint or f"try {self.key}"


def advise_run(facts: RunFacts, predict: Predictor | None = None) -> list[Advice]:
    """Return what would make a run faster, the largest predicted gain first.

    A change that is predicted to gain nothing is left out. Another policy is recommended only if it
    is predicted to gain something.

    Args:
        facts: The run.
        predict: Predicts gains; ``None`` leaves them out, which is faster.
    """
    found = []
    for one in (advice for rule in _RULES for advice in rule(facts)):
        gain = one.gain
        if predict is not None and one.change is not None:
            gain = predict(one.change)
        if gain is None and one.change is not None and one.change.policy is not None:
            found.append(replace(one, key=None, hint="ask evener plan about policies"))
        elif gain is None or gain >= NEGLIGIBLE:
            found.append(replace(one, gain=gain))
    return sorted(found, key=lambda one: -(one.gain or 0.0))


def coarsest_loss(batch_size: int, speeds: list[float]) -> tuple[tuple[int, ...], float]:
    """Return the best split of a batch into whole samples, and the fraction of time that it loses.

    Args:
        batch_size: Samples.
        speeds: Of each rank, above 0.
    """
    ideal_s = batch_size / sum(speeds)
    shares = [math.floor(ideal_s * speed) for speed in speeds]
    while sum(shares) < batch_size:
        rank = min(range(len(speeds)), key=lambda r: ((shares[r] + 1) / speeds[r], r))
        shares[rank] += 1
    slowest_s = max(share / speed for share, speed in zip(shares, speeds, strict=True))
    return tuple(shares), 1.0 - ideal_s / slowest_s


def _slow_rank(facts: RunFacts) -> Iterator[Advice]:
    estimate = facts.estimate
    costly = [
        one
        for one in facts.ranks
        if (adds := estimate.adds(one.rank)) is not None
        and adds <= -NEGLIGIBLE
        and one.rank != estimate.fastest
        and not estimate.has_equal(one.rank)
    ]
    if not costly or estimate.speed is None:
        return
    names = [
        f"{one.name}, which joined with window {one.joined:,}" if one.joined else one.name
        for one in costly
    ]
    without = max(estimate.without(one.rank) or 0.0 for one in costly)
    yield Advice(
        kind="slow_rank",
        text=(
            f"Leave out {' or '.join(names)}: the team does {human_count(estimate.speed)} "
            f"{facts.unit}/s, and would do {human_count(without)} without."
        ),
        hint=f"leave out rank {' or '.join(str(one.rank) for one in costly)}",
        gain=added(without, estimate.speed),
    )


def _coarse_split(facts: RunFacts) -> Iterator[Advice]:
    estimate, size = facts.estimate, facts.batch_size
    speeds = [estimate.alone[r] for r in sorted(estimate.alone.keys() - estimate.parked)]
    if facts.policy is not ApplyPolicy.SYNC or len(speeds) < 2 or facts.wait < _NOTEWORTHY:
        return
    shares, lost = coarsest_loss(size, speeds)
    if lost < _NOTEWORTHY:
        return
    larger = size
    while coarsest_loss(larger, speeds)[1] > _FINE_ENOUGH and larger < _MOST_TIMES * size:
        larger *= 2
    split = "/".join(map(str, shares[:MOST_SHARES])) + "/…" * (len(shares) > MOST_SHARES)
    yield Advice(
        kind="coarse_split",
        text=(
            f"{size} samples can be split {split} at best, which loses {lost:.1%} to waiting. A "
            f"batch of {larger} can be split more evenly; it changes the training, so adapt the "
            "learning rate."
        ),
        key=f"batch_size={larger}",
        change=Change(batch_size=larger),
    )


def _data_wait(facts: RunFacts) -> Iterator[Advice]:
    worst = max(facts.ranks, key=lambda one: one.data, default=None)
    if worst is not None and max(facts.data, worst.data / 2) >= _MUCH_DATA:
        yield Advice(
            kind="data_wait",
            text=(
                f"Ranks wait {facts.data:.1%} of their time for data, {worst.name} "
                f"{worst.data:.1%}: give the loader more num_workers, or prepare data first."
            ),
            hint="give the loader more num_workers",
        )


def _exchange(facts: RunFacts) -> Iterator[Advice]:
    if facts.exchange < _MUCH_EXCHANGE or len(facts.ranks) < 2:
        return
    text = f"{facts.exchange:.1%} of the ranks' time goes into exchanging."
    if facts.policy is ApplyPolicy.SYNC:
        yield Advice(
            kind="exchange",
            text=(
                f"{text} With cadence, ranks average less often, and training is not exact: divide "
                "batch_size by the number of ranks."
            ),
            key="policy=cadence",
            change=Change(policy=ApplyPolicy.CADENCE),
        )
    else:
        yield Advice(
            kind="exchange",
            text=f"{text} A larger anchor averages less often.",
            key="overhead_target=0.02",
        )


def _speed_changed(facts: RunFacts) -> Iterator[Advice]:
    for one in facts.ranks:
        if has_changed(one.changed):
            factor = max(one.changed, 1 / one.changed)
            way, when = ("slower", "now") if one.changed > 1 else ("faster", "at first")
            yield Advice(
                kind="speed_changed",
                text=(
                    f"{one.name[0].upper()}{one.name[1:]} was {factor:.1f}× {way} at the end than "
                    f"at the beginning. Look for what slowed it {when}: other programs on its "
                    "host, or the device's temperature or power limit."
                ),
                hint=f"look at rank {one.rank}",
            )


def _memory(facts: RunFacts) -> Iterator[Advice]:
    most = max((one.at_once for one in facts.ranks), default=0.0)
    for one in facts.ranks:
        if one.passes >= 2 and 0 < one.at_once <= most / 2:
            yield Advice(
                kind="memory",
                text=(
                    f"{one.name[0].upper()}{one.name[1:]} computes at most {one.at_once:.0f} "
                    f"samples at once, others {most:.0f}: its memory limits it. Half precision "
                    "needs less."
                ),
                key="precision=bf16",
            )


def _window_length(facts: RunFacts) -> Iterator[Advice]:
    if facts.policy is not ApplyPolicy.SYNC and facts.window_s > LONG_WINDOW_S:
        yield Advice(
            kind="window_length",
            text=(
                f"Ranks average only every {human_duration(facts.window_s)}, and a lost rank costs "
                "as much work: limit the anchor."
            ),
            key="max_anchor=10",
        )


def _parked(facts: RunFacts) -> Iterator[Advice]:
    for one in facts.ranks:
        if one.rank in facts.estimate.parked:
            yield Advice(
                kind="parked",
                text=(
                    f"{one.name[0].upper()}{one.name[1:]} is parked, as the others are faster "
                    "without it. Use it for something else, or let it make local steps: then "
                    "divide batch_size by the number of ranks."
                ),
                key="policy=cadence",
                change=Change(policy=ApplyPolicy.CADENCE),
            )


_RULES: Final = (
    *(_slow_rank, _speed_changed, _coarse_split, _data_wait, _exchange),
    *(_parked, _memory, _window_length),
)

_CHANGED: Final = 1.3


def has_changed(factor: float) -> bool:
    """Return whether a speed has changed by more than noise, in either direction."""
    return not 1 / _CHANGED < factor < _CHANGED
