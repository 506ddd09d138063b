"""Totals over the committed windows of a run, kept up event by event."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from evener.observe.events import Event

WARM_UP_WINDOWS = 3
"""Windows whose time does not count as speed: caches are cold and shares not settled yet."""

# How far back windows can be taken out again. Windows are announced when they are committed, so a
# live run takes back a few at most; files are read through `effective_events`, which has no limit.
_NUM_REVOCABLE = 4096


@dataclass(slots=True)
class MemberTotals:
    """What one member did in the committed windows.

    Attributes:
        member: Its id.
        rank: Its rank in the newest window.
        windows: Windows in which it took part.
        samples: Samples it did.
        weight: Their weight (tokens, or samples).
        compute_s: Seconds of compute.
        wait_s: Seconds of waiting for other ranks.
        sync_s: Seconds of exchange.
    """

    member: str
    rank: int
    windows: int = 0
    samples: int = 0
    weight: float = 0.0
    compute_s: float = 0.0
    wait_s: float = 0.0
    sync_s: float = 0.0

    @property
    def wait_fraction(self) -> float:
        """Part of its time that it waited, from 0 to 1."""
        total_s = self.compute_s + self.wait_s + self.sync_s
        return self.wait_s / total_s if total_s > 0 else 0.0

    def _add(self, row: dict[str, Any], sign: int) -> None:
        self.windows += sign
        self.samples += sign * row["samples"]
        self.weight += sign * row["weight"]
        self.compute_s += sign * row["compute_s"]
        self.wait_s += sign * row["wait_s"]
        self.sync_s += sign * row["sync_s"]


@dataclass(frozen=True, slots=True)
class Speed:
    """Throughput after the warm-up.

    Attributes:
        weight_per_s: Tokens (or samples) per second.
        samples_per_s: Samples per second.
        measured_s: Seconds over which it was measured.
    """

    weight_per_s: float
    samples_per_s: float
    measured_s: float


@dataclass(frozen=True, slots=True)
class _Mark:
    """State of a session when a window was committed."""

    window: int
    t: float
    weight: float
    samples: int
    paused_s: float


@dataclass(slots=True)
class _Session:
    """The windows of one process group from start or resume on, as far as speed goes."""

    team: tuple[str, ...] | None = None
    began_t: float | None = None
    ended_t: float = 0.0
    num_windows: int = 0
    weight: float = 0.0
    samples: int = 0
    paused_s: float = 0.0  # evaluations since the session began
    paused_at_last_s: float = 0.0  # the same, when the last window was committed
    last_t: float = 0.0
    first: list[_Mark] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Entry:
    window: int
    session: _Session
    rows: list[dict[str, Any]]
    weight: float
    samples: int


class EventTally:
    """Adds up events; windows that a resume or a re-form makes void are taken out again.

    Speed counts from the commit of window k to that of the last window, over the windows between,
    where k is ``WARM_UP_WINDOWS``, or the middle of a shorter run. Evaluations in between do not
    count as time. Sessions (start, resume) are measured one by one and added up, as far as they
    had the same members as the last one: the speed is that of the present team.
    """

    def __init__(self) -> None:
        self._members: dict[str, MemberTotals] = {}
        self._sessions = [_Session()]
        self._revocable: deque[_Entry] = deque(maxlen=_NUM_REVOCABLE)
        self.num_windows = 0
        self.num_samples = 0
        self.weight = 0.0

    @classmethod
    def of(cls, events: Iterable[Event]) -> "EventTally":
        """Add up events that are all there; pass them through ``effective_events`` first."""
        tally = cls()
        for event in events:
            tally.add(event)
        return tally

    def add(self, event: Event) -> None:
        """Take one event into account, in the order in which they happen."""
        kind = event["type"]
        if kind == "window":
            self._add_window(event)
        elif kind == "eval":
            self._sessions[-1].paused_s += event["elapsed_s"]
        elif kind == "run_started":
            self._sessions.append(_Session(team=tuple(event["members"])))
        elif kind == "run_resumed":
            self._revoke(event["window"])
            self._sessions.append(_Session(team=self._sessions[-1].team))
        elif kind == "reformed":
            self._revoke(event["window"])
        session = self._sessions[-1]
        session.began_t = event["t"] if session.began_t is None else session.began_t
        session.ended_t = event["t"]

    @property
    def members(self) -> tuple[MemberTotals, ...]:
        """Totals per member, by rank."""
        totals = sorted(self._members.values(), key=lambda member: member.rank)
        return tuple(replace(member) for member in totals)

    @property
    def elapsed_s(self) -> float:
        """Seconds from the first event to the last one of each session, added up."""
        return sum(s.ended_t - s.began_t for s in self._sessions if s.began_t is not None)

    def speed(self) -> Speed | None:
        """Return the team's throughput after the warm-up; ``None`` below two windows."""
        weight, num_samples, measured_s = 0.0, 0, 0.0
        for session in self._sessions:
            if session.team != self._sessions[-1].team:
                continue
            if session.num_windows < 2 or not session.first:
                continue
            mark = session.first[min(len(session.first) - 1, (session.num_windows - 1) // 2)]
            weight += session.weight - mark.weight
            num_samples += session.samples - mark.samples
            measured_s += session.last_t - mark.t - (session.paused_at_last_s - mark.paused_s)
        if measured_s <= 0:
            return None
        return Speed(weight / measured_s, num_samples / measured_s, measured_s)

    def _add_window(self, event: Event) -> None:
        rows = event["ranks"]
        weight = sum(row["weight"] for row in rows)
        num_samples = sum(row["samples"] for row in rows)
        session = self._sessions[-1]
        self._revocable.append(_Entry(event["window"], session, rows, weight, num_samples))
        for row in rows:
            totals = self._members.setdefault(
                row["member"], MemberTotals(row["member"], row["rank"])
            )
            totals.rank = row["rank"]
        self._count(self._revocable[-1], 1)
        session.last_t = event["t"]
        session.paused_at_last_s = session.paused_s
        if len(session.first) <= WARM_UP_WINDOWS:
            session.first.append(
                _Mark(
                    event["window"], event["t"], session.weight, session.samples, session.paused_s
                )
            )

    def _revoke(self, first_void: int) -> None:
        while self._revocable and self._revocable[-1].window >= first_void:
            entry = self._revocable.pop()
            self._count(entry, -1)
            first = entry.session.first
            if first and first[-1].window == entry.window:
                first.pop()

    def _count(self, entry: _Entry, sign: int) -> None:
        for row in entry.rows:
            self._members[row["member"]]._add(row, sign)
        session = entry.session
        session.num_windows += sign
        session.weight += sign * entry.weight
        session.samples += sign * entry.samples
        self.num_windows += sign
        self.num_samples += sign * entry.samples
        self.weight += sign * entry.weight
