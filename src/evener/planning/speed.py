"""How long a share takes on one rank.

That is ``window_s + fixed_s * micro_batches + per_sample_s * samples``.

``window_s`` is the optimizer's update, which is timed by itself: every rank makes it in every
window, also one without samples. Measured seconds are compute only, never a wait for others. At
one size of micro-batch the other two parts cannot be told apart, and need not: all of it is then
put on the samples, which predicts exactly at that size. Where sizes differ anyway, the fixed part
is fitted.

Noise on real machines is one-sided and heavy-tailed, so everything here rests on medians: a single
disturbed window moves nothing, a lasting change is recognised by three surprises in a row. A window
in less than half the time makes old ones be forgotten at once. Pure: times come in as numbers.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate, combinations
from statistics import median, median_low
from typing import Any, NamedTuple

from evener.errors import CheckpointError, ConfigError

_MEMORY = 15
"""Windows remembered. More make a steadier estimate; a lasting change does not wait for them."""

_SURPRISE = 1.3
"""Factor between measured and predicted time that counts as a surprise."""

_SURPRISES_IN_A_ROW = 3
"""So many to the same side are a change of speed, not noise; earlier windows are forgotten."""

_CLEARLY_FASTER = 2.0
"""Times faster than predicted that need no repetition: noise makes windows slower, not faster."""

_LEAST_SLOPE = 0.01
"""Least part of a measured time that grows with the samples: a rank is never free of charge."""

_LEAST_NOISE = 0.02
"""Relative noise of a time that is assumed even where measurements agree better by chance."""

_LEAST_SPREAD = 1.25
"""Windows tell the fixed cost only if their micro-batches per sample differ by this factor."""

USUAL_FIXED = 0.1
"""Part of a micro-batch's time that is usually fixed; what windows show is weighed against it."""

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

    def samples_per_s(self, samples: int, micro_batch_size: int | None) -> float:
        """Return the speed at ``samples`` in micro-batches of at most ``micro_batch_size``."""
        return samples / self.seconds(samples, micro_batch_size)

    def scaled(self, factor: float) -> "CostModel":
        """Return the cost of a rank that takes ``factor`` times as long."""
        return CostModel(self.fixed_s * factor, self.per_sample_s * factor, self.window_s * factor)


