"""The history of a run, read from its events one by one. Pure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from evener.observe.events import Event, RankRow, mean_loss
from evener.observe.lineage import Voids
from evener.observe.numbers import human_duration
from evener.observe.progress_line import after_windows, describe
from evener.parsing import Fields, short
from evener.run_report.listed import MOST_LISTED, Listed
from evener.run_report.windows import LANE_NUMBERS, MOST_KEPT, Windows

MOST_LANES: Final = 1024
"""Rows of further members are counted and left out: a damaged file could name millions."""

_INCIDENTS: Final = frozenset(
    {"worker_lost", "worker_left", "worker_joined", "healed", "straggler", "straggler_over"}
    | {"checkpoint_missed", "events_dropped"}
)

_MOST_TEXT: Final = 300
_MOST_MESSAGE: Final = 2000  # the text of an error may be long

_MOST_T: Final = 1e11
"""Unix seconds of the year 5138; later ones are damage, and would stretch every axis."""


@dataclass(slots=True)
class Lane:
    """One member over the whole run.

    Attributes:
        member: Its id.
        rank: Its newest rank.
        host: Its host; empty where unknown.
        device: Its device, for people; empty where unknown.
    """

    member: str
    rank: int = 0
    host: str = ""
    device: str = ""


class CommittedWindow(NamedTuple):
    """A window; times are seconds of training, and ``loss`` is NaN where none is known."""

    number: int
    begin_s: float
    end_s: float
    loss: float
    rows: Mapping[str, RankRow]


class Incident(NamedTuple):
    """Something that happened at a moment, such as a rank that was lost.

    Attributes:
        t_s: Seconds of training until then.
        window: The window that the event names.
        kind: Type of the event.
        text: For people.
    """

    t_s: float
    window: int
    kind: str
    text: str


class HeldOut(NamedTuple):
    """An evaluation; ``begin_s`` and ``end_s`` are seconds of training."""

    name: str
    window: int
    loss: float
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A checkpoint that has reached the disk.

    Attributes:
        window: Windows before it.
        path: Its folder.
        num_bytes: Its size.
        rank: The rank that wrote it; -1 where that is not known.
        copy_s: Seconds for which training stopped on that rank, right before the write.
        write_s: Seconds in which a thread wrote it.
        t_s: When it was written, in seconds of training.
    """

    window: int
    path: str
    num_bytes: float
    rank: int
    copy_s: float
    write_s: float
    t_s: float


