"""Find the rank that has become slow, from the reports of committed windows. Pure.

A rank is judged by its seconds before it meets the others: compute and waiting for data, compared
with the median of its own past. Updates do not count, nor do windows with the first micro-batch of
a size, because they say nothing about speed. Times are noisy, with a heavy tail, so one slow window
means nothing: a rank is named after three in a row, and once the others have waited for it for a
noteworthy time.
"""

from collections import deque
from collections.abc import Sequence
from enum import StrEnum
from statistics import median
from typing import Final, NamedTuple, final

from evener.planning.policies import NOTEWORTHY_S
from evener.planning.report import Report

FACTOR: Final = 1.3
"""A rank is slow in a window if it needs this many times the expected seconds."""

IN_A_ROW: Final = 3
"""Slow windows in a row after which a rank is named; after as many others it has recovered."""

_PAST: Final = 15
_LEAST_PAST: Final = 8


class SlowCause(StrEnum):
    """Why a rank is slow, as far as its reports show."""

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
        cause: Why, as far as reports show.
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


class _Pace:
    """The last usual windows of one rank, and its present episode."""

    def __init__(self) -> None:
        self.past: deque[Report] = deque(maxlen=_PAST)
        #: Slow windows in a row, ``IN_A_ROW`` at most; since when, and what they cost. Once the
        #: rank is named, each other window takes one off.
        self.slow = self.since = 0
        self.delay_s = 0.0
        self.named: Straggler | None = None

    def expected_s(self, record: Report) -> float:
        """Return the usual seconds for the work of a window; 0 while too little is known.

        With another share than usual, the longest that it could explain: all of the cost may be
        fixed, or none of it.
        """
        if len(self.past) < _LEAST_PAST:
            return 0.0
        return median(
            _seconds(one)
            * max(record.samples / one.samples, record.micro_batches / one.micro_batches)
            for one in self.past
        )


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
        # A first micro-batch of its size does not show a rank's speed.
        timed = {rank: r for rank, r in enumerate(records) if r.samples and not r.warmup_samples}
        expected_s = {rank: self._paces[rank].expected_s(r) for rank, r in timed.items()}
        ratios = {rank: _seconds(timed[rank]) / s for rank, s in expected_s.items() if s > 0}
        found = []
        for rank, record in timed.items():
            pace, ratio = self._paces[rank], ratios.get(rank, 0.0)
            others = [its for other, its in ratios.items() if other != rank]
            # What slows the team as a whole is no rank's.
            factor = ratio / max(1.0, median(others or [1.0]))
            if factor >= FACTOR:
                pace.since = pace.since if pace.slow else window
                pace.slow = min(pace.slow + 1, IN_A_ROW)
                pace.delay_s += _delay_s(rank, records)
                # Not one that is alone, as no rank waits for it.
                is_costly = pace.slow == IN_A_ROW and pace.delay_s >= NOTEWORTHY_S
                if is_costly and pace.named is None:
                    pace.named = _name(rank, window, record, factor, pace)
                    found.append(pace.named)
                continue
            pace.slow = pace.slow - 1 if pace.named else 0
            if pace.slow == 0:
                if ratio < FACTOR:
                    pace.past.append(record)
                if pace.named is not None:
                    over = pace.named._replace(window=window, delay_s=pace.delay_s, is_over=True)
                    found.append(over)
                pace.named, pace.delay_s = None, 0.0
        return tuple(found)


def _name(rank: int, window: int, record: Report, factor: float, pace: _Pace) -> Straggler:
    seconds = _seconds(record)
    expected_s = seconds / factor
    more_data_s = record.data_s - median(one.data_s for one in pace.past)
    waits = more_data_s >= 0.5 * (seconds - expected_s)
    cause = SlowCause.DATA if waits else SlowCause.UNKNOWN
    return Straggler(
        rank, pace.since, window, factor, seconds, expected_s, cause, pace.delay_s, is_over=False
    )


def _seconds(record: Report) -> float:
    """Return the seconds of a window in which a rank waited for no other one."""
    return record.compute_s - record.update_s + record.data_s


def _delay_s(rank: int, records: Sequence[Report]) -> float:
    """Return by how much a window would have ended sooner without what others waited for a rank."""
    others = [r.wait_s for other, r in enumerate(records) if other != rank and r.samples]
    return max(0.0, min(others) - records[rank].wait_s) if others else 0.0
