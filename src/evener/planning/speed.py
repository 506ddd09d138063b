"""How long a share takes on one rank.

That is ``window_s + fixed_s * micro_batches + per_sample_s * samples``.

``window_s`` is the optimizer's update, which is timed by itself: every rank makes it in every
window, also one without samples. Measured seconds are compute only, never a wait for others. At
one size of micro-batch the other two parts cannot be separated, and need not: all of it is then
put on the samples, which predicts exactly at that size. Where two sizes were seen, the fixed part
is fitted.

Noise on real machines is one-sided and heavy-tailed, so everything here rests on medians: a single
disturbed window moves nothing. A lasting change is recognised by three windows in a row, and
earlier windows are then forgotten. Pure: times come in as numbers.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import median, median_low
from typing import Any, NamedTuple

_MEMORY = 15
"""Windows remembered. More make a steadier estimate; a lasting change does not wait for them."""

_CHANGED = 1.3
"""Factor between measured and predicted time that counts as a change, if it lasts."""

_LASTING = 3
"""Windows in a row after which a change counts as real, not as noise."""

_LEAST_SLOPE = 0.01
"""Least part of a measured time that grows with the samples: a rank is never free of charge."""

_LEAST_SPREAD = 1.25
"""Two sizes differ if their micro-batches per sample differ by this factor."""

_LEAST_SECONDS = 1e-9
"""Anything shorter was not measured: the clock did not move."""


class CostModel(NamedTuple):
    """Predicted seconds of compute on one rank.

    Attributes:
        fixed_s: Seconds for each micro-batch, whatever its size.
        per_sample_s: Seconds for each sample, above 0.
        window_s: Seconds for each window, also without samples.
    """

    fixed_s: float
    per_sample_s: float
    window_s: float = 0.0

    def seconds(self, samples: int, micro_batch_size: int | None) -> float:
        """Return seconds for ``samples`` in micro-batches of at most ``micro_batch_size``.

        Args:
            samples: Whole samples; 0 costs ``window_s``.
            micro_batch_size: Most samples in one forward and backward; ``None`` for all in one.
        """
        micro_batches = num_micro_batches(samples, micro_batch_size)
        return self.window_s + self.fixed_s * micro_batches + self.per_sample_s * samples

    def scaled(self, factor: float) -> "CostModel":
        """Return the cost of a rank that takes ``factor`` times as long."""
        return CostModel(self.fixed_s * factor, self.per_sample_s * factor, self.window_s * factor)


def num_micro_batches(samples: int, micro_batch_size: int | None) -> int:
    """Return the micro-batches in which ``samples`` are computed: as few as fit."""
    return -(-samples // (micro_batch_size or samples or 1))


_Point = tuple[float, float]
"""Of a window without its update, micro-batches per sample and seconds per sample."""


class SpeedModel:
    """The measured speed of one member.

    Attributes:
        cost: The present estimate; ``None`` until a window with samples was measured.
    """

    def __init__(self) -> None:
        self.cost: CostModel | None = None
        self._recent: list[_Point] = []
        self._updates_s: list[float] = []

    @property
    def is_settled(self) -> bool:
        """Return whether enough windows were measured that a disturbed one has no influence."""
        return len(self._recent) >= _LASTING

    @property
    def relative_error(self) -> float:
        """Return the standard error of the cost, as a part of it; 0 where little is known."""
        return 0.0 if self.cost is None else relative_error(_ratios(self._recent, self.cost))

    def observe(
        self, samples: int, micro_batches: int, compute_s: float, update_s: float = 0.0
    ) -> None:
        """Learn from a window; values that show nothing are ignored.

        Args:
            samples: Samples computed, 0 for none.
            micro_batches: Micro-batches they were computed in.
            compute_s: Seconds for them, without waiting for others.
            update_s: Seconds of a whole update of the optimizer; 0 if none was made.
        """
        if 0.0 < update_s < math.inf:
            self._updates_s.append(update_s)
            del self._updates_s[:-_MEMORY]
        if samples > 0 and micro_batches > 0 and _LEAST_SECONDS <= compute_s < math.inf:
            self._recent.append((micro_batches / samples, compute_s / samples))
            if self.cost is not None:
                ratios = _ratios(self._recent[-_LASTING:], self.cost)
                has_changed = min(ratios) > _CHANGED or max(ratios) < 1.0 / _CHANGED
                del self._recent[: -_LASTING if has_changed else -_MEMORY]
        self._fit()

    def state_dict(self) -> dict[str, Any]:
        """Return what was measured, as plain JSON types."""
        return {"recent": [*map(list, self._recent)], "updates_s": list(self._updates_s)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``."""
        self._recent = [(batches, seconds) for batches, seconds in state["recent"]]
        self._updates_s = list(state["updates_s"])
        self._fit()

    def _fit(self) -> None:
        if self._recent:
            update_s = median_low(self._updates_s) if self._updates_s else 0.0
            self.cost = _fitted(self._recent)._replace(window_s=update_s)


def relative_error(times: Sequence[float]) -> float:
    """Return the standard error of the median of some times, as a part of it; 0 below two."""
    middle = median(times) if len(times) > 1 else 0.0
    if middle <= 0.0:
        return 0.0
    spread = 1.48 * median(abs(time - middle) for time in times)  # as a standard deviation
    return 1.25 * spread / math.sqrt(len(times)) / middle


def _ratios(points: Sequence[_Point], cost: CostModel) -> list[float]:
    """Return measured over predicted seconds of each window."""
    return [seconds / (cost.fixed_s * batches + cost.per_sample_s) for batches, seconds in points]


def _fitted(points: Sequence[_Point]) -> CostModel:
    """Return the cost that explains the windows, of which there is one at least.

    A sample takes ``y = fixed_s * x + per_sample_s`` seconds, with ``x`` micro-batches per sample.
    The line goes through the medians of the windows with few and with many micro-batches per
    sample. Lower medians: where two values share the middle, the disturbed one is the larger.
    """
    usual_s = median_low([y for _, y in points])
    least, most = min(points)[0], max(points)[0]
    if most < _LEAST_SPREAD * least:
        return CostModel(0.0, usual_s)
    few = [point for point in points if point[0] <= (least + most) / 2]
    many = [point for point in points if point[0] > (least + most) / 2]
    if min(len(few), len(many)) < 2:
        return CostModel(0.0, usual_s)
    (left, low_s), (right, high_s) = (
        map(median_low, zip(*side, strict=True)) for side in (few, many)
    )
    steepest = (1.0 - _LEAST_SLOPE) * min(low_s / left, high_s / right)
    fixed_s = min(max((high_s - low_s) / (right - left), 0.0), steepest)
    per_sample_s = median_low([y - fixed_s * x for x, y in points])
    return CostModel(fixed_s, max(per_sample_s, _LEAST_SLOPE * usual_s))
