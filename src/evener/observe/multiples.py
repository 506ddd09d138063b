"""Compare the speed of a team with those of its ranks alone; for every figure that does. Pure."""

from collections.abc import Collection
from typing import Final, NamedTuple

#: A team cannot do more than the sum of its ranks alone, apart from noise.
_MOST_OF_IDEAL: Final = 1.05

#: What is shown in place of an impossible multiple.
SPEEDS_CHANGED: Final = "speeds changed during the run"


class Multiples(NamedTuple):
    """A team's speed against that of its ranks alone; ``None`` where that is not known.

    Attributes:
        of_best: The team's speed over that of the fastest rank alone.
        of_ideal: The team's speed over ``ideal``; at best about 1.
        ideal: The sum of the ranks' speeds alone.
        speeds_changed: Whether the team's speed exceeds ``ideal`` by more than noise. Then devices
            changed their speeds between the measurements, and the multiples are ``None``.
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
