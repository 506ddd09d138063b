"""Whether measured speeds contradict the user's hint. Pure."""

from collections.abc import Sequence
from typing import final

_SOLID_WINDOWS = 5
"""Windows with work after which a rank's speed is taken for known: one or two are often disturbed,
and the first hold what a device sets up once."""

_LAST_WINDOW = 100
"""After so many windows a rank that is still not measured is not waited for."""

_FACTOR = 1.5
"""Between hinted and measured part of the speed; a smaller one is noise, or a rough hint."""

_FACTOR_OF_SMALL_SHARES = 4.0
"""The same where a rank is slower still than hinted: of a small share what each micro-batch costs
by itself is a large part, so that the rank seems slower than it would be with more work."""


@final
class HintWatch:
    """Compares a hint with what is measured, once for each rank.

    Args:
        hinted: Speeds by rank, relative to one another.
    """

    def __init__(self, hinted: Sequence[float]) -> None:
        self._hinted = tuple(hinted)
        self._num_observed = 0
        self._windows = [0 for _ in hinted]
        self._judged: set[int] = set()

    @property
    def is_done(self) -> bool:
        """Return whether every rank has been compared, or need not be."""
        return len(self._judged) == len(self._hinted) or self._num_observed >= _LAST_WINDOW

    def observe(self, worked: Sequence[bool], speeds: Sequence[float]) -> list[str]:
        """Add a window, and compare the ranks that are measured well enough now.

        Args:
            worked: By rank, whether it had a share of the window.
            speeds: By rank, samples per second alone; 0 where that is not known.

        Returns:
            What to tell of ranks whose part of the speed is off by more than a rough hint explains;
            of each at most once.
        """
        self._num_observed += 1
        self._windows = [n + bool(one) for n, one in zip(self._windows, worked, strict=True)]
        known = [
            rank
            for rank, (windows, speed) in enumerate(zip(self._windows, speeds, strict=True))
            if windows >= _SOLID_WINDOWS and speed > 0
        ]
        if len(known) < 2:
            return []
        found = []
        all_hinted = sum(self._hinted[rank] for rank in known)
        all_measured = sum(speeds[rank] for rank in known)
        for rank in known:
            if rank in self._judged:
                continue
            self._judged.add(rank)
            hinted, measured = self._hinted[rank] / all_hinted, speeds[rank] / all_measured
            if _contradicts(hinted, measured, even=1.0 / len(known)):
                found.append(
                    f"speed_hint gives rank {rank} {hinted:.0%} of the speed of the ranks that "
                    f"were measured, and it has {measured:.0%} ({self._windows[rank]} windows); "
                    "the work follows the measurement. In speed_hint a larger number means "
                    "a faster rank; DdpConfig().with_speed_hint(slow_rank, ratio) says how slow "
                    "one is"
                )
        return found


def _contradicts(hinted: float, measured: float, *, even: float) -> bool:
    is_further_from_even = (measured < hinted < even) or (measured > hinted > even)
    factor = _FACTOR_OF_SMALL_SHARES if is_further_from_even else _FACTOR
    return max(hinted, measured) >= factor * min(hinted, measured)
