"""A team as a run has measured it: costs, disturbances, exchanges, from its ``window`` events."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import fmean, median, median_high
from typing import Any, Final

from evener.config.folders import find_events
from evener.errors import ConfigError
from evener.observe.events import Event
from evener.observe.following import each_event
from evener.observe.lineage import effective
from evener.observe.table import WARM_UP_WINDOWS
from evener.observe.thinning import mean_window
from evener.parsing import MOST_WHOLE
from evener.planning.elche import ANCHOR
from evener.planning.policies import ApplyPolicy
from evener.planning.speed import CostModel, SpeedModel
from evener.simulation.prediction import TeamSpec
from evener.simulation.simulated_rank import BYTES_PER_PARAMETER, Link, Noise, SimulatedRank

LEAST_WINDOWS: Final = 5
"""Windows after the warm-up without which a run tells too little."""

_MOST_EVENTS: Final = 20_000
"""The newest events of a run that are read: it may have been at work for weeks."""

_MOST_TIMES: Final = 100
"""A window with so many times the usual time or samples does not count: the run was suspended in
it, or its line is damaged."""

_USUAL_FIXED: Final = 0.1
"""Part of a micro-batch's time that is usually fixed."""

_PAUSES: Final = ("eval", "checkpoint", "checkpoint_missed")
"""Events whose time is in the window that follows, and is not the loop's."""


def read_team(run: Path) -> TeamSpec:
    """Read what the run of a folder has measured.

    Args:
        run: The folder, or its ``events.jsonl``.

    Raises:
        ConfigError: It is not a run, cannot be read, or has too few windows.
    """
    starts: list[Event] = []

    def others() -> Iterator[Event]:
        for event in each_event(find_events(run)):
            if event["type"] == "run_started":
                starts[:] = [event]
            elif event["type"] == "window":
                yield mean_window(event)
            else:
                yield event

    newest = effective(others(), _MOST_EVENTS)
    return measured_team([*starts, *newest], str(run))


def measured_team(events: Iterable[Event], run: str) -> TeamSpec:
    """Return what a run has measured of the team that it had at its end.

    Args:
        events: Those of the run that count; see ``effective``.
        run: Its name, for people.

    Raises:
        ConfigError: There are too few windows.
    """
    kept = list(events)
    starts = [event for event in kept if event["type"] == "run_started"]
    start: Event = starts[-1] if starts else {}
    windows = _of_last_team([event for event in kept if event["type"] == "window"])
    paused = {event["window"] for event in kept if event["type"] in _PAUSES}
    windows = [one for one in windows if one["window"] not in paused]
    for measure in (_longest_s, _most_samples):
        most = _MOST_TIMES * median(map(measure, windows)) if windows else 0.0
        windows = [one for one in windows if measure(one) <= most]
    if len(windows) < LEAST_WINDOWS:
        raise ConfigError(
            f"{run} has {len(windows)} windows after its warm-up of {WARM_UP_WINDOWS}, at least "
            f"{LEAST_WINDOWS} are needed to tell how fast its ranks are; let it run for longer, "
            "name another run, or give speeds by hand with --speeds"
        )
    return _MeasuredWindows(windows, start, run).result()


def _of_last_team(windows: list[Event]) -> list[Event]:
    """Return the windows of the members of the newest one, after the warm-up of each team."""
    kept: list[Event] = []
    former: set[str] = set()
    age = 0
    for window in windows:
        members = {row["member"] for row in window["ranks"]}
        age = age + 1 if members == former else 1
        former = members
        if age > WARM_UP_WINDOWS:
            kept.append(window)
    return [one for one in kept if {row["member"] for row in one["ranks"]} == former]