class RunHistory:
    """The events of a run, taken one by one in the order in which they were written.

    Time is *training time*: seconds from the first event on, without those between the end of a
    session and the resume. Windows that a resume or a re-formed team superseded are dropped, and
    evaluations after them. Their time remains.

    Args:
        voids: Windows that are void, if known beforehand.
        most_kept: See ``Windows``.
        most_listed: See ``Listed``.

    Attributes:
        facts: What the newest ``run_started`` says; ``emulated`` is a factor by rank.
        team_since: The first window of the present team: that of its start or re-form.
        ending: ``reason`` and ``message`` of the newest session's ``run_finished``, if it has one.
        elapsed_s: Training time of the newest event.
        sessions: Starts and resumes.
        plans: Plans that differed from the one before.
        reasons: Why plans changed.
        void_windows: Windows that were dropped.
        windows: Those that count.
        newest: The newest of them.
        voids: What is known of windows that are void.
        is_blurred: Whether void windows had been merged with others, of which a part was kept as
            an estimate: for exact figures, the events have to be read anew.
        lanes: By member, in the order of ``windows``.
        num_omitted: Rows of members beyond ``MOST_LANES``.
        num_estimated: Windows for which others stand.
        parked: Ranks without a share in the newest window.
        incidents: Membership changes, stragglers and other things of which there are few.
        evals: Evaluations. Of many old ones, those with the least and the largest loss are kept.
        checkpoints: What has been saved.
    """

    def __init__(
        self,
        voids: Voids | None = None,
        *,
        most_kept: int = MOST_KEPT,
        most_listed: int = MOST_LISTED,
    ) -> None:
        self.facts: dict[str, Any] = {}
        self.ending: dict[str, Any] | None = None
        self.elapsed_s = 0.0
        self.sessions = self.plans = self.void_windows = self.team_since = 0
        self._members: list[str] = []
        self.windows = Windows(most_kept)
        self.newest: CommittedWindow | None = None
        self.is_blurred = False
        self.voids = voids or Voids()
        self.lanes: dict[str, Lane] = {}
        self.num_omitted = self.num_estimated = 0
        self.parked: set[str] = set()
        self._most_listed = most_listed
        self.incidents = Listed[Incident](most_listed)
        self.evals: list[HeldOut] = []
        self.reasons = Listed[Incident](most_listed)
        self.checkpoints = Listed[SavedCheckpoint](most_listed)
        self._origin_t: float | None = None
        self._free_s = 0.0  # when the team could begin with the next window
        self._has_lost_time = False  # to windows that are void
        self._is_resuming = False
        self._workers: dict[str, tuple[str, str]] = {}  # host and device by member

    @property
    def has_summary(self) -> bool:
        """Whether a ``summary.json`` is of the newest session: that has ended, and not failed."""
        return self.ending is not None and self.ending["reason"] != "failed"

    def add(self, event: Event) -> None:
        """Take one event; its fields have passed ``check_fields``.

        Raises:
            ValueError: A field has a value that cannot be. Nothing of the event counts then.
        """
        fields = Fields(event)
        counts = self.voids.counts(event)  # of every event, also of those that are refused
        t, kind = fields.number("t", least=0.0), event["type"]
        if t > _MOST_T:
            raise ValueError(f"t is {short(t)}, not unix seconds")
        facts = _read_start(fields) if kind == "run_started" else None
        if self._origin_t is None:
            self._origin_t = t
        if kind in ("run_started", "run_resumed"):
            self._begin_session(t, facts)
        self.elapsed_s = max(self.elapsed_s, t - self._origin_t)
        if kind in ("run_started", "reformed") and event["members"] != self._members:
            self._members, self.team_since = event["members"], event["window"]
        if not counts:
            self.void_windows += event.get("stands_for", 1)  # only windows are void
            self._has_lost_time = True
        elif kind == "window":
            self._window(event)
        elif kind == "plan":
            self._plan(event)
        elif kind == "worker_started":
            self._worker(fields)
        elif kind == "eval":
            self._eval(event)
        elif kind == "checkpoint":
            self._checkpoint(fields)
        elif kind in ("run_resumed", "reformed"):
            self._void(event["window"])
            self._incident(event)
        elif kind == "run_finished":
            self._incident(event)
            message = str(event.get("message") or "")[:_MOST_MESSAGE] or None
            self.ending = {"reason": event["reason"][:_MOST_TEXT], "message": message}
        elif kind in _INCIDENTS:
            self._incident(event)

    def _begin_session(self, t: float, facts: dict[str, Any] | None) -> None:
        assert self._origin_t is not None
        is_resume = facts is None
        # A resume writes two events: first the void windows, then the team.
        if not self._is_resuming:
            self.sessions += 1
            self.ending = None
        self._is_resuming = is_resume
        self._origin_t = t - self.elapsed_s
        self._free_s = self.elapsed_s
        if facts is not None:
            self.facts = facts

    def _worker(self, fields: Fields) -> None:
        member = fields.text("member")
        if len(self._workers) < MOST_LANES or member in self._workers:
            self._workers[member] = fields.text("host"), fields.text("device")
        if member in self.lanes:
            self._name(self.lanes[member])

    def _name(self, lane: Lane) -> None:
        lane.host, lane.device = self._workers.get(lane.member, ("", ""))

    def _window(self, event: Event) -> None:
        assert self._origin_t is not None
        ended_s = self.newest.end_s if self.newest else 0.0
        end_s = max(event["t"] - self._origin_t, ended_s)
        begin_s = min(max(self._free_s, ended_s), end_s)
        loss = mean_loss(event)
        rows = {row["member"]: row for row in event["ranks"]}
        for member in [name for name in rows if name not in self.lanes]:
            if len(self.lanes) < MOST_LANES:
                self.lanes[member] = Lane(member)
                self.windows.add_lane()
                self._name(self.lanes[member])
            else:
                self.num_omitted += 1
        for member, row in rows.items():
            if member in self.lanes:
                self.lanes[member].rank = row["rank"]
        number, loss = event["window"], math.nan if loss is None else loss
        if self._members and not rows.keys() <= set(self._members):
            self.team_since = number + 1  # the new main process has recorded it again
        count = event.get("stands_for", 1)
        self.num_estimated += count - 1
        self.newest = CommittedWindow(number, begin_s, end_s, loss, rows)
        self.windows.add(
            (number, begin_s, end_s, loss, _optional(event, "anchor"), count),
            [_numbers(rows[m], count) if m in rows else _ABSENT for m in self.lanes],
        )
        self._free_s = end_s
        parked = event.get("parked")
        ranks = parked if isinstance(parked, list) else []
        self.parked = {member for member, row in rows.items() if row["rank"] in ranks}

    def _void(self, first: int) -> None:
        dropped, is_exact = self.windows.drop(first)
        self.is_blurred = self.is_blurred or not is_exact
        self.void_windows += dropped
        self.evals = [one for one in self.evals if one.window <= first]
        if dropped or self._has_lost_time:
            self._free_s = self.elapsed_s
            self._has_lost_time = False

    def _plan(self, event: Event) -> None:
        self.plans += 1
        shares, reason = event.get("shares"), str(event.get("reason") or "")
        window = event.get("window")
        if isinstance(shares, list) and type(window) is int:
            text = f"{' / '.join(map(str, shares[:8]))}{' / …' if len(shares) > 8 else ''}"
            text = f"{text[:_MOST_TEXT]}: {reason[:_MOST_TEXT]}" if reason else text[:_MOST_TEXT]
            self.reasons.append(Incident(self.elapsed_s, window, "plan", text))

    def _eval(self, event: Event) -> None:
        loss = math.nan if event["loss"] is None else float(event["loss"])
        # It follows the previous window at once; its event may come late.
        begin_s = self._free_s
        self._free_s = min(begin_s + max(0.0, event["elapsed_s"]), max(begin_s, self.elapsed_s))
        name = event.get("name")
        found = HeldOut(str(name)[:80], event["window"], loss, begin_s, self._free_s)
        self.evals.append(found)
        if len(self.evals) > self._most_listed:
            self.evals = _thinned(self.evals)

    def _checkpoint(self, fields: Fields) -> None:
        window, path = fields.whole("window"), fields.text("path")
        num_bytes = fields.number("num_bytes", least=0.0)
        write_s, rank = fields.number("write_s", least=0.0), fields.values.get("rank")
        began_s = _optional(fields.values, "begin_t") - (self._origin_t or 0.0)
        copy_s = _optional(fields.values, "copy_s")
        ended_s = began_s + write_s if math.isfinite(began_s) else self.elapsed_s
        self.checkpoints.append(
            SavedCheckpoint(
                window=window,
                path=path[:_MOST_MESSAGE],
                num_bytes=num_bytes,
                rank=rank if type(rank) is int else -1,
                copy_s=copy_s if copy_s > 0 else 0.0,
                write_s=write_s,
                t_s=min(max(0.0, ended_s), self.elapsed_s),
            )
        )

    def _incident(self, event: Event) -> None:
        kind = event["type"]
        try:
            text = describe(event) or _sentence(event)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"the event {kind} has a field that cannot be: {error}") from None
        window = event.get("window")
        self.incidents.append(
            Incident(
                self.elapsed_s, window if type(window) is int else 0, kind, text[:_MOST_MESSAGE]
            )
        )


