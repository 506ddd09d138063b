"""Find the rank that has become slow, from the reports of committed windows. Pure.

A rank is judged by its seconds before it meets the others: compute and waiting for data. They are
compared with its own past first, and with ranks that have the same device, for a rank that was slow
from the start. The first micro-batch of each size, updates and calibrations do not count, because
they say nothing about speed.

Times are noisy, with a heavy tail, so one slow window means nothing. How many in a row do, depends
on how often the rank (or its peers) had such windows while nothing was wrong: at least three, and
so many that chance would make them once in 100,000 windows. Nor is a rank named before the others
have waited for it for a noteworthy time in all.
"""

import math
from collections import deque
from collections.abc import Sequence
from enum import IntEnum
from itertools import pairwise
from statistics import median
from typing import Final, NamedTuple, final

from evener.planning.policies import NOTEWORTHY_S
from evener.planning.report import Report

FACTOR: Final = 1.3
"""A rank is slow in a window in which it needs so many times the expected seconds."""

LEAST_WINDOWS: Final = 3
"""In so many windows in a row it must be slow; in as many not slow until the episode is over."""

_CHANCE: Final = 1e-5
_AS_SLOW: Final = 0.7
_LEAST_PAST: Final = 8
_LEAST_BESIDE_PEERS: Final = 5
_PAST: Final = 15
_RATIOS: Final = 64


class SlowCause(IntEnum):
    """Why a rank is slow, as far as it can tell.

    Attributes:
        words: For people.
    """

    words: str

    UNKNOWN = 0, "the cause is not known"
    DATA = 1, "it waits for its data"
    CPU = 2, "other programs take its cores"
    SWAP = 3, "the host's memory is full, and it swaps"
    HEAT = 4, "its GPU is too hot, and slows its clock down"
    POWER = 5, "its GPU is at its power limit, and slows its clock down"

    def __new__(cls, number: int, words: str) -> "SlowCause":
        """Make a member of its number and words."""
        self = int.__new__(cls, number)
        self._value_, self.words = number, words
        return self


class Straggler(NamedTuple):
    """A rank that has become slow, or has stopped being slow.

    Attributes:
        rank: Which one.
        since: The first window of the episode.
        window: The last one so far.
        factor: How many times as long it takes as was to be expected.
        compute_s: Its seconds in the last window, waiting for data included.
        expected_s: The expected seconds.
        against: What it is compared with, its own past or its peers, in words.
        cause: Why, as far as the rank can tell.
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
    against: str
    cause: SlowCause
    delay_s: float
    is_over: bool


class _Done(NamedTuple):
    """A rank's work in a window, as far as it shows its speed."""

    samples: int
    micro_batches: int
    seconds: float
    data_s: float


class _Suspicion(NamedTuple):
    """How slow a rank was in a window, and in how many it must be until it is named."""

    factor: float
    needed: int
    against: str


class _Pace:
    """The known windows of one rank: usual ones, and those in which it is suspected."""

    def __init__(self) -> None:
        self.past: deque[_Done] = deque(maxlen=_PAST)
        self.ratios: deque[float] = deque(maxlen=_RATIOS)
        self.peer_ratios: deque[float] = deque(maxlen=_RATIOS)
        self.suspect: deque[tuple[_Done, float]] = deque(maxlen=_RATIOS)
        self.strikes = self.since = self.calm = 0
        self.delay_s = 0.0
        self.named: Straggler | None = None

    def keep(self, done: _Done, ratio: float) -> None:
        """Count a window as a usual one, and those that were suspected before it as noise."""
        for one, its_ratio in (*self.suspect, (done, ratio)):
            self.past.append(one)
            self.ratios.append(its_ratio)
        self.forget()

    def forget(self) -> None:
        """Suspect nothing any more."""
        self.suspect.clear()
        self.strikes = self.calm = 0
        self.delay_s, self.named = 0.0, None