class _MeasuredWindows:
    """The windows of a run, summed up."""

    def __init__(self, windows: Sequence[Event], start: Mapping[str, Any], run: str) -> None:
        self._windows = windows
        self._run = run
        self._policy = _policy_of(windows, start)
        self._is_local = self._policy is not ApplyPolicy.SYNC
        self._parts = _whole(windows[-1], "update_parts") or 1
        self._params = _whole(start, "params")
        #: Members keep their ids when ranks get new numbers; they are in the newest order here.
        self._by_member: dict[str, list[Mapping[str, Any]]] = {
            row["member"]: [] for row in windows[-1]["ranks"]
        }
        for window in windows:
            for row in window["ranks"]:
                self._by_member[row["member"]].append(row)
        self._ends_s = tuple(accumulate(map(_longest_s, windows)))
        self._notes: list[str] = []

    def result(self) -> TeamSpec:
        """Return the team."""
        micro_batch_size = self._micro_batch_size()
        ranks = [
            rank
            for rows in self._by_member.values()
            if (rank := self._rank(rows, micro_batch_size)) is not None
        ]
        if not ranks:
            raise ConfigError(
                f"no rank has computed anything in {self._run}, so no speed is known; name another "
                "run, or give speeds by hand with --speeds"
            )
        self._notes_of_policy()
        batch_size = self._batch_size()
        return TeamSpec(
            ranks=tuple(ranks),
            link=self._link(),
            batch_size=batch_size,
            local_batch_size=batch_size,
            anchor=self._anchor(),
            divides_updates=self._parts > 1,
            source=f"{self._run}: {len(self._windows):,} windows of policy {self._policy}",
            notes=tuple(self._notes),
        )

    def _rank(
        self, rows: Sequence[Mapping[str, Any]], micro_batch_size: int | None
    ) -> SimulatedRank | None:
        """Return a rank as it was measured; ``None`` for one that has computed nothing."""
        speed = SpeedModel()
        worked = [row for row in rows if row["samples"] > 0 and row["compute_s"] > 0]
        for row in worked:
            update_s = min(_seconds(row, "update_s"), row["compute_s"])
            speed.observe(
                row["samples"],
                _micro_batches(row),
                row["compute_s"] - update_s,
                update_s * self._parts,
            )
        name = f"rank {rows[-1]['rank']} ({rows[-1]['member']})"
        if (cost := speed.cost) is None:
            self._notes.append(
                f"{name} has computed nothing in these windows, so it is left out: give its speed "
                "with --add"
            )
            return None
        if micro_batch_size and not cost.fixed_s:
            size = min(micro_batch_size, max(row["samples"] for row in worked))
            cost = _with_usual_fixed(cost, worked, size)
        told = [row for row in worked if "elapsed_s" in row]
        beside_s = math.fsum(map(_beside_s, told))
        return SimulatedRank(
            name=name,
            cost=cost,
            micro_batch_size=micro_batch_size,
            overhead_s=max(0.0, beside_s) / (sum(map(_micro_batches, told)) or 1),
            noise=Noise(tuple(self._factor(row, cost) for row in rows), self._ends_s),
        )

    def _factor(self, row: Mapping[str, Any], cost: CostModel) -> float:
        """Return how many times as long as usual a rank took, within limits; 1 without work."""
        samples: int = row["samples"]
        expected_s = cost.fixed_s * _micro_batches(row) + cost.per_sample_s * samples
        expected_s += cost.window_s / self._parts
        factor = row["compute_s"] / expected_s if samples and row["compute_s"] else 1.0
        return min(max(factor, 1.0 / _MOST_TIMES), float(_MOST_TIMES))

    def _link(self) -> Link:
        num_bytes = BYTES_PER_PARAMETER * self._params
        present = [[row for row in w["ranks"] if row["samples"] > 0] for w in self._windows]
        num_ranks = max(map(len, present))
        if not self._params:
            self._notes.append("the run does not say how many parameters it trains: give --params")
        if num_ranks < 2:
            self._notes.append(
                "the run had one rank at work, so what an exchange takes is not known: give "
                "--bandwidth"
            )
            return Link(num_bytes)
        if self._policy.in_background:
            self._notes.append(
                "the run averaged in the background, so what an exchange takes is not known: "
                "give --bandwidth"
            )
            return Link(num_bytes)
        together = [rows for rows in present if len(rows) == num_ranks]
        exchange_s = fmean([fmean(row["sync_s"] for row in rows) for rows in together])
        meeting_s = fmean([min(row["wait_s"] for row in rows) for rows in together])
        transfer_s = exchange_s * num_ranks / (2 * (num_ranks - 1))
        return Link(num_bytes, transfer_s, meeting_s=meeting_s)

    def _notes_of_policy(self) -> None:
        if self._is_local:
            self._notes.append(
                "the run made local steps, in which updates are not timed by themselves: sync is "
                "predicted with an update for each step's samples, and so as rather too slow"
            )

    def _batch_size(self) -> int:
        """Return the samples of most optimizer steps; windows at the end of an epoch have fewer."""
        sizes: list[int] = [sum(row["samples"] for row in w["ranks"]) for w in self._windows]
        if self._is_local:
            rows = (row for rows in self._by_member.values() for row in rows if row["samples"] > 0)
            sizes = [-(-row["samples"] // (_whole(row, "steps") or 1)) for row in rows]
        return median_high(sizes)

    def _anchor(self) -> int:
        """Return the anchor from which the run's has grown."""
        known = [_whole(window, "anchor") for window in self._windows] if self._is_local else []
        return min(filter(None, known), default=ANCHOR)

    def _micro_batch_size(self) -> int | None:
        known = [
            -(-row["samples"] // micro_batches)
            for rows in self._by_member.values()
            for row in rows
            if (micro_batches := _whole(row, "micro_batches"))
        ]
        return max(known, default=None)


def _with_usual_fixed(cost: CostModel, rows: Sequence[Mapping[str, Any]], size: int) -> CostModel:
    """Return the cost with the usual part of a full micro-batch fixed; for these rows the same.

    Windows of one size cannot tell that part, and yet the last micro-batch of a share, which may be
    of one sample, costs more than its samples alone.
    """
    samples = sum(row["samples"] for row in rows)
    fixed_samples = size * _USUAL_FIXED / (1.0 - _USUAL_FIXED)
    of_micro_batches = fixed_samples * sum(map(_micro_batches, rows))
    per_sample_s = cost.per_sample_s * samples / (samples + of_micro_batches)
    return cost._replace(fixed_s=fixed_samples * per_sample_s, per_sample_s=per_sample_s)


def _policy_of(windows: Sequence[Event], start: Mapping[str, Any]) -> ApplyPolicy:
    named = start.get("policy")
    if named in list(ApplyPolicy):
        return ApplyPolicy(named)
    return ApplyPolicy.CADENCE if "anchor" in windows[-1] else ApplyPolicy.SYNC


def _micro_batches(row: Mapping[str, Any]) -> int:
    return _whole(row, "micro_batches") or _whole(row, "steps") or 1


def _whole(fields: Mapping[str, Any], key: str) -> int:
    """Return a field of which readers of events do not require anything; 0 where it is no count."""
    value = fields.get(key)
    return value if type(value) is int and 0 < value <= MOST_WHOLE else 0


def _seconds(row: Mapping[str, Any], key: str) -> float:
    """Return a field of seconds, 0 where it is none."""
    value = row.get(key)
    return float(value) if isinstance(value, int | float) and 0.0 <= value < math.inf else 0.0


def _longest_s(window: Event) -> float:
    """Return how long a window was on the rank that took longest, above 0 if one was at work."""
    keys = ("elapsed_s", "compute_s", "wait_s", "sync_s")
    return max((_seconds(row, key) for row in window["ranks"] for key in keys), default=0.0)


def _most_samples(window: Event) -> int:
    """Return the samples of the rank that had most."""
    return max((row["samples"] for row in window["ranks"]), default=0)


def _beside_s(row: Mapping[str, Any]) -> float:
    """Return the seconds of a window that are neither compute nor waiting nor exchange."""
    named = ("compute_s", "wait_s", "sync_s")
    return _seconds(row, "elapsed_s") - math.fsum(_seconds(row, key) for key in named)