def _thinned(evals: list[HeldOut]) -> list[HeldOut]:
    """Keep two of each four in the older half: those with the least and the largest loss."""
    half = len(evals) // 8 * 4
    kept = []
    for i in range(0, half, 4):
        losses = [(math.isnan(one.loss), one.loss, j) for j, one in enumerate(evals[i : i + 4], i)]
        kept += [evals[j] for j in sorted((min(losses)[-1], max(losses)[-1]))]
    return kept + evals[half:]


def _read_start(fields: Fields) -> dict[str, Any]:
    reason, emulated = fields.values.get("backend_reason"), fields.values.get("emulated")
    total, factors = fields["total_windows"], {}
    if isinstance(emulated, dict):
        factors = {rank: _optional(emulated, rank) for rank in emulated}
    return {
        **{name: fields.text(name)[:_MOST_TEXT] for name in ("run", "policy", "backend", "unit")},
        "num_samples": fields.whole("num_samples"),
        "total_windows": None if total is None else fields.whole("total_windows"),
        "backend_reason": reason if isinstance(reason, str) else None,
        "emulated": {rank: factor for rank, factor in factors.items() if math.isfinite(factor)},
    }


def _sentence(event: Event) -> str:
    """Return what the terminal does not say of an event."""
    kind = event["type"]
    if kind == "reformed":
        took = f" in {human_duration(event['reform_s'])}" if "reform_s" in event else ""
        count = len(event["members"])
        return f"the team formed anew with {count} rank{'s' if count != 1 else ''}{took}"
    if kind == "healed":
        return f"rank {event['rank']} ({event['member']}) took the state of {event['donor']}"
    if kind == "checkpoint_missed":
        return f"no checkpoint {after_windows(event)}: {event['reason']}"
    if kind == "events_dropped":
        return f"{event['num_events']:,} events are missing, as the disk was too slow for them"
    message = f": {event['message']}" if event.get("message") else ""
    return f"{event['reason']} {after_windows(event)}{message}"


def _optional(fields: Mapping[str, Any], name: str) -> float:
    """Return the number of a field, or NaN where there is no such field, or no number in it."""
    return _number(fields.get(name))


def _number(value: Any) -> float:
    good = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if good and abs(value) <= 1e308 else math.nan


_ABSENT: Final = (0.0,) * len(LANE_NUMBERS)


def _numbers(row: Mapping[str, Any], count: int) -> list[float]:
    """Return the ``LANE_NUMBERS`` of a row, whose fields have been checked, of so many windows."""
    return [count * row.get(name, 0.0) for name in LANE_NUMBERS]
