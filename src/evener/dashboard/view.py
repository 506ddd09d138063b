"""What the page of a run shows, made from its events one by one. Pure."""

from collections import deque
from collections.abc import Sequence
from typing import Any, Final, Literal

from evener.observe.events import Event
from evener.observe.numbers import human_bytes, human_duration
from evener.observe.progress_line import SPEED_WINDOWS, ProgressFigures
from evener.parsing import Fields
from evener.run_report.document import figures
from evener.run_report.history import RunHistory
from evener.run_report.summary_facts import SummaryFacts

MOST_NUMBERS: Final = 12_000
"""The most numbers in all curves: the page is sent to every reader again when it changes."""

MOST_KEPT: Final = 2**16
"""Cells of merged windows times lanes: they take 10 MB."""

MOST_LOGGED: Final = 60
"""The most lines of the log."""

Presence = Literal["here", "gone", "replaced", "parked", "ended"]
"""Whether a member of the team takes part; one that is gone may be replaced by another."""


class RunView:
    """The events of a run, as its page shows them.

    Attributes:
        history: Those events.
    """

    def __init__(self) -> None:
        self.history = RunHistory(most_kept=MOST_KEPT)
        self._recent: deque[Event] = deque(maxlen=SPEED_WINDOWS)
        #: By member: why it is gone, and the window that it was lost in.
        self._gone: dict[str, tuple[str, int]] = {}
        self._at_work: dict[int, str] = {}  # members of the newest window, by rank
        self._newest_t: float | None = None

    def add(self, event: Event) -> None:
        """Take one event.

        Raises:
            ValueError: A field has a value that cannot be. Nothing of the event counts then.
        """
        if "turns" in event:
            Fields(event).whole("turns")
        self.history.add(event)
        self._newest_t = event["t"]
        kind = event["type"]
        if kind == "window":
            self._recent.append(event)
            self._at_work = {row["rank"]: row["member"] for row in event["ranks"]}
            for row in event["ranks"]:
                # The last window that it took part in may be known to be committed only later.
                if self._gone.get(row["member"], ("", 0))[1] <= event["window"]:
                    self._gone.pop(row["member"], None)
        elif kind == "run_started":
            self._gone.clear()
        elif kind in ("worker_lost", "worker_left"):
            if len(self._gone) < len(self.history.lanes) + 1:
                why = str(event.get("reason", "it left as it was told to"))
                self._gone[str(event["member"])] = why, _whole(event.get("window")) or 0
        elif kind == "worker_joined":
            self._gone.pop(str(event["member"]), None)
        if kind in ("run_resumed", "reformed"):
            self._recent = deque(list(self._recent)[-1:], SPEED_WINDOWS)

    def document(
        self, name: str, facts: SummaryFacts, notes: Sequence[str], *, is_running: bool | None
    ) -> dict[str, Any]:
        """Return what the page shows, as JSON.

        Args:
            name: What the run is called.
            facts: What its summary says.
            notes: What was left out while reading.
            is_running: Whether its processes are there; ``None`` where that is not known.
        """
        found = figures(
            name, self.history, facts, notes, most_numbers=MOST_NUMBERS, has_timeline=False
        )
        for row in found["ranks"]:
            row["presence"] = self._presence(row, is_running=is_running)
            row["why_gone"] = self._gone.get(row["member"], (None,))[0]
        run, events, evals, checkpoints = (
            found.pop(key) for key in ("run", "events", "evals", "checkpoints")
        )
        ended = self.history.ending is not None
        return {
            **{key: found[key] for key in ("name", "notes", "team", "ranks", "straggler")},
            "run": {**run, "state": _state(run["state"], ended=ended, is_running=is_running)},
            "is_running": bool(is_running) and not ended,
            "line": self._line(),
            "newest_t": self._newest_t,
            "series": found["series"],
            "evals": evals,
            "log": _log(events, evals, checkpoints),
        }

    def _line(self) -> str:
        progress, facts = ProgressFigures(unicode=True), self.history.facts
        progress.start(facts.get("total_windows"), facts.get("unit", "samples"))
        for event in self._recent:
            progress.add(event)
        return progress.line() if self._recent else ""

    def _presence(self, row: dict[str, Any], *, is_running: bool | None) -> Presence:
        if self.history.ending is not None or is_running is False:
            return "ended"
        if row["member"] in self._gone:
            is_replaced = self._at_work.get(row["rank"], row["member"]) != row["member"]
            return "replaced" if is_replaced else "gone"
        return "parked" if row["parked"] else "here"


def _state(recorded: str, *, ended: bool, is_running: bool | None) -> str:
    if ended:
        return recorded
    return {True: "running", False: "ended unexpectedly", None: "no end recorded"}[is_running]


def _log(
    events: Sequence[dict[str, Any]],
    evals: Sequence[dict[str, Any]],
    checkpoints: Sequence[dict[str, Any]],
) -> list[dict[str, Any]]:
    """Return what has happened, the newest last."""
    lines = [(e["t_s"] or 0.0, e["text"]) for e in events]
    lines += [
        (e["t_s"] or 0.0, f"{e['name']}: loss {_shown(e['loss'])} after window {e['window']:,}")
        for e in evals
    ]
    lines += [
        (
            c["t_s"] or 0.0,
            f"checkpoint {c['path']} ({human_bytes(c['num_bytes'] or 0)}, "
            f"written in {human_duration(c['write_s'] or 0)})",
        )
        for c in checkpoints
    ]
    newest = sorted(lines, key=lambda line: line[0])[-MOST_LOGGED:]
    return [{"t_s": t_s, "text": text} for t_s, text in newest]


def _shown(loss: float | None) -> str:
    return "not finite" if loss is None else f"{loss:.4g}"


def _whole(value: Any) -> int | None:
    return value if type(value) is int else None