@final
class StragglerWatch:
    """Names ranks that have become slow.

    All ranks get the same reports, so all name the same ranks. A cause that slows all ranks equally
    makes no straggler: no rank waits for another. Nor does a device that is slow by its nature:
    ranks are compared with peers of the same kind only.

    Args:
        kinds: By rank, what its device is; equal where equal speed is to be expected.
    """

    def __init__(self, kinds: Sequence[str]) -> None:
        self._kinds = tuple(kinds)
        self._paces = [_Pace() for _ in kinds]

    def is_suspected(self, rank: int) -> bool:
        """Return whether a rank was slow in the last window in which it had work."""
        return self._paces[rank].strikes > 0

    def observe(self, window: int, records: Sequence[Report]) -> tuple[Straggler, ...]:
        """Judge a committed window.

        Args:
            window: Its number.
            records: What each rank did in it, waits included, by rank.

        Returns:
            Ranks that have just become stragglers, and those that have stopped being one.
        """
        work = {rank: done for rank, r in enumerate(records) if (done := _done(r)) is not None}
        own = {rank: self._against_past(rank, done) for rank, done in work.items()}
        peers = {rank: self._against_peers(rank, work) for rank in work}
        found = []
        for rank, done in work.items():
            pace = self._paces[rank]
            others = [ratio for other, ratio in own.items() if other != rank and ratio > 0]
            usual = max(1.0, median(others)) if others else 1.0
            if peers[rank] > 0:
                pace.peer_ratios.append(peers[rank])
            verdict = self._judge(rank, own[rank] / usual, peers[rank])
            if verdict.factor >= FACTOR:
                event = self._strike(rank, window, done, verdict, records)
            else:
                event = self._acquit(rank, window, done, own[rank])
            if event is not None:
                found.append(event)
        return tuple(found)

    def _against_past(self, rank: int, done: _Done) -> float:
        """Return how many times its usual time a rank needed; 0 while too little is known.

        With another share than usual, the time expected is the longest that it could explain: all
        of the cost may be fixed, or none of it. Once the rank is suspected, a smaller share may be
        the planner's answer to that, so half of the cost is taken for fixed.
        """
        past = self._paces[rank].past
        if len(past) < _LEAST_PAST:
            return 0.0
        is_suspected = self._paces[rank].strikes > 0
        expected = [
            one.seconds
            * (
                _middle(done, one)
                if is_suspected
                else max(done.samples / one.samples, done.micro_batches / one.micro_batches)
            )
            for one in past
        ]
        return done.seconds / median(expected)

    def _against_peers(self, rank: int, work: dict[int, _Done]) -> float:
        """Return how many times as long as its peers a rank needed; 0 without peers.

        With shares that differ, half of the cost is taken for fixed.
        """
        done, kind = work[rank], self._kinds[rank]
        expected = [
            one.seconds * _middle(done, one)
            for other, one in work.items()
            if other != rank and self._kinds[other] == kind
        ]
        return done.seconds / median(expected) if expected else 0.0

    def _judge(self, rank: int, by_past: float, by_peers: float) -> _Suspicion:
        pace, kind = self._paces[rank], self._kinds[rank]
        before = [ratio for _, ratio in pace.suspect]
        if by_past >= FACTOR:
            return _Suspicion(
                by_past, _needed(pace.ratios, min([by_past, *before])), "its own past"
            )
        lasting = median(list(pace.peer_ratios)[-_PAST:]) if pace.peer_ratios else 0.0
        if min(by_peers, lasting) >= FACTOR:
            known = [
                ratio
                for other, one in enumerate(self._paces)
                if other != rank and self._kinds[other] == kind
                for ratio in one.peer_ratios
            ]
            needed = max(_LEAST_BESIDE_PEERS, _needed(known, min([by_peers, *before])))
            return _Suspicion(by_peers, needed, "ranks with the same device")
        return _Suspicion(0.0, LEAST_WINDOWS, "")

    def _strike(
        self, rank: int, window: int, done: _Done, verdict: _Suspicion, records: Sequence[Report]
    ) -> Straggler | None:
        pace = self._paces[rank]
        if not pace.strikes:
            pace.since = window
        pace.strikes, pace.calm = pace.strikes + 1, 0
        pace.suspect.append((done, verdict.factor))
        pace.delay_s += _delay_s(rank, records)
        if pace.named is not None or pace.strikes < verdict.needed:
            return None
        if pace.delay_s < NOTEWORTHY_S:  # also of one that is alone, as nobody waits for it
            return None
        factor = median(ratio for _, ratio in pace.suspect)
        pace.named = Straggler(
            rank=rank,
            since=pace.since,
            window=window,
            factor=factor,
            compute_s=done.seconds,
            expected_s=done.seconds / factor,
            against=verdict.against,
            cause=self._cause(pace, records[rank].slow_because, factor),
            delay_s=pace.delay_s,
            is_over=False,
        )
        return pace.named

    def _acquit(self, rank: int, window: int, done: _Done, ratio: float) -> Straggler | None:
        pace = self._paces[rank]
        named, pace.calm = pace.named, pace.calm + 1
        if named is None:
            pace.keep(done, ratio)
        elif pace.calm >= LEAST_WINDOWS:
            over = named._replace(window=window, delay_s=pace.delay_s, is_over=True)
            pace.forget()
            return over
        return None

    @staticmethod
    def _cause(pace: _Pace, told: int, factor: float) -> SlowCause:
        data_s = median(done.data_s for done, _ in pace.suspect)
        excess_s = median(done.seconds for done, _ in pace.suspect) * (1.0 - 1.0 / factor)
        usual_s = median(done.data_s for done in pace.past) if pace.past else 0.0
        if data_s - usual_s >= 0.5 * excess_s:
            return SlowCause.DATA
        return next((cause for cause in SlowCause if cause == told), SlowCause.UNKNOWN)


def _done(record: Report) -> _Done | None:
    """Return what tells of a rank's speed in a window; ``None`` where nothing does."""
    samples = record.samples - record.warmup_samples
    micro_batches = record.micro_batches - record.warmup_micro_batches
    compute_s = record.compute_s - record.update_s - record.warmup_s
    if samples <= 0 or micro_batches <= 0 or not 0.0 < compute_s < math.inf:
        return None
    return _Done(samples, micro_batches, compute_s + record.data_s, record.data_s)


def _middle(done: _Done, other: _Done) -> float:
    """Return how much more work one window was than another, between samples and micro-batches."""
    return math.sqrt(done.samples / other.samples * done.micro_batches / other.micro_batches)


def _needed(usual: Sequence[float], factor: float) -> int:
    """Return how many slow windows in a row are more than chance, by usual windows' ratios.

    Slow windows come in bursts, as other programs do: how often one followed another counts, too.
    Those that were much less slow than ``factor`` do not count.
    """
    slow = [ratio >= max(FACTOR, _AS_SLOW * factor) for ratio in usual]
    often = (1 + sum(slow)) / (2 + len(slow))
    pairs = sum(one and other for one, other in pairwise(slow))
    again = max(often, (pairs + 2 * often) / (sum(slow) + 2))
    return max(LEAST_WINDOWS, 1 + math.ceil(math.log(_CHANCE / often) / math.log(again)))


def _delay_s(rank: int, records: Sequence[Report]) -> float:
    """Return by how much a window would have ended sooner without what others waited for a rank."""
    others = [r.wait_s for other, r in enumerate(records) if other != rank and r.samples]
    return max(0.0, min(others) - records[rank].wait_s) if others else 0.0
