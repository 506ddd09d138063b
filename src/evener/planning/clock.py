"""The deadline of a CADENCE window on a rank, so that no rank waits for a slow one. Pure."""

import math
from typing import final


@final
class WindowClock:
    """Decides after each local step whether to start another one.

    A step is started only if it would end nearer the deadline than stopping now. So a rank that has
    become slow contributes its completed steps. The others wait at most half of its step, beyond
    the current step. The time of a step is predicted from the last ones: each new one counts half.
    """

    def __init__(self) -> None:
        self._step_s = 0.0
        self.open(0)

    def open(self, most: int) -> None:
        """Begin a window of no more than ``most`` steps, without a deadline so far."""
        self.num_steps = 0
        self.limit(most, math.inf)

    def limit(self, most: int, deadline_s: float, *, least: int = 0) -> None:
        """Set the end of the window that has begun.

        Args:
            most: Steps at most, those already done included.
            deadline_s: When to stop, on the clock of ``wants_another``; ``inf`` for never.
            least: Steps that are made regardless of the time, up to ``most``.
        """
        self._most, self._least = most, least
        self._deadline_s = deadline_s

    def count_step(self, elapsed_s: float | None) -> None:
        """Count a step that took ``elapsed_s`` seconds; ``None`` if the time does not count."""
        self.num_steps += 1
        if elapsed_s is None:
            return
        known = self._step_s or elapsed_s
        self._step_s = 0.5 * known + 0.5 * elapsed_s

    def wants_another(self, now_s: float) -> bool:
        """Return whether to start another step now; always for the first one, if allowed."""
        if self.num_steps >= self._most:
            return False
        if self.num_steps < max(1, self._least):
            return True
        return now_s + 0.5 * self._step_s < self._deadline_s
