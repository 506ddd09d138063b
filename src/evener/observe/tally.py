"""Totals over the committed windows of a run, kept up event by event."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from evener.observe.events import Event, RankRow, Totals
from evener.parsing import Fields

WARM_UP_WINDOWS = 3
"""Windows whose time does not count as speed: caches are cold and shares not settled yet."""

MOST_SESSIONS = 100
"""So many of the latest are measured: in an elastic team each loss and each join begins one."""


class _MemberWork(NamedTuple):
    """What a member has done in a session so far."""

    weight: float = 0.0
    windows: float = 0.0
    compute_s: float = 0.0  # without updates
    updates_s: float = 0.0  # of whole updates, where ranks make a part each

    def plus(self, row: RankRow, parts: int) -> "_MemberWork":
        """Return the work with that of another window."""
        update_s = min(row.get("update_s", 0.0), row["compute_s"])
        return _MemberWork(
            self.weight + row["weight"],
            self.windows + 1,
            self.compute_s + row["compute_s"] - update_s,
            self.updates_s + update_s * max(parts, 1),
        )

    def since(self, other: "_MemberWork") -> "_MemberWork":
        """Return what has come after an earlier state."""
        return _MemberWork(*(a - b for a, b in zip(self, other, strict=True)))


class _Mark(NamedTuple):
    """Totals of a session at the commit of a window."""

    t: float  # without evaluations
    weight: float
    windows: int
    members: dict[str, _MemberWork]


@dataclass(slots=True)
class _Session:
    """The windows of one team from its start, resume or re-form on, as far as speed goes."""

    team: tuple[str, ...] | None
    began_t: float
    ended_t: float
    paused_s: float = 0.0  # evaluations since the session began
    totals: Totals = field(default_factory=Totals)
    marks: list[_Mark] = field(default_factory=list)  # of the warm-up, and of the last window

    def add(self, event: Event) -> None:
        """Add an event of this session."""
        self.ended_t = event["t"]
        if event["type"] == "eval":
            self.paused_s += event["elapsed_s"]
        elif event["type"] == "window" and self._is_own(event):
            totals = self.totals.add(event["ranks"])
            members = dict(self.marks[-1].members) if self.marks else {}
            for row in event["ranks"]:
                if row["weight"] > 0:
                    known = members.get(row["member"], _MemberWork())
                    members[row["member"]] = known.plus(row, event.get("update_parts", 1))
            del self.marks[WARM_UP_WINDOWS + 1 :]
            t = event["t"] - self.paused_s
            self.marks.append(_Mark(t, totals.weight, totals.windows, members))

    def _is_own(self, event: Event) -> bool:
        """Return whether this team did a window; a new main process records some once more."""
        return self.team is None or all(row["member"] in self.team for row in event["ranks"])


class EventTally:
    """Adds up the events of a run.

    Speed counts from the commit of window k to that of the last window, over the windows between,
    where k is ``WARM_UP_WINDOWS``, or the middle of a shorter run. Evaluations in between do not
    count as time. Sessions (from a start, a resume or a re-form on) are measured one by one and
    added up, as far as they had the same members as the last one: the speed is that of the present
    team.

    Attributes:
        total: Totals of the whole team.
        members: Totals by member.
    """

    def __init__(self) -> None:
        self.total = Totals()
        self.members: dict[str, Totals] = {}
        self._sessions: list[_Session] = []
        self._earlier_s = 0.0  # of sessions before these

    @classmethod
    def of(cls, events: Iterable[Event]) -> "EventTally":
        """Add up events of a run, of which all count."""
        tally = cls()
        for event in events:
            tally.add(event)
        return tally

    def to_json(self) -> dict[str, Any]:
        """Return the sums as JSON, for ``from_json``."""
        sessions = [{**asdict(one), "team": one.team and list(one.team)} for one in self._sessions]
        members = {name: asdict(totals) for name, totals in self.members.items()}
        known = {"total": asdict(self.total), "members": members, "sessions": sessions}
        return {**known, "earlier_s": self._earlier_s}

    @classmethod
    def from_json(cls, document: Any) -> "EventTally":
        """Return the sums that ``to_json`` has told.

        Raises:
            ValueError: They are not.
        """
        tally, fields = cls(), Fields(document)
        tally.total = _totals(fields.fields("total"))
        members = fields.fields("members")
        tally.members = {name: _totals(members.fields(name)) for name in members.values}
        tally._sessions = [_session(one) for one in fields.tables("sessions")]
        tally._earlier_s = fields.number("earlier_s")
        return tally

    def add(self, event: Event) -> None:
        """Add one event, in the order in which they happen."""
        kind = event["type"]
        last = self._sessions[-1] if self._sessions else None
        if kind in {"run_started", "run_resumed", "reformed"} or last is None:
            team = last.team if last is not None else None
            if kind in {"run_started", "reformed"}:
                team = tuple(event["members"])
            # A team that forms again has not paused: that time is time of the run.
            began_t = last.ended_t if last is not None and kind == "reformed" else event["t"]
            self._sessions.append(_Session(team, began_t, event["t"]))
            for one in self._sessions[:-MOST_SESSIONS]:
                self._earlier_s += one.ended_t - one.began_t
            del self._sessions[:-MOST_SESSIONS]
        self._sessions[-1].add(event)
        if kind == "window":
            self.total.add(event["ranks"])
            for row in event["ranks"]:
                self.members.setdefault(row["member"], Totals()).add([row])

    @property
    def elapsed_s(self) -> float:
        """Return the seconds from the first event to the last one of each session, added up."""
        return self._earlier_s + sum(one.ended_t - one.began_t for one in self._sessions)

    def speed(self) -> float | None:
        """Return the team's weight (tokens, or samples) per second after the warm-up.

        Returns:
            ``None`` below two windows.
        """
        measured_s = sum(last.t - mark.t for mark, last in self._spans())
        weight = sum(last.weight - mark.weight for mark, last in self._spans())
        return weight / measured_s if measured_s > 0 else None

    def speeds_alone(self) -> dict[str, float]:
        """Return by member what each would have done alone, from the windows of ``speed``.

        Alone it would have computed all of these windows as it has computed its part, and made the
        whole update in each of them.

        Returns:
            Weight per second, of the members that had work in these windows.
        """
        weight, windows = 0.0, 0
        done: dict[str, list[_MemberWork]] = {}
        for mark, last in self._spans():
            weight += last.weight - mark.weight
            windows += last.windows - mark.windows
            for member, work in last.members.items():
                done.setdefault(member, []).append(
                    work.since(mark.members.get(member, _MemberWork()))
                )
        speeds = {}
        for member, parts in done.items():
            own = _MemberWork(*map(sum, zip(*parts, strict=True)))
            if own.weight > 0 and own.windows:
                alone_s = own.compute_s * weight / own.weight
                alone_s += own.updates_s * windows / own.windows
                if alone_s > 0:
                    speeds[member] = weight / alone_s
        return speeds

    def _spans(self) -> list[tuple[_Mark, _Mark]]:
        """Return the windows that count as speed: from a mark, exclusive, to another one."""
        return [
            (one.marks[min(WARM_UP_WINDOWS, (one.totals.windows - 1) // 2)], one.marks[-1])
            for one in self._sessions
            if one.team == self._sessions[-1].team and one.marks
        ]


def _totals(fields: Fields) -> Totals:
    numbers = {name: fields.number(name) for name in ("weight", "compute_s", "wait_s", "sync_s")}
    return Totals(windows=fields.whole("windows"), samples=fields.whole("samples"), **numbers)


def _work(numbers: Any) -> _MemberWork:
    return _MemberWork(*(Fields({"number": one}).number("number") for one in numbers))


def _session(fields: Fields) -> _Session:
    times = {name: fields.number(name) for name in ("began_t", "ended_t", "paused_s")}
    marks = [
        Fields({"t": t, "weight": weight, "windows": windows, "members": members})
        for t, weight, windows, members in fields.items("marks")
    ]
    return _Session(
        team=None if fields["team"] is None else tuple(fields.texts("team")),
        totals=_totals(fields.fields("totals")),
        marks=[
            _Mark(
                one.number("t"),
                one.number("weight"),
                one.whole("windows"),
                {name: _work(work) for name, work in one.fields("members").values.items()},
            )
            for one in marks
        ],
        **times,
    )
