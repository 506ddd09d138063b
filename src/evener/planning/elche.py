"""El Che: the number of local batches of each rank between two averagings. Pure.

The slowest rank computes ``anchor`` batches, and a faster rank as many as it can in the same time.
The rules and their constants are those of floDl 0.5, with two differences: the slowest rank gets
the anchor regardless of the dead zone and the limit of a change, and no count changes by less than
rounding explains.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from numbers import Integral
from typing import Any, Self, final

from evener.errors import CheckpointError, ConfigError

_LEAST_GAIN, _MOST_GAIN = 0.1, 0.8
"""Least and largest gain of a new timing; it grows with the difference from the known one."""

_DEAD_ZONE = 0.10
"""A count changes only by more than this fraction of itself."""

_BEYOND_ROUNDING = 0.75
"""And only if it is wrong by more than rounding explains: otherwise small counts, of which one
batch is more than the dead zone, would oscillate with noise."""

ANCHOR = 10
"""The default anchor at the start of a run."""

MAX_ANCHOR = 200
"""The default largest anchor, unless a run starts from a larger one."""

LEAST_OVERHEAD, MOST_OVERHEAD = 0.01, 0.50
"""The limits of ``overhead_target``."""

_SAME_MS = 1e-6
"""Ranks whose batches take equally long up to this many milliseconds are equally slow."""

_MOST_BATCHES = 2.0**53
"""Most batches of a rank, so that counts stay finite with any timing."""


@final
class ElChe:
    """Counts of local batches by rank, and the anchor that sets how rarely ranks average.

    Each report moves a rank's milliseconds per batch towards the measured ones (an exponential mean
    whose gain is their relative difference, within 0.1 to 0.8). The anchor grows as soon as
    averaging takes more than ``overhead_target`` of the time, in one step to where it would not; it
    shrinks by one per report while averaging takes less than half of that, but not below its
    initial value. The slowest rank always gets the anchor; another rank's count changes if it is
    wrong by more than 10 %.

    Args:
        world_size: Number of ranks, 1 or more.
        anchor: Batches of the slowest rank in a window, 1 or more; also the least anchor.

    Attributes:
        anchor: Batches of the slowest rank.
        has_speed_hint: Whether speeds were given by hand.
        overhead_target: Fraction of the time that averaging may take.

    Raises:
        ConfigError: A number is out of range.

    Example:
        >>> cadence = ElChe(world_size=2, anchor=10).with_speed_ratio(slow_rank=1, ratio=2.3)
        >>> cadence.batch_counts
        (23, 10)
        >>> cadence.report_timing([1000.0, 1000.0], cadence.batch_counts, sync_ms=20.0)
        >>> round(cadence.ms_per_batch[1])
        100
    """

    def __init__(self, world_size: int, anchor: int) -> None:
        _check_whole("world_size", world_size, least=1)
        _check_whole("anchor", anchor, least=1)
        self._world_size = world_size
        self.anchor = anchor
        self._min_anchor = anchor
        self._max_anchor = max(MAX_ANCHOR, anchor)
        self.overhead_target = 0.10
        self._max_batch_diff: int | None = None
        self._counts = [anchor] * world_size
        self._ms = [0.0] * world_size
        self.has_speed_hint = False

    def __repr__(self) -> str:
        return f"<ElChe: batches {self.batch_counts}, anchor {self.anchor}>"

    # ── settings ─────────────────────────────────────────────────────────────────────────────────

    def with_speed_ratio(self, slow_rank: int, ratio: float) -> Self:
        """Set how much slower one rank is, until it is measured.

        Args:
            slow_rank: The slow rank; it gets the anchor.
            ratio: Batches of another rank in the time of one batch of this one; 1 or more.

        Returns:
            This object.

        Raises:
            ConfigError: There is no such rank, or the ratio is below 1.
        """
        _check("slow_rank", slow_rank, least=0, most=self._world_size - 1)
        _check("ratio", ratio, least=1.0)  # for a fast rank, name another one as the slow one
        ratios = [1.0 if r == slow_rank else ratio for r in range(self._world_size)]
        return self.with_speeds(ratios)

    def with_speeds(self, speeds: Sequence[float]) -> Self:
        """Set the relative speeds of all ranks, until they are measured.

        Args:
            speeds: One per rank, above 0, in any unit.

        Returns:
            This object.

        Raises:
            ConfigError: Not one finite speed above 0 for each rank.
        """
        self._check_each("speeds", speeds)
        if not all(speeds):
            raise ConfigError(f"speeds is {list(speeds)}; give numbers above 0")
        least = min(speeds)
        self._counts = [max(1, _round(self.anchor * s / least)) for s in speeds]
        self.has_speed_hint = True
        return self

    def with_overhead_target(self, target: float) -> Self:
        """Set the fraction of the time that averaging may take, 0.10 by default.

        Args:
            target: From 0.01 to 0.50.

        Returns:
            This object.

        Raises:
            ConfigError: It is not within these limits.
        """
        _check("overhead_target", target, least=LEAST_OVERHEAD, most=MOST_OVERHEAD)
        self.overhead_target = target
        return self

    def with_max_anchor(self, max_anchor: int) -> Self:
        """Set the largest anchor, 200 by default.

        Args:
            max_anchor: A larger present anchor is reduced to it. With 0 the present anchor is the
                largest.

        Returns:
            This object.

        Raises:
            ConfigError: It is below 0.
        """
        _check_whole("max_anchor", max_anchor, least=0)
        max_anchor = max_anchor or self.anchor
        self._max_anchor = max_anchor
        if self.anchor > max_anchor:
            counts = [max(1, _round(c * max_anchor / self.anchor)) for c in self._counts]
            self.anchor, self._counts = max_anchor, counts
        self._min_anchor = min(self._min_anchor, max_anchor)
        return self

    def with_max_batch_diff(self, max_batch_diff: int | None) -> Self:
        """Set the largest change of a count at one report; ``None``, the default, sets no limit.

        Returns:
            This object.

        Raises:
            ConfigError: It is below 0.
        """
        if max_batch_diff is not None:
            _check_whole("max_batch_diff", max_batch_diff, least=0)
        self._max_batch_diff = max_batch_diff
        return self

    # ── what to do ───────────────────────────────────────────────────────────────────────────────

    def batches(self, rank: int) -> int:
        """Return the batches of ``rank`` until the next averaging, 1 or more.

        Raises:
            ConfigError: There is no such rank.
        """
        _check("rank", rank, least=0, most=self._world_size - 1)
        return self._counts[rank]

    @property
    def batch_counts(self) -> tuple[int, ...]:
        """Return the batches until the next averaging, by rank."""
        return tuple(self._counts)

    @property
    def total_batches(self) -> int:
        """Return the batches until the next averaging, over all ranks."""
        return sum(self._counts)

    @property
    def is_calibrated(self) -> bool:
        """Return whether there was a report."""
        return any(self._ms)

    @property
    def anchor_wall_ms(self) -> float:
        """Return the milliseconds of the slowest rank's batches; 0 before the first report."""
        return self.anchor * max(self._ms)

    @property
    def ms_per_batch(self) -> tuple[float, ...]:
        """Return the milliseconds of a batch, by rank; 0 if none was timed."""
        return tuple(self._ms)

    def clamp_total(self, n: int) -> tuple[int, ...]:
        """Return the counts, scaled down if they sum to more than ``n``; the object is not changed.

        Call it before every window with the remaining batches of the epoch: before its last window
        the counts are unchanged. In the last window, each rank keeps its proportion, rounded down
        but at least 1; a remainder goes to the low ranks, and an excess is taken from the largest
        counts.

        Args:
            n: Most batches over all ranks, 0 or more.

        Returns:
            Counts by rank that sum to ``n``, or to ``total_batches`` if that is less. With fewer
            batches than ranks the first ``n`` ranks get one each, the others none.

        Raises:
            ConfigError: ``n`` is negative.
        """
        _check("n", n, least=0)
        total = self.total_batches
        if total <= n:
            return self.batch_counts
        if n < self._world_size:
            return tuple(int(rank < n) for rank in range(self._world_size))
        shares = [max(1, count * n // total) for count in self._counts]
        left = n - sum(shares)
        for rank in range(max(0, left)):
            shares[rank] += 1
        for _ in range(-left):
            shares[shares.index(max(shares))] -= 1
        return tuple(shares)

    # ── reports ──────────────────────────────────────────────────────────────────────────────────

    def report_timing(
        self, wall_ms: Sequence[float], actual_batches: Sequence[int], sync_ms: float
    ) -> None:
        """Learn from a window.

        Args:
            wall_ms: Milliseconds that each rank was busy with its batches, without any wait.
            actual_batches: Batches that each rank has computed; with 0 its timing is unchanged.
            sync_ms: Milliseconds that the averaging took; with 0 the anchor is unchanged.

        Raises:
            ConfigError: Not one number for each rank, a negative or infinite one, or no batch at
                all.
        """
        self._check_each("wall_ms", wall_ms)
        self._check_each("actual_batches", actual_batches)
        _check("sync_ms", sync_ms, least=0.0)
        if not any(actual_batches):
            raise ConfigError("no rank computed a batch; report only windows with work")
        is_first = not self.is_calibrated
        for rank, (wall, batches) in enumerate(zip(wall_ms, actual_batches, strict=True)):
            if batches and wall > 0:
                self._ms[rank] = self._smoothed(self._ms[rank], wall / batches)
        if self.is_calibrated:
            self._tune_anchor(max(wall_ms), sync_ms)
            self._recount(is_first=is_first)

    def forget(self, ranks: Collection[int]) -> None:
        """Forget the speeds of some ranks, such as those that have left."""
        self._ms = [0.0 if rank in ranks else ms for rank, ms in enumerate(self._ms)]
        if self.is_calibrated:
            self._recount()

    def nudge_anchor_down(self, factor: float) -> None:
        """Average more often, for example if ranks diverge.

        Before the first report, the counts stay those of the hint, or of the first anchor: the
        smaller anchor has an effect from that report on.

        Args:
            factor: The anchor is multiplied by it and rounded up, to at least 1, also below its
                initial value. It is limited to 0.1 to 1.
        """
        part = min(max(factor, 0.1), 1.0)
        self.anchor = min(self.anchor, max(1, math.ceil(self.anchor * part)))
        if self.is_calibrated:
            self._recount()

    def _smoothed(self, known: float, new: float) -> float:
        if known <= 0:
            return new
        gain = min(max(abs(new - known) / known, _LEAST_GAIN), _MOST_GAIN)
        return gain * new + (1.0 - gain) * known

    def _tune_anchor(self, longest_ms: float, sync_ms: float) -> None:
        if longest_ms <= 0 or sync_ms <= 0:
            return
        overhead = sync_ms / longest_ms
        if overhead > self.overhead_target:
            wanted = math.ceil(self.anchor * min(overhead / self.overhead_target, 1e9))
            self.anchor = min(max(wanted, self._min_anchor), self._max_anchor)
        elif overhead < self.overhead_target / 2 and self.anchor > self._min_anchor:
            self.anchor -= 1

    def _recount(self, *, is_first: bool = False) -> None:
        slow_ms = max(self._ms)
        for rank, (ms, count) in enumerate(zip(self._ms, self._counts, strict=True)):
            if abs(ms - slow_ms) < _SAME_MS:
                self._counts[rank] = self.anchor
                continue
            exact = self.anchor * slow_ms / (ms or slow_ms)
            target = max(1, _round(exact))
            if not is_first:
                is_near = abs(target - count) <= _DEAD_ZONE * count
                if is_near or abs(exact - count) <= _BEYOND_ROUNDING:
                    continue
                limit = math.inf if self._max_batch_diff is None else self._max_batch_diff
                target = int(max(1, min(max(target, count - limit), count + limit)))
            self._counts[rank] = target

    # ── state ────────────────────────────────────────────────────────────────────────────────────

    def state_dict(self) -> dict[str, Any]:
        """Return what was learnt, as plain JSON types."""
        return {
            "anchor": self.anchor,
            "counts": list(self._counts),
            "ms": list(self._ms),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``.

        Raises:
            CheckpointError: It is for another number of ranks.
        """
        counts, ms = list(state["counts"]), list(state["ms"])
        if len(counts) != self._world_size:
            raise CheckpointError(
                f"the checkpoint has {len(counts)} counts for {self._world_size} ranks; resume "
                f"with {len(counts)} ranks, or start with a new cadence"
            )
        self.anchor = min(state["anchor"], self._max_anchor)
        self._counts, self._ms = counts, ms

    def _check_each(self, name: str, values: Sequence[float]) -> None:
        """Check that there is a finite number of 0 or more for each rank."""
        if len(values) != self._world_size or not all(0 <= value < math.inf for value in values):
            raise ConfigError(
                f"{name} is {list(values)} for {self._world_size} ranks; give one finite number of "
                "0 or more per rank"
            )


def _round(value: float) -> int:
    """Round halves up; the built-in ``round`` rounds them to the even number."""
    return math.floor(min(value, _MOST_BATCHES) + 0.5)


def _check_whole(name: str, value: object, *, least: int) -> None:
    if not isinstance(value, Integral):
        raise ConfigError(f"{name} is {value!r}; give a whole number of {least} or more")
    _check(name, int(value), least=least)


def _check(name: str, value: float, *, least: float, most: float = math.inf) -> None:
    if not least <= value <= most or value == math.inf:
        limits = f"of {least} or more" if most == math.inf else f"from {least} to {most}"
        raise ConfigError(f"{name} is {value!r}; give a finite number {limits}")
