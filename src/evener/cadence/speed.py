"""How long a share takes on one rank: ``fixed_s * micro_batches + per_sample_s * samples``.

A probe before the first window gives the line; windows then correct it. Measured seconds are
compute only, never a wait for others. Noise on real machines is one-sided and heavy-tailed, so
everything here rests on medians: a single disturbed window moves nothing, a lasting change is
recognised by three surprises in a row. A window in less than half the time makes old ones and the
probe be forgotten at once. Pure: times come in as numbers.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median, median_low
from typing import Any

from evener.errors import CheckpointError, ConfigError

_MEMORY = 15
"""Windows remembered. More make a steadier estimate; a lasting change does not wait for them."""

_SURPRISE = 1.3
"""Factor between measured and predicted time that counts as a surprise."""

_SURPRISES_IN_A_ROW = 3
"""So many to the same side are a change of speed, not noise; what was before is forgotten."""

_CLEARLY_FASTER = 2.0
"""Times faster than predicted that need no repetition: noise makes windows slower, not faster."""

_PROBE_VOTES = 2
"""Observations that the probe counts as, so that a slow first window does not set the speed."""

_LEAST_SLOPE = 0.01
"""Least part of a measured time that grows with the samples: a rank is never free of charge."""

_LEAST_NOISE = 0.02
"""Relative noise of a time that is assumed even where measurements agree better by chance."""

_LEAST_SPREAD = 1.25
"""Windows tell the fixed cost only if their micro-batches per sample differ by this factor."""

_LEAST_SECONDS = 1e-9
"""Anything shorter was not measured: the clock did not move."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """Predicted seconds of compute on one rank.

    Attributes:
        fixed_s: Seconds for each micro-batch, whatever its size.
        per_sample_s: Seconds for each sample, above 0.
    """

    fixed_s: float
    per_sample_s: float

    def seconds(self, samples: int, micro_batch_size: int | None) -> float:
        """Seconds for ``samples`` in micro-batches of at most ``micro_batch_size``.

        Args:
            samples: Whole samples; 0 costs nothing.
            micro_batch_size: Most samples in one forward and backward; ``None`` for all in one.
        """
        return self.fixed_s * num_micro_batches(samples, micro_batch_size) + (
            self.per_sample_s * samples
        )

    def samples_per_s(self, samples: int, micro_batch_size: int | None) -> float:
        """Speed at ``samples`` in micro-batches of at most ``micro_batch_size``."""
        return samples / self.seconds(samples, micro_batch_size)

    def scaled(self, factor: float) -> "CostModel":
        """The cost of a rank that takes ``factor`` times as long."""
        return CostModel(self.fixed_s * factor, self.per_sample_s * factor)


def num_micro_batches(samples: int, micro_batch_size: int | None) -> int:
    """Micro-batches that ``samples`` are computed in: as few as fit."""
    if micro_batch_size is None:
        return min(samples, 1)
    return -(-samples // micro_batch_size)


@dataclass(frozen=True, slots=True)
class _Observation:
    samples: int
    micro_batches: int
    seconds: float

    def predicted(self, cost: CostModel) -> float:
        return cost.fixed_s * self.micro_batches + cost.per_sample_s * self.samples


class SpeedModel:
    """What is known of the speed of one member.

    Nothing at first; then a hint (relative to other ranks only), a probe (two measured sizes), and
    the windows that it computed.
    """

    def __init__(self) -> None:
        self._prior: CostModel | None = None
        self._probed = False
        self._votes = 0
        self._recent: list[_Observation] = []
        self._surprises = 0
        self._cost: CostModel | None = None
        # Fitted when the cost is asked for: a rank that trains alone hardly ever is.
        self._pending: deque[_Observation] = deque(maxlen=2 * _MEMORY)

    @property
    def is_known(self) -> bool:
        """Whether anything is known: a hint, a probe or an observation."""
        return bool(self._pending) or self._cost is not None

    @property
    def is_measured(self) -> bool:
        """Whether ``cost`` is in seconds; after a hint alone its unit is arbitrary."""
        return self._probed or bool(self._recent) or bool(self._pending)

    @property
    def cost(self) -> CostModel:
        """The present estimate.

        Raises:
            ConfigError: Nothing is known; ask ``is_known`` before.
        """
        self._fit()
        if self._cost is None:
            raise ConfigError("the speed of this rank is not known: probe it or give a speed_hint")
        return self._cost

    @property
    def hinted(self) -> CostModel | None:
        """The cost that a hint alone gave, in its arbitrary unit, else ``None``."""
        return None if self._probed else self._prior

    def hint(self, relative_speed: float) -> None:
        """Take the user's word for the speed of this rank, until something is measured.

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
        self._fit()
        if not self._probed:
            self._prior = CostModel(0.0, 1.0 / relative_speed)
            self._refit()

    def probe(self, measurements: Iterable[tuple[int, int, float]]) -> None:
        """Set the line from timed micro-batches that are not applied.

        Of repeats of one size the fastest counts. The line passes exactly through the smallest and
        the largest size, unless noise makes it impossible: it then passes through the largest, with
        neither a negative fixed cost nor samples that cost nothing.

        Args:
            measurements: ``(samples, micro_batches, seconds)``, of at least one size; two, such as
                one sample and a whole micro-batch, tell the fixed cost. Sizes without work or
                without time are left out.
        """
        fastest: dict[tuple[int, int], float] = {}
        for samples, micro_batches, seconds in measurements:
            if samples > 0 and micro_batches > 0 and _LEAST_SECONDS <= seconds < math.inf:
                size = (samples, micro_batches)
                fastest[size] = min(seconds, fastest.get(size, math.inf))
        if not fastest:
            return
        self._fit()
        small, large = (_Observation(*size, fastest[size]) for size in (min(fastest), max(fastest)))
        self._prior = _line_through(small, large)
        self._probed = True
        self._votes = _PROBE_VOTES
        self._refit()

    def observe(self, samples: int, micro_batches: int, compute_s: float) -> None:
        """Learn from a window.

        Args:
            samples: Samples computed; a window without any is ignored, as it tells nothing.
            micro_batches: Micro-batches they were computed in.
            compute_s: Seconds of compute, without waiting for others.
        """
        if samples <= 0 or micro_batches <= 0 or not _LEAST_SECONDS <= compute_s < math.inf:
            return
        self._pending.append(_Observation(samples, micro_batches, compute_s))

    def _fit(self) -> None:
        """Learns from what has been observed since the cost was last asked for."""
        while self._pending:
            observation = self._pending.popleft()
            if self._cost is not None and (self._probed or self._recent):
                self._count_surprise(observation.seconds / observation.predicted(self._cost))
            self._recent = [*self._recent[-_MEMORY + 1 :], observation]
            if abs(self._surprises) >= _SURPRISES_IN_A_ROW:
                self._recent = self._recent[-_SURPRISES_IN_A_ROW:]
                self._surprises = 0
                self._votes = 0
            self._refit()

    def state_dict(self) -> dict[str, Any]:
        """What is known, as plain JSON types."""
        self._fit()
        prior = None
        if self._prior is not None:
            prior = [self._prior.fixed_s, self._prior.per_sample_s]
        return {
            "prior": prior,
            "probed": self._probed,
            "votes": self._votes,
            "recent": [[one.samples, one.micro_batches, one.seconds] for one in self._recent],
            "surprises": self._surprises,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``.

        Raises:
            CheckpointError: The state is damaged.
        """
        try:
            prior = state["prior"]
            loaded = None if prior is None else CostModel(float(prior[0]), float(prior[1]))
            probed, votes = bool(state["probed"]), int(state["votes"])
            surprises = int(state["surprises"])
            recent = [_Observation(int(n), int(k), float(t)) for n, k, t in state["recent"]]
            if not all(
                min(one.samples, one.micro_batches) > 0 and _LEAST_SECONDS <= one.seconds < math.inf
                for one in recent
            ):
                raise ValueError(f"recent={state['recent']}")
            if loaded is not None and not (loaded.fixed_s >= 0.0 and loaded.per_sample_s > 0.0):
                raise ValueError(f"prior={prior}")
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise CheckpointError(
                f"the checkpoint's speed model is damaged ({error!r}): resume from an older "
                "checkpoint"
            ) from error
        self._prior, self._probed, self._votes = loaded, probed, votes
        self._recent, self._surprises = recent, surprises
        self._pending.clear()
        self._refit()

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

    def _refit(self) -> None:
        """Scale the prior line to what was measured, then correct its shape where that shows."""
        if not self._recent:
            self._cost = self._prior
            return
        shape = CostModel(0.0, 1.0) if self._prior is None else self._prior
        # The lower median: where two values share the middle, the disturbed one is the larger.
        levels = [one.seconds / one.predicted(shape) for one in self._recent]
        scaled = shape.scaled(median_low([1.0] * self._votes + levels))
        self._cost = self._reshaped(shape, scaled)

    def _reshaped(self, shape: CostModel, scaled: CostModel) -> CostModel:
        """Move ``scaled`` towards the fixed cost that the windows show, as far as they show it.

        A sample took ``y = fixed_s * x + per_sample_s`` seconds, with ``x`` micro-batches
        per sample. The slope is the median over pairs half the list apart (Theil's incomplete
        method); its weight against the prior is that of two normal estimates, by their variances.
        """
        points = sorted(
            (one.micro_batches / one.samples, one.seconds / one.samples) for one in self._recent
        )
        num_points = len(points)
        if num_points < 4 or points[-1][0] < _LEAST_SPREAD * points[0][0]:
            return scaled
        half = num_points // 2
        slopes = [
            (right[1] - left[1]) / (right[0] - left[0])
            for left, right in zip(points, points[num_points - half :], strict=False)
            if right[0] > left[0]
        ]
        if not slopes:
            return scaled
        middle_x = median(x for x, _ in points)
        middle_y = median(y for _, y in points)
        largest = (1.0 - _LEAST_SLOPE) * median(y / x for x, y in points)
        slope = min(max(median(slopes), 0.0), largest)
        rests = [y - slope * x for x, y in points]
        rest = median(rests)
        noise = max(1.48 * median(abs(y - rest) for y in rests), _LEAST_NOISE * middle_y)
        spread = math.sqrt(math.fsum((x - middle_x) ** 2 for x, _ in points))
        slope_error = 1.25 * noise / spread
        prior_error = 0.5 * scaled.fixed_s + 0.1 * middle_y / middle_x
        trust = prior_error**2 / (prior_error**2 + slope_error**2)
        fixed_s = trust * slope + (1.0 - trust) * scaled.fixed_s
        # The probe keeps its votes: what it says of the usual window, less the fixed part.
        voted = shape.per_sample_s + (shape.fixed_s - fixed_s) * middle_x
        rest = median_low([voted] * self._votes + [y - fixed_s * x for x, y in points])
        return CostModel(fixed_s, max(rest, _LEAST_SLOPE * middle_y))


def _line_through(small: _Observation, large: _Observation) -> CostModel:
    """The line through two measurements, bent so that neither part of the cost is negative."""
    most = large.seconds / large.samples
    # By Cramer's rule; the determinant is 0 if the sizes differ in nothing but scale.
    determinant = large.samples * small.micro_batches - small.samples * large.micro_batches
    if determinant == 0:
        return CostModel(0.0, most)
    slope = (
        large.seconds * small.micro_batches - small.seconds * large.micro_batches
    ) / determinant
    per_sample_s = min(max(slope, _LEAST_SLOPE * most), most)
    fixed_s = (large.seconds - per_sample_s * large.samples) / large.micro_batches
    return CostModel(max(fixed_s, 0.0), per_sample_s)
