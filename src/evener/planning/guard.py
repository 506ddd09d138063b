"""Divergence guards: whether ranks diverge so much that they should average more often. Pure."""

import math
from abc import ABC, abstractmethod
from enum import StrEnum
from typing import Any, final

from evener.errors import ConfigError

_RISES = 2
"""Rises in a row after which growth is suppressed: the third of three rising values shows them."""

THRESHOLD = 0.05
"""Default divergence below which ``LevelGuard`` does nothing."""

_FAR = 10.0
"""Multiple of the threshold above which ranks average more often, also without a rise.

Lower levels mean little: in docs/experiments.md, trainings with divergences up to 0.6 were not
worse than others with 0.1, if a rank was slow or the model was small.
"""

LEAST_FACTOR = 0.1
"""Least factor: the anchor is reduced at most to a tenth at once."""

_FACTOR = 0.5
"""The default factor of ``NUDGE_DOWN``."""


class Verdict(StrEnum):
    """The verdict of a guard on the anchor."""

    STABLE = "stable"
    """The divergence is fine."""

    SUPPRESS_GROWTH = "suppress_growth"
    """The anchor should not grow now."""

    NUDGE_DOWN = "nudge_down"
    """The anchor should be reduced: to half, unless a factor is given with it."""


Answer = Verdict | tuple[Verdict, float]
"""The result of a guard: a verdict, or ``(Verdict.NUDGE_DOWN, factor)``."""


class DivergenceGuard(ABC):
    """Judges how far ranks were apart when they averaged.

    Derive a class for your own rule and pass an object of it as
    ``DdpConfig(divergence_guard=...)``. Each rank calls its own once per window, in the order of
    windows; the verdict on the planning rank counts. It must not call a collective.
    """

    @abstractmethod
    def report(self, divergence: float) -> Answer:
        """Judge a window.

        Args:
            divergence: The largest ``‖p - average‖ / ‖average‖`` over ranks, of the parameters just
                before they were averaged.

        Returns:
            The verdict on the anchor. ``(Verdict.NUDGE_DOWN, 0.7)`` multiplies it by 0.7; factors
            are from 0.1 to below 1, and 0.5 by default.
        """


@final
class NoGuard(DivergenceGuard):
    """Never changes the anchor."""

    def report(self, divergence: float) -> Verdict:
        """Return ``STABLE``."""
        return Verdict.STABLE


@final
class LevelGuard(DivergenceGuard):
    """Acts on the level of the divergence, and at the third of three rising values.

    Above ten times the threshold the anchor is reduced, and it does not grow until the divergence
    is below the threshold. While the divergence keeps rising above the threshold, the anchor does
    not grow. Then it is reduced only with ``factor``: averaging more often because of a trend costs
    time, and was found not to help accuracy.

    Args:
        threshold: Divergence below which nothing is done.
        factor: Multiplies the anchor from the fourth rising value on, and above the level. With
            ``None``, rising values do not reduce it, and the level halves it.
    """

    def __init__(self, threshold: float = THRESHOLD, factor: float | None = None) -> None:
        self._threshold = threshold
        self._factor = factor
        self._last = math.inf
        self._rises = 0
        self._was_far = False

    def report(self, divergence: float) -> Answer:
        """Return the verdict on a window's divergence; see ``DivergenceGuard``."""
        self._rises = self._rises + 1 if divergence > self._last else 0
        self._last = divergence
        self._was_far = divergence > (1.0 if self._was_far else _FAR) * self._threshold
        if divergence > _FAR * self._threshold:
            return Verdict.NUDGE_DOWN, self._factor or _FACTOR
        if self._was_far:
            return Verdict.SUPPRESS_GROWTH
        if self._rises < _RISES or divergence <= self._threshold:
            return Verdict.STABLE
        if self._factor is None or self._rises == _RISES:
            return Verdict.SUPPRESS_GROWTH
        return Verdict.NUDGE_DOWN, self._factor


def make_guard(
    guard: str | bool | DivergenceGuard | None,
    threshold: float | None = None,
    factor: float | None = None,
) -> DivergenceGuard:
    """Return the guard of a configuration.

    Args:
        guard: ``"level"``; ``"none"``, ``None`` or ``False`` for no guard; or one of the user's.
        threshold: Threshold of ``"level"``; ``None`` for its default.
        factor: Factor of ``"level"``.

    Raises:
        ConfigError: The name is unknown.
    """
    if isinstance(guard, DivergenceGuard):
        return guard
    if guard == "level":
        return LevelGuard(threshold or THRESHOLD, factor)
    if guard in ("none", None, False):
        return NoGuard()
    raise ConfigError(
        f"divergence_guard is {guard!r}; choose one of none, level, or give an object of a class "
        "derived from evener.DivergenceGuard"
    )


def ask_guard(guard: DivergenceGuard, divergence: float) -> tuple[Verdict, float]:
    """Return the guard's checked verdict on a window and its factor.

    Raises:
        ConfigError: The user's guard did not return a verdict, or its factor is out of range.
    """
    answer: Any = guard.report(divergence)
    try:
        verdict, factor = answer if isinstance(answer, tuple) else (answer, _FACTOR)
        if not LEAST_FACTOR <= float(factor) < 1:
            raise ValueError
        return Verdict(verdict), float(factor)
    except (TypeError, ValueError):
        raise ConfigError(
            f"{type(guard).__name__}.report returned {answer!r}; return an evener.Verdict: "
            f"{', '.join(f'Verdict.{v.name}' for v in Verdict)}, or (Verdict.NUDGE_DOWN, factor) "
            f"with a factor from {LEAST_FACTOR} to below 1"
        ) from None
