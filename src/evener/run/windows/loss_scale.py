"""The loss scale of fp16, which belongs to the team."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from evener.cadence.plan import WindowReport
from evener.errors import NonFiniteGradientError

FIRST_SCALE: Final = 2.0**16
SMALLEST_SCALE: Final = 1.0
LARGEST_SCALE: Final = 2.0**24
GROWTH_INTERVAL: Final = 2000
"""Windows in a row without overflow after which the scale is doubled; as torch's GradScaler."""


class LossScale:
    """Keeps gradients of fp16 ranks within the range of fp16, the same way on every rank.

    Losses are multiplied by a power of two before backward. All ranks use the same one, whatever
    their own precision, and undo it in the multiplication that divides by the weight: the average
    is right for any mixture. An overflow on one rank is reported in the meeting that closes the
    window; then every rank leaves the window out and halves the scale. No rank decides by itself,
    so nothing has to be exchanged.

    Args:
        fp16_ranks: Those whose gradients may overflow; without any, the scale is 1 for good.

    Attributes:
        value: The scale, a power of two.
        good_windows: Windows without overflow since the scale was changed.
    """

    def __init__(self, fp16_ranks: Iterable[int]) -> None:
        self.fp16_ranks = frozenset(fp16_ranks)
        self.value = FIRST_SCALE if self.fp16_ranks else 1.0
        self.good_windows = 0

    @property
    def is_used(self) -> bool:
        """Whether a rank computes in fp16."""
        return bool(self.fp16_ranks)

    @property
    def can_shrink(self) -> bool:
        """Whether a smaller scale is left to try."""
        return self.value > SMALLEST_SCALE

    def explains(self, reports: Sequence[WindowReport]) -> bool:
        """Whether all that is not finite may be an overflow of fp16, and less scale may help."""
        bad = {rank for rank, report in enumerate(reports) if report.non_finite}
        return self.can_shrink and bad <= self.fp16_ranks

    def update(self, *, overflowed: bool) -> None:
        """Learns from a window that had weight; every rank calls it with the same argument."""
        if not self.is_used:
            return
        self.good_windows += 1
        if overflowed:
            self.value = max(self.value / 2, SMALLEST_SCALE)
            self.good_windows = 0
        elif self.good_windows == GROWTH_INTERVAL:
            self.value = min(self.value * 2, LARGEST_SCALE)
            self.good_windows = 0

    def exhausted(self, error: NonFiniteGradientError) -> NonFiniteGradientError:
        """The error of a window that overflows at the smallest scale, with the remedy for it."""
        if error.rank not in self.fp16_ranks or self.can_shrink:
            return error
        return NonFiniteGradientError(
            f"{error}. The loss scale of fp16 is down to {self.value:g}, so it is no passing "
            f"overflow: use precision='bf16' or 'fp32' on rank {error.rank} if the others are fine",
            rank=error.rank,
            parameter=error.parameter,
            window=error.window,
        )

    def state_dict(self) -> dict[str, Any]:
        """The scale as plain JSON types."""
        return {"value": self.value, "good_windows": self.good_windows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from ``state``, where this team needs a scale and that of ``state`` did, too."""
        if not self.is_used or not state.get("value", 0.0) > 1.0:
            return
        self.value = float(state["value"])
        self.good_windows = int(state["good_windows"])
