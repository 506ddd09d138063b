"""The speed of a team, and what each rank adds to it. Pure.

The closing table, reports, the dashboard and ``evener plan`` all use the speeds of ``measure``
(``measuring.py``), so that they cannot differ. This module derives the figures from them.
"""

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Final

SPEEDS_CHANGED: Final = "speeds changed during the run"
"""Shown in place of an impossible multiple."""

_MOST_OF_IDEAL: Final = 1.05
"""Apart from noise, a team cannot be faster than the sum of its ranks alone."""

NEGLIGIBLE: Final = 0.01
"""A rank that adds less than this part makes no difference: two equal runs differ by as much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Speeds of a team and of its ranks alone, in the same unit per second.

    Attributes:
        speed: Of the team; ``None`` if it was not measured in the windows of ``alone``.
        alone: By rank, units per second of its own compute time.
        parked: Ranks without a share, as the others are faster without them.
        unknown: Ranks at work whose speed alone is not known.
    """

    speed: float | None
    alone: Mapping[int, float] = field(default_factory=dict)
    parked: Set[int] = frozenset()
    unknown: Set[int] = frozenset()

    @property
    def speeds_changed(self) -> bool:
        """Return whether the team was faster than its ranks alone, so that speeds have changed."""
        if self.speed is None or self.unknown:
            return False
        return self.speed > _MOST_OF_IDEAL * sum(self.alone.values()) > 0

    @property
    def is_comparable(self) -> bool:
        """Return whether the team may be compared with its ranks alone."""
        is_known = bool(self.alone) and self.speed is not None and not self.unknown
        return is_known and 0.0 < sum(self.alone.values()) < math.inf and not self.speeds_changed

    @property
    def fastest(self) -> int | None:
        """Return the rank that is fastest alone, the lowest one in a tie."""
        return max(self.alone, key=lambda rank: (self.alone[rank], -rank), default=None)

    @property
    def ideal(self) -> float | None:
        """Return the sum of the ranks' speeds alone."""
        return sum(self.alone.values()) if self.is_comparable else None

    @property
    def of_ideal(self) -> float | None:
        """Return the team's speed over ``ideal``; at best about 1."""
        return self._over(self.ideal)

    @property
    def of_fastest(self) -> float | None:
        """Return the team's speed over that of its fastest rank alone."""
        return self._over(max(self.alone.values())) if self.is_comparable else None

    def without(self, rank: int) -> float | None:
        """Return the speed of the best team that the other ranks could have formed.

        It is the sum of the others' speeds alone, times the fraction that this team reached of its
        own sum, or the speed of the fastest of them alone if that is more. Parked ranks do not
        count.
        """
        active = {r: speed for r, speed in self.alone.items() if r not in self.parked}
        others = [speed for other, speed in active.items() if other != rank]
        if not others or not self.is_comparable or self.speed is None:
            return None
        return max(*others, min(1.0, self.speed / sum(active.values())) * sum(others))

    def adds(self, rank: int) -> float | None:
        """Return by which fraction the team is faster with a rank than ``without`` it.

        Below 0, the team is slower with it. ``None`` if that is not known, for parked ranks, and
        for the only rank at work.
        """
        is_known = rank in self.alone and rank not in self.parked
        return added(self.speed, self.without(rank)) if is_known else None

    def has_equal(self, rank: int) -> bool:
        """Return whether a rank alone is about as fast as the fastest other."""
        others = [s for r, s in self.alone.items() if r != rank and r not in self.parked]
        own, best = self.alone.get(rank, 0.0), max(others, default=0.0)
        return min(best, own) >= _EQUAL * max(best, own)

    def _over(self, other: float | None) -> float | None:
        return self.speed / other if other and self.speed is not None else None


_EQUAL: Final = 0.9
"""A rank that reaches this fraction of the best other rank's speed counts as equally fast."""


def added(with_it: float | None, without: float | None) -> float | None:
    """Return by which fraction a speed with a rank exceeds that without it."""
    return with_it / without - 1.0 if with_it is not None and without else None


def contribution(estimate: Estimate, rank: int, *, be: str = "") -> str:
    """Return what a rank adds, as text.

    Args:
        estimate: The speeds.
        rank: The rank.
        be: The verb, ``"is "``, if the text is part of a sentence.
    """
    if rank in estimate.parked:
        return f"{be}parked"
    part = estimate.adds(rank)
    if part is None:
        return "–"
    if part >= NEGLIGIBLE:
        return f"adds {part:.0%}"
    if estimate.has_equal(rank):
        return f"{be}as fast as any other"
    return "adds nothing" if part > -NEGLIGIBLE else f"slows the team by {-part:.0%}"
