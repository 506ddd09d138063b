"""The loss scale of fp16, which belongs to the team."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, final

from evener.errors import NonFiniteGradientError
from evener.planning.local import LocalReport
from evener.planning.plan import WindowReport

FIRST_SCALE: Final = 2.0**16
SMALLEST_SCALE: Final = 1.0
LARGEST_SCALE: Final = 2.0**24
GROWTH_INTERVAL: Final = 2000
"""Optimizer steps in a row without overflow after which the scale is doubled, as torch does it."""


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
        good_steps: Optimizer steps of the team without overflow since the scale was changed.
    """

    def __init__(self, fp16_ranks: Iterable[int]) -> None:
        self.fp16_ranks = frozenset(fp16_ranks)
        self.value = FIRST_SCALE if self.fp16_ranks else 1.0
        self.good_steps = 0

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
        self.good_steps += 1
        if overflowed:
            self.value = max(self.value / 2, SMALLEST_SCALE)
            self.good_steps = 0
        elif self.good_steps == GROWTH_INTERVAL:
            self.value = min(self.value * 2, LARGEST_SCALE)
            self.good_steps = 0

    def agree(self, reports: Sequence[LocalReport]) -> None:
        """Learns from a window of local steps, in which ranks have kept scales of their own.

        The smallest of them becomes the team's. Every rank calls it with the same reports.
        """
        scales = [report.loss_scale for report in reports if report.loss_scale]
        if not scales:
            return
        if any(report.overflows for report in reports):
            self.value, self.good_steps = min(scales), 0
            return
        self.good_steps += sum(report.steps - report.skipped for report in reports)
        if self.good_steps >= GROWTH_INTERVAL:
            self.value, self.good_steps = min(self.value * 2, LARGEST_SCALE), 0

    def exhausted(
        self, error: NonFiniteGradientError, own: float | None = None
    ) -> NonFiniteGradientError:
        """The error of a window that overflows at the smallest scale, with the remedy for it.

        Args:
            error: What stops the team.
            own: The scale of the rank that it names, where ranks have scales of their own.
        """
        scale = self.value if own is None else own
        if error.rank not in self.fp16_ranks or scale > SMALLEST_SCALE:
            return error
        return NonFiniteGradientError(
            f"{error}. The loss scale of fp16 is down to {scale:g}, so it is no passing "
            f"overflow: use precision='bf16' or 'fp32' on rank {error.rank} if the others are fine",
            rank=error.rank,
            parameter=error.parameter,
            window=error.window,
        )

    def state_dict(self) -> dict[str, Any]:
        """The scale as plain JSON types."""
        return {"value": self.value, "good_steps": self.good_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from ``state``, where this team needs a scale and that of ``state`` did, too."""
        if not self.is_used or not state.get("value", 0.0) > 1.0:
            return
        self.value = float(state["value"])
        self.good_steps = int(state["good_steps"])


@final
class LocalLossScale:
    """The loss scale of one rank's local steps.

    Between two averages a rank decides for itself: a step that overflows is left out and counts
    for nothing, and the next one is made at half the scale, so that no more than that step is lost.
    With each average the ranks that compute in fp16 take the smallest scale of any of them. Ranks
    of another precision have none, as no gradients are added up.

    Args:
        team: The scale that ranks have agreed on.
        rank: This rank.

    Attributes:
        value: The scale of the next step; 0 without fp16.
    """

    def __init__(self, team: LossScale, rank: int) -> None:
        self._team = team
        self.is_used = rank in team.fp16_ranks
        self.value = 0.0
        self._changed = False
        self.reset()

    def reset(self) -> None:
        """Goes on with what the team has agreed on."""
        self.value = self._team.value if self.is_used else 0.0
        self._changed = False

    def shrink(self) -> bool:
        """Learns of a step that was not finite; whether a smaller scale is left to try."""
        if not self.value > SMALLEST_SCALE:
            return False
        self.value = max(self.value / 2, SMALLEST_SCALE)
        self._changed = True
        return True

    def snapshot(self) -> float:
        """The scale to report at the end of a window."""
        self._changed = False
        return self.value

    def agree(self, reports: Sequence[LocalReport]) -> None:
        """Takes over what comes of a window; a step since then may have needed less."""
        own = self.value
        self._team.agree(reports)
        if self.is_used:
            self.value = min(own, self._team.value) if self._changed else self._team.value
