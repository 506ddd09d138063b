"""Divergence guards: whether ranks drift so far apart that they should average more often. Pure."""

import math
from abc import ABC, abstractmethod
from enum import StrEnum
from typing import final

from evener.errors import ConfigError

_RISES = 3
"""Rises in a row after which growth is suppressed."""

GUARD_NAMES = ("none", "level")
"""Names of the guards, for configurations."""


class Verdict(StrEnum):
    """What a guard thinks of the anchor."""

    STABLE = "stable"
    """Nothing to worry about."""

    SUPPRESS_GROWTH = "suppress_growth"
    """The anchor should not grow now."""

    NUDGE_DOWN = "nudge_down"
    """The anchor should come down."""


class DivergenceGuard(ABC):
    """Judges how far ranks were apart when they averaged."""

    @abstractmethod
    def report(self, divergence: float) -> Verdict:
        """Takes a window's divergence.

        Args:
            divergence: The largest ``‖p - average‖ / ‖average‖`` over ranks, of the parameters just
                before they were averaged.
        """


@final
class NoGuard(DivergenceGuard):
    """Never worries."""

    def report(self, divergence: float) -> Verdict:
        """Always ``STABLE``."""
        return Verdict.STABLE


@final
class LevelGuard(DivergenceGuard):
    """Worries when the divergence has risen three times in a row to above a threshold.

    The first time it suppresses growth of the anchor; while the divergence goes on rising above the
    threshold, it asks for a smaller anchor.

    Args:
        threshold: Divergence below which nothing is done.

    Raises:
        ConfigError: It is not a finite number above 0.
    """

    def __init__(self, threshold: float = 0.05) -> None:
        if not 0 < threshold < math.inf:
            raise ConfigError(
                f"divergence_threshold is {threshold}; give a finite number above 0, such as 0.05, "
                "or divergence_guard='none'"
            )
        self._threshold = threshold
        self._last = math.inf
        self._rises = 0

    def report(self, divergence: float) -> Verdict:
        """Takes a window's divergence; see ``DivergenceGuard``."""
        self._rises = self._rises + 1 if divergence > self._last else 0
        self._last = divergence
        if self._rises < _RISES or divergence <= self._threshold:
            return Verdict.STABLE
        return Verdict.SUPPRESS_GROWTH if self._rises == _RISES else Verdict.NUDGE_DOWN


def make_guard(name: str, threshold: float) -> DivergenceGuard:
    """The guard of a configuration.

    Raises:
        ConfigError: The name is unknown, or the threshold is out of range.
    """
    level = LevelGuard(threshold)  # a bad threshold is refused whatever the guard
    if name == "level":
        return level
    if name == "none":
        return NoGuard()
    raise ConfigError(f"divergence_guard is {name!r}; choose one of {', '.join(GUARD_NAMES)}")
