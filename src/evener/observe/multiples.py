"""How many times as fast a team is as its ranks alone: every such figure comes from here. Pure."""

from collections.abc import Collection
from typing import Final, NamedTuple

#: A team does no more than its ranks alone, summed up, and a little noise.
_MOST_OF_IDEAL: Final = 1.05

#: Stands in place of a multiple that cannot be.
SPEEDS_CHANGED: Final = "speeds changed during the run"


class Multiples(NamedTuple):
    """A team's speed against that of its ranks alone; ``None`` where that is not known.

    Attributes:
        of_best: Over the speed of the fastest rank alone.
        of_ideal: Over the sum of the ranks' speeds alone; at best about 1.
        ideal: That sum.
        speeds_changed: Whether the speeds cannot be of the same time, so that there is no multiple.
    """

    of_best: float | None = None
    of_ideal: float | None = None
    ideal: float | None = None
    speeds_changed: bool = False


def multiples(team: float | None, alone: Collection[float]) -> Multiples:
    """Compare the speed of a team with what its ranks do alone.

    Args:
        team: Speed of the team; ``None`` where it was not measured in the windows, or the rounds,
            in which ``alone`` was.
        alone: Speeds of its ranks, from the same windows and by the same estimator.
    """
    ideal = sum(alone)
    if team is None or not 0.0 < ideal < float("inf"):
        return Multiples()
    if team > _MOST_OF_IDEAL * ideal:
        return Multiples(speeds_changed=True)
    return Multiples(team / max(alone), team / ideal, ideal)
