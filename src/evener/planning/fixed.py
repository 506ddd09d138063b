"""Fixed shares: the user gives the same proportions for every window."""

from collections.abc import Sequence
from typing import final

from evener.planning.apportion import apportion
from evener.planning.plan import WindowPlan
from evener.planning.policies import Policy
from evener.planning.shares import without_ones


@final
class FixedShares(Policy):
    """Splits every window in given proportions, whatever is measured.

    Args:
        members: Member ids, by rank.
        ratios: Proportions, by rank; 0 gives a rank nothing to do.
        avoid_ones: Give no rank a micro-batch of one sample where that can be avoided.
    """

    def __init__(
        self, members: Sequence[str], ratios: Sequence[float], *, avoid_ones: bool = False
    ) -> None:
        super().__init__(members)
        self._ratios = tuple(ratios)
        self._avoid_ones = avoid_ones

    def plan(
        self, window: int, epoch: int, start: int, size: int, *, work_for_all: float = 0.0
    ) -> WindowPlan:
        """Plan a window; ``work_for_all`` is ignored: the user has said what each rank does."""
        shares = apportion(size, self._ratios)
        if self._avoid_ones:
            idle = [rank for rank, ratio in enumerate(self._ratios) if not ratio]
            shares = without_ones(shares, self.micro_batch_sizes, idle)
        self._give_reason(window, "partition_ratios set the shares")
        return WindowPlan(window, epoch, start, size, shares)
