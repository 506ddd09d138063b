"""The loss scale of fp16: the team's, and between averages a rank's own."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from evener.planning.report import Report

FIRST_SCALE: Final = 2.0**16
SMALLEST_SCALE: Final = 1.0
LARGEST_SCALE: Final = 2.0**24
GROWTH_INTERVAL: Final = 2000
"""Optimizer steps in a row without overflow after which the scale is doubled, as torch does it."""


class LossScale:
    """Keeps gradients of fp16 ranks within the range of fp16.

    Losses are multiplied by a power of two before backward. All ranks use the same one, whatever
    their own precision, and undo it in the multiplication that divides by the weight: the average
    is right for any mixture. An overflow on one rank is reported in the round that closes the
    window; then every rank leaves the window out and halves the scale. No rank decides by itself,
    so nothing has to be exchanged.

    In windows of local steps a rank does decide for itself until the next average: a step that
    overflows is skipped, and the next one is made at half the scale, so that no more than that step
    is lost. With each average the ranks that compute in fp16 take the smallest scale of any of
    them. Ranks of another precision have none, as no gradients are added up.

    Args:
        fp16_ranks: Those whose gradients may overflow; without any, the scale is 1 for good.
        rank: This rank, if it makes local steps.

    Attributes:
        fp16_ranks: As given.
        is_used: Whether a rank computes in fp16.
        value: The scale that ranks have agreed on, a power of two.
        good_steps: Optimizer steps of the team without overflow since the scale was changed.
        own: The scale of this rank's next local step; 0 if it computes in another precision.
    """

    def __init__(self, fp16_ranks: Iterable[int], rank: int) -> None:
        self.is_used, self.value, self.good_steps = False, 1.0, 0
        self.learn_ranks(fp16_ranks, rank)
        self.reset()

    def learn_ranks(self, fp16_ranks: Iterable[int], rank: int) -> None:
        """Learn which ranks compute in fp16, as members have joined or were lost, and its own."""
        self.fp16_ranks, self._rank = frozenset(fp16_ranks), rank
        was_used, self.is_used = self.is_used, bool(self.fp16_ranks)
        if self.is_used != was_used:
            self.value = FIRST_SCALE if self.is_used else 1.0

    @property
    def can_shrink(self) -> bool:
        """Return whether a smaller scale is left to try."""
        return self.value > SMALLEST_SCALE

    def may_shrink(self, rank: int) -> bool:
        """Return whether a non-finite value on a rank may be an overflow at this scale."""
        return self.of(rank) > SMALLEST_SCALE

    def of(self, rank: int) -> float:
        """Return the scale that was agreed on; 0 for a rank of another precision."""
        return self.value if rank in self.fp16_ranks else 0.0

    def update(self, *, overflowed: bool) -> None:
        """Learn from a window that had weight; every rank calls it with the same argument."""
        if self.is_used:
            half = max(self.value / 2, SMALLEST_SCALE)
            self._learn(1, half if overflowed else None)

    def reset(self) -> None:
        """Continue with what the team has agreed on, in this rank's local steps."""
        self.own = self.of(self._rank)

    def shrink(self) -> bool:
        """Learn of a local step that was not finite; return whether a smaller scale was left."""
        if self.own <= SMALLEST_SCALE:
            return False
        self.own = max(self.own / 2, SMALLEST_SCALE)
        return True

    def agree(self, reports: Sequence[Report]) -> None:
        """Learn from a window of local steps; every rank calls it with the same reports.

        The smallest of the ranks' own scales becomes the team's. A local step since the snapshot
        may have needed less: this rank's own scale is then below that which was agreed on before.
        """
        before = self.value
        scales = [report.loss_scale for report in reports if report.loss_scale]
        if scales:
            good = sum(report.steps - report.skipped for report in reports)
            overflowed = any(report.overflows for report in reports)
            self._learn(good, min(scales) if overflowed else None)
        if self.own:
            self.own = min(self.own, self.value) if self.own < before else self.value

    def state_dict(self) -> dict[str, Any]:
        """Return the scale as plain JSON types."""
        return {"value": self.value, "good_steps": self.good_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``, if this team needs a scale and that of ``state`` did, too."""
        if self.is_used and state.get("value", 0.0) > 1.0:
            self.value = float(state["value"])
            self.good_steps = int(state["good_steps"])

    def _learn(self, good_steps: int, smaller: float | None) -> None:
        """Count steps without overflow, and change the scale; ``smaller`` after an overflow."""
        self.good_steps += good_steps
        if smaller is None and self.good_steps < GROWTH_INTERVAL:
            return
        self.value = min(self.value * 2, LARGEST_SCALE) if smaller is None else smaller
        self.good_steps = 0
