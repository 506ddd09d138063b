"""Find the rank that has become slow, from the reports of committed windows. Pure.

A rank is judged by its seconds before it meets the others: compute and waiting for data, compared
with the median of its own past. The first micro-batch of each size and updates do not count,
because they say nothing about speed. Times are noisy, with a heavy tail, so one slow window means
nothing: a rank is named after three in a row, and once the others have waited for it for a
noteworthy time.
"""

import math
from collections import deque
from collections.abc import Sequence
from enum import StrEnum
from statistics import median
from typing import Final, NamedTuple, final

from evener.planning.policies import NOTEWORTHY_S
from evener.planning.report import Report

FACTOR: Final = 1.3
"""A rank is slow in a window in which it needs so many times the expected seconds."""

IN_A_ROW: Final = 3
"""In so many windows in a row it must be slow; in as many not slow until the episode is over."""

_PAST: Final = 15
_LEAST_PAST: Final = 8


class SlowCause(StrEnum):
    """Why a rank is slow, as far as its reports tell."""

    UNKNOWN = "the cause is not known"
    DATA = "it waits for its data"


class Straggler(NamedTuple):
    """A rank that has become slow, or has stopped being slow.

    Attributes:
        rank: Which one.
        since: The first window of the episode.
        window: The last one so far.
        factor: How many times as long it takes as was to be expected.
        compute_s: Its seconds in the last window, waiting for data included.
        expected_s: The expected seconds.
        cause: Why, as far as reports tell.
        delay_s: Seconds by which windows would have ended sooner if it had arrived with the last of
            the others; from ``since`` to ``window``.
        is_over: Whether it is as fast as before again.
    """

    rank: int
    since: int
    window: int
    factor: float
    compute_s: float
    expected_s: float
    cause: SlowCause
    delay_s: float
    is_over: bool


class _Done(NamedTuple):
    """A rank's work in a window, as far as it shows its speed."""

    samples: int
    micro_batches: int
    seconds: float
    data_s: float


class _Pace:
    """The last usual windows of one rank, and its present episode."""

    def __init__(self) -> None:
        self.past: deque[_Done] = deque(maxlen=_PAST)
        self.end_episode()

    def end_episode(self) -> None:
        """Suspect nothing any more."""
        self.since = self.slow = self.calm = 0
        self.delay_s = 0.0
        self.named: Straggler | None = None


@final
class StragglerWatch:
    """Names ranks that have become slow.

    A cause that slows all ranks equally makes no straggler: no rank waits for another. Nor does a
    device that is slow by its nature, because a rank is compared with its own past.

    Args:
        num_ranks: Ranks of the team.
    """

    def __init__(self, num_ranks: int) -> None:
        self._paces = [_Pace() for _ in range(num_ranks)]

    def observe(self, window: int, records: Sequence[Report]) -> tuple[Straggler, ...]:
        """Judge a committed window.

        Args:
            window: Its number.
            records: What each rank did in it, waits included, by rank.

        Returns:
            Ranks that have just become stragglers, and those that have stopped being one.
        """
        work = {rank: done for rank, r in enumerate(records) if (done := _done(r)) is not None}
        expected_s = {rank: self._expected_s(rank, done) for rank, done in work.items()}
        ratios = {rank: work[rank].seconds / s for rank, s in expected_s.items() if s > 0}
        found = []
        for rank, done in work.items():
            others = [its for other, its in ratios.items() if other != rank]
            # What slows the team as a whole is no rank's, and stays out of its past.
            common = max(1.0, median(others) if others else 1.0)
            ratio = ratios.get(rank, 0.0)
            factor = ratio / common
            if factor < FACTOR:
                usual = done._replace(seconds=done.seconds / max(1.0, min(ratio, common)))
                event = self._acquit(rank, window, usual)
            else:
                event = self._strike(rank, window, done, factor, records)
            found += [] if event is None else [event]
        return tuple(found)

    def _expected_s(self, rank: int, done: _Done) -> float:
        """Return a rank's usual seconds for the work of a window; 0 while too little is known.

        With another share than usual, the longest that it could explain: all of the cost may be
        fixed, or none of it. Once the rank is slow, a smaller share may be the planner's answer to
        that, so half of the cost is taken for fixed.
        """
        pace, expected_s = self._paces[rank], []
        if len(pace.past) < _LEAST_PAST:
            return 0.0
        for one in pace.past:
            more = done.samples / one.samples, done.micro_batches / one.micro_batches
            times = math.sqrt(math.prod(more)) if pace.slow else max(more)
            expected_s.append(one.seconds * times)
        return median(expected_s)

    def _strike(
        self, rank: int, window: int, done: _Done, factor: float, records: Sequence[Report]
    ) -> Straggler | None:
        pace = self._paces[rank]
        pace.since = pace.since if pace.slow else window
        pace.slow, pace.calm = pace.slow + 1, 0
        pace.delay_s += _delay_s(rank, records)
        # Also of one that is alone, as nobody waits for it.
        if pace.named or pace.slow < IN_A_ROW or pace.delay_s < NOTEWORTHY_S:
            return None
        expected_s = done.seconds / factor
        usual_data_s = median(one.data_s for one in pace.past)
        waits = done.data_s - usual_data_s >= 0.5 * (done.seconds - expected_s)
        pace.named = Straggler(
            rank=rank,
            since=pace.since,
            window=window,
            factor=factor,
            compute_s=done.seconds,
            expected_s=expected_s,
            cause=SlowCause.DATA if waits else SlowCause.UNKNOWN,
            delay_s=pace.delay_s,
            is_over=False,
        )
        return pace.named

    def _acquit(self, rank: int, window: int, done: _Done) -> Straggler | None:
        pace = self._paces[rank]
        named, pace.calm = pace.named, pace.calm + 1
        if named is None:
            pace.past.append(done)
        elif pace.calm < IN_A_ROW:
            return None
        else:
            named = named._replace(window=window, delay_s=pace.delay_s, is_over=True)
        pace.end_episode()
        return named


def _done(record: Report) -> _Done | None:
    """Return what tells of a rank's speed in a window; ``None`` where nothing does."""
    samples = record.samples - record.warmup_samples
    micro_batches = record.micro_batches - record.warmup_micro_batches
    compute_s = record.compute_s - record.update_s - record.warmup_s
    if samples <= 0 or micro_batches <= 0 or not 0.0 < compute_s < math.inf:
        return None
    return _Done(samples, micro_batches, compute_s + record.data_s, record.data_s)


def _delay_s(rank: int, records: Sequence[Report]) -> float:
    """Return by how much a window would have ended sooner without what others waited for a rank."""
    others = [r.wait_s for other, r in enumerate(records) if other != rank and r.samples]
    return max(0.0, min(others) - records[rank].wait_s) if others else 0.0