def num_micro_batches(samples: int, micro_batch_size: int | None) -> int:
    """Return the micro-batches in which ``samples`` are computed: as few as fit."""
    return -(-samples // (micro_batch_size or samples or 1))


class _Observation(NamedTuple):
    samples: int
    micro_batches: int
    seconds: float


class SpeedModel:
    """The known speed of one member.

    Nothing at first; then a hint (relative to other ranks only), and the windows that it computed.
    A hint is ignored once a window was measured.

    Attributes:
        hinted: The cost of a hint, in its arbitrary unit, if one was given.
    """

    def __init__(self) -> None:
        self.hinted: CostModel | None = None
        self._recent: list[_Observation] = []
        self._surprises = 0
        self._cost: CostModel | None = None  # without updates
        self._updates_s: list[float] = []

    @property
    def is_known(self) -> bool:
        """Return whether anything is known: a hint or an observation."""
        return (self._cost or self.hinted) is not None

    @property
    def is_measured(self) -> bool:
        """Return whether ``cost`` is in seconds; after a hint alone its unit is arbitrary."""
        return self._cost is not None

    @property
    def is_settled(self) -> bool:
        """Return whether enough windows were measured that a disturbed one has no influence."""
        return len(self._recent) >= _SURPRISES_IN_A_ROW

    @property
    def relative_error(self) -> float:
        """Return the standard error of the cost, as a part of it; 0 where little is known."""
        if self._cost is None:
            return 0.0
        fixed_s, per_sample_s, _ = self._cost
        return relative_error(
            [s / (fixed_s * batches + per_sample_s * n) for n, batches, s in self._recent]
        )

    @property
    def cost(self) -> CostModel:
        """Return the present estimate.

        Raises:
            ConfigError: Nothing is known; ask ``is_known`` before.
        """
        if self._cost is not None:
            return self._cost._replace(window_s=self.update_s)
        if self.hinted is None:
            raise ConfigError("the speed of this rank is not known: measure it or give a hint")
        return self.hinted

    @property
    def update_s(self) -> float:
        """Return the usual seconds of the optimizer's update; 0 before the first."""
        return median_low(self._updates_s) if self._updates_s else 0.0

    def hint(self, relative_speed: float) -> None:
        """Set the speed of this rank until something is measured.

        Args:
            relative_speed: Speed against that of the other ranks, in any unit; larger is faster.

        Raises:
            ConfigError: The speed is not finite or not above 0.
        """
        if not math.isfinite(relative_speed) or relative_speed <= 0.0:
            raise ConfigError(
                f"speed_hint holds {relative_speed}; speeds are finite numbers above 0, such as "
                "1.0 for one rank and 0.5 for another that takes twice as long"
            )
        self.hinted = CostModel(0.0, 1.0 / relative_speed)

    def observe(self, samples: int, micro_batches: int, compute_s: float) -> None:
        """Learn from a window.

        Args:
            samples: Samples computed; a window without any is ignored, as it tells nothing.
            micro_batches: Micro-batches they were computed in.
            compute_s: Seconds of compute, without waiting for others.
        """
        if samples <= 0 or micro_batches <= 0 or not _LEAST_SECONDS <= compute_s < math.inf:
            return
        observation = _Observation(samples, micro_batches, compute_s)
        if self._cost is not None:
            self._count_surprise(self._unexpected(observation, self._cost))
        self._recent = [*self._recent[-_MEMORY + 1 :], observation]
        if abs(self._surprises) >= _SURPRISES_IN_A_ROW:
            self._recent = self._recent[-_SURPRISES_IN_A_ROW:]
            self._surprises = 0
        self._cost = _fitted(self._recent)

    def observe_update(self, update_s: float) -> None:
        """Learn from the update of a window; 0 if none was made."""
        if 0.0 < update_s < math.inf:
            self._updates_s = [*self._updates_s[-_MEMORY + 1 :], update_s]

    def state_dict(self) -> dict[str, Any]:
        """Return what was measured, as plain JSON types; a hint is not part of it."""
        return {
            "recent": [list(one) for one in self._recent],
            "surprises": self._surprises,
            "updates_s": list(self._updates_s),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``.

        Raises:
            CheckpointError: The state is damaged.
        """
        try:
            surprises = int(state["surprises"])
            recent = [_Observation(int(n), int(k), float(t)) for n, k, t in state["recent"]]
            if not all(
                min(one.samples, one.micro_batches) > 0 and _LEAST_SECONDS <= one.seconds < math.inf
                for one in recent
            ):
                raise ValueError(f"recent={state['recent']}")
            updates_s = [float(t) for t in state.get("updates_s", [])]
            if not all(0.0 < update_s < math.inf for update_s in updates_s):
                raise ValueError(f"{updates_s=}")
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise CheckpointError(
                f"the checkpoint's speed model is damaged ({error!r}): resume from an older "
                "checkpoint"
            ) from error
        self._recent, self._surprises, self._updates_s = recent, surprises, updates_s
        self._cost = _fitted(recent) if recent else None

    def _unexpected(self, observation: _Observation, cost: CostModel) -> float:
        """Return measured over predicted time, without what another micro-batch size explains.

        How much of the cost is fixed is not known before sizes have differed: any time between that
        by the estimate and that by a cost which is all fixed is then to be expected.
        """
        samples, micro_batches, seconds = observation
        by_estimate = cost.fixed_s * micro_batches + cost.per_sample_s * samples
        if 1.0 / _SURPRISE <= seconds / by_estimate <= _SURPRISE:
            return 1.0
        if_fixed = micro_batches * median(one.seconds / one.micro_batches for one in self._recent)
        least, most = sorted((by_estimate, if_fixed))
        return seconds / min(max(seconds, least), most)

    def _count_surprise(self, ratio: float) -> None:
        """Count how often in a row ``ratio``, measured over predicted, is off to one side."""
        if ratio < 1.0 / _CLEARLY_FASTER:
            self._surprises = -_SURPRISES_IN_A_ROW
        elif ratio > _SURPRISE:
            self._surprises = max(self._surprises, 0) + 1
        elif ratio < 1.0 / _SURPRISE:
            self._surprises = min(self._surprises, 0) - 1
        else:
            self._surprises = 0


def relative_error(times: Sequence[float]) -> float:
    """Return the standard error of the median of some times, as a part of it; 0 below two."""
    middle = median(times) if len(times) > 1 else 0.0
    if middle <= 0.0:
        return 0.0
    spread = 1.48 * median(abs(time - middle) for time in times)  # as a standard deviation
    return 1.25 * spread / math.sqrt(len(times)) / middle


def _fitted(windows: Sequence[_Observation]) -> CostModel:
    """Return the cost that explains the windows best, of which there is one at least."""
    points = [(batches / samples, seconds / samples) for samples, batches, seconds in windows]
    # The lower median: where two values share the middle, the disturbed one is the larger.
    usual_s = median_low([y for _, y in points])
    batches_a_sample = [x for x, _ in points]
    if len(points) < 4 or max(batches_a_sample) < _LEAST_SPREAD * min(batches_a_sample):
        return CostModel(0.0, usual_s)
    fixed_s = _fixed_s(sorted(points))
    per_sample_s = median_low([y - fixed_s * x for x, y in points])
    return CostModel(fixed_s, max(per_sample_s, _LEAST_SLOPE * usual_s))


def _fixed_s(points: Sequence[tuple[float, float]]) -> float:
    """Return the fixed cost of a micro-batch, as windows of unlike sizes show it; points in order.

    A sample took ``y = fixed_s * x + per_sample_s`` seconds, with ``x`` micro-batches
    per sample. The slope is the median over all pairs (Theil and Sen), each with the weight of
    its distance: sizes that hardly differ say hardly anything. It is believed as far as noise
    allows: its weight against 0 is that of two normal estimates, by their variances.
    """
    slopes = [
        ((right[1] - left[1]) / (right[0] - left[0]), right[0] - left[0])
        for left, right in combinations(points, 2)
        if right[0] > left[0]
    ]
    middle_x = median(x for x, _ in points)
    middle_y = median(y for _, y in points)
    largest = (1.0 - _LEAST_SLOPE) * median(y / x for x, y in points)
    slope = min(max(_weighted_median(slopes), 0.0), largest)
    rests = [y - slope * x for x, y in points]
    rest = median(rests)
    noise = max(1.48 * median(abs(y - rest) for y in rests), _LEAST_NOISE * middle_y)
    spread = math.sqrt(math.fsum((x - middle_x) ** 2 for x, _ in points))
    slope_error = 1.25 * noise / spread
    usual_error = USUAL_FIXED * middle_y / middle_x
    return slope * usual_error**2 / (usual_error**2 + slope_error**2)


def _weighted_median(values: Sequence[tuple[float, float]]) -> float:
    """Return the lower median of ``(value, weight)`` pairs, at least one, of positive weights."""
    ordered = sorted(values)
    reached = list(accumulate(weight for _, weight in ordered))
    return ordered[bisect_left(reached, 0.5 * reached[-1])][0]
