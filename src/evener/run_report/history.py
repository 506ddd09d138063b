"""The history of a run, read from its events one by one. Pure."""

from collections import Counter
from typing import Any, Final, TypeVar

from evener.observe.events import Event
from evener.observe.sentences import describe, steps_before
from evener.observe.table import VOIDING, RunTable
from evener.observe.team_change import TeamChange

MOST_LISTED: Final = 500
"""The most lines of a list, such as that of checkpoints; the middle of longer ones is dropped."""

_INCIDENTS: Final = {
    "run_resumed": "resume",
    "straggler": "straggler",
    "straggler_over": "straggler",
    "parked": "parked",
    "recalled": "recalled",
    "join_refused": "refused",
    "checkpoint_missed": "",
    "events_dropped": "",
    "run_finished": "",
}
"""Types of events that are listed one by one, and the flag of each in charts."""

_DECISIONS: Final = ("parked", "recalled", "join_refused")
_BACKEND: Final = ("backend", "backend_reason")
"""A re-formed team may exchange over another backend, and why."""

_MOST_SHARES: Final = 8

_Item = TypeVar("_Item")


class RunHistory:
    """The events of a run, taken one by one in the order in which they were written.

    Lists hold what the document shows. Their times are seconds of training (``RunTable``).

    Attributes:
        table: The windows that count.
        facts: The newest ``run_started``.
        ending: The newest session's ``run_finished``, if it has one.
        sessions: Starts and resumes.
        counts: Events by type.
        incidents: Changes of the team, stragglers and other rare events.
        decisions: Decisions of the planner and of the coordinator, and why.
        evals: Evaluations, with ``begin_s``.
        checkpoints: Saved checkpoints.
        workers: The newest ``worker_started`` by member.
        joined: By member that has joined the running team: its first window.
        gone: By member that was lost or has left: why, and the current window at that time.
    """

    def __init__(self) -> None:
        self.table = RunTable()
        self.facts: Event = {}
        self.ending: Event | None = None
        self.sessions = 0
        self.counts: Counter[str] = Counter()
        self.incidents: list[dict[str, Any]] = []
        self.evals: list[dict[str, Any]] = []
        self.decisions: list[dict[str, Any]] = []
        self.checkpoints: list[dict[str, Any]] = []
        self.workers: dict[str, Event] = {}
        self.joined: dict[str, int] = {}
        self.gone: dict[str, tuple[str, int]] = {}
        self._change: TeamChange | None = None
        self._newest_kind = ""

    @property
    def has_summary(self) -> bool:
        """Whether ``summary.json`` is of the newest session, which has ended without failure."""
        return self.ending is not None and self.ending["reason"] != "failed"

    def slowed(self, lane: int) -> float | None:
        """Return the factor by which a rank is slowed on purpose; ``None`` if it is not."""
        return self.workers.get(self.table.members[lane], {}).get("emulated")

    def add(self, event: Event) -> None:
        """Take one event."""
        self.table.add(event)
        kind = event["type"]
        self.counts[kind] += 1
        if kind in VOIDING:  # the evaluations of void windows are void, too
            self.evals = [one for one in self.evals if one["window"] <= event["window"]]
        match kind:
            case "run_resumed":
                self._begin_session()
            case "run_started":
                # A resume writes two events: first the void windows, then the team.
                if self._newest_kind != "run_resumed":
                    self._begin_session()
                self.facts = event
                self.gone.clear()
            case "reformed":
                known = {name: event[name] for name in _BACKEND if name in event}
                self.facts = {**self.facts, **known}
            case "window":
                for row in event["ranks"]:
                    # The last window that it took part in may become known only later.
                    if self.gone.get(row["member"], ("", 0))[1] <= event["window"]:
                        self.gone.pop(row["member"], None)
            case "worker_started":
                self.workers[event["member"]] = event
            case "worker_lost" | "worker_left":
                self.gone[event["member"]] = event.get("reason") or "it left", event["window"]
            case "worker_joined":
                self.gone.pop(event["member"], None)
                self.joined[event["member"]] = event["window"]
            case "plan":
                shares = event["shares"]
                text = " / ".join(map(str, shares[:_MOST_SHARES]))
                text += " / …" if len(shares) > _MOST_SHARES else ""
                reason = f": {event['reason']}" if event.get("reason") else ""
                first = self.counts["plan"] == 1
                self._decide("first_plan" if first else "plan", event, text + reason)
            case "eval":
                self._eval(event)
            case "checkpoint":
                self._checkpoint(event)
            case "run_finished":
                self.ending = event
        if kind in TeamChange.KINDS:
            self._describe_change(event)
        elif kind in _INCIDENTS:
            self._tell(_INCIDENTS[kind], event, self._describe(event))
        if kind in _DECISIONS:
            self._decide(kind, event, self._describe(event))
        self._newest_kind = kind

    def _begin_session(self) -> None:
        self.sessions += 1
        self.ending = None

    def _describe_change(self, event: Event) -> None:
        """Describe all events of one change of the team in one sentence."""
        if self._change is None or not self._change.takes(event):
            if event["type"] == "window":
                return
            self._change = TeamChange()
            self._tell("", event, "")
        self._change.add(event)
        self.incidents[-1] |= self._change.summary()

    def _tell(self, flag: str, event: Event, text: str) -> None:
        line = {name: event.get(name) for name in ("rank", "member")}
        own = {"type": event["type"], "kind": flag, **line, "cost_s": event.get("delay_s")}
        _append(self.incidents, {**self._at(event), **own, "text": text})

    def _describe(self, event: Event) -> str:
        return describe(event, steps_before(event, self.facts, self.table.newest)) or ""

    def _decide(self, kind: str, event: Event, text: str) -> None:
        _append(self.decisions, {**self._at(event), "kind": kind, "text": text})

    def _at(self, event: Event) -> dict[str, Any]:
        return {"t_s": self.table.elapsed_s, "window": event.get("window", 0)}

    def _eval(self, event: Event) -> None:
        begin_s, end_s = self.table.eval_s
        found = {"name": event["name"], "window": event["window"], "loss": event["loss"]}
        self.evals.append({**found, "begin_s": begin_s, "t_s": end_s})

    def _checkpoint(self, event: Event) -> None:
        ended_s = self.table.elapsed_s
        if (begin_t := event.get("begin_t")) is not None:
            ended_s = min(ended_s, max(0.0, self.table.time_of(begin_t) + event["write_s"]))
        fields = ("window", "path", "num_bytes", "write_s")
        found = {**{name: event[name] for name in fields}, "rank": event.get("rank")}
        copy_s = event.get("copy_s", 0.0)
        _append(self.checkpoints, {**found, "copy_s": copy_s, "t_s": ended_s})


def _append(items: list[_Item], item: _Item) -> None:
    items.append(item)
    if len(items) > MOST_LISTED:
        del items[MOST_LISTED // 2]
