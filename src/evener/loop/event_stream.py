"""Turn the team's actions into events for sinks, on the main process."""

import atexit
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from evener.checkpoint import WrittenCheckpoint
from evener.engine.membership_change import MembershipChange
from evener.engine.results import WindowResult
from evener.errors import ConfigError
from evener.loop.assembly import Assembly
from evener.observe.events import Event, Fanout, Sink, make_event
from evener.planning.report import RankRecord
from evener.team.members import Member
from evener.team.terminal import warn

SinkMaker = Callable[[], Sink]

#: Windows that each rank keeps although the main process records them. In an elastic team it may be
#: lost before it has written them; the next main process then records them again.
_KEPT: Final = 4

#: Seconds of a rank in a window, as ``RankRow`` names them.
_SECONDS: Final = (
    *("compute_s", "wait_s", "sync_s", "hidden_s", "elapsed_s", "data_s", "update_s"),
    *("work_ago_s", "wait_ago_s", "sync_ago_s"),
)


class EventStream:
    """Passes the team's events to sinks, on the main process only.

    Rank 0 is the main process until it is parked. Then it closes its sinks and the next main
    process opens its own, so a file has one writer at a time.

    If ``start`` is not called, as in a user's own loop, ``run_started`` is written before the first
    event of a window or a checkpoint, since by then the data is known.

    Args:
        assembly: The team.

    Attributes:
        parked: Ranks that were parked in the newest committed window.
    """

    def __init__(self, assembly: Assembly) -> None:
        self._engine = assembly.engine
        self._team = assembly.team
        self._makers: list[Sink | SinkMaker] = []
        self._sinks: Fanout | None = None  # open while this rank is the main process
        self._has_started = self._has_finished = False
        self._error: BaseException | None = None
        self._planned: list[int] = []
        self._kept: deque[WindowResult] = deque(maxlen=_KEPT)
        self.parked: tuple[int, ...] = ()
        #: The ranks' names by number, in this generation and in the one before.
        self._names: dict[int, dict[int, str]] = {}
        self._facts: dict[str, Any] = {
            "t": time.time(),
            "window": 0,
            "run": Path(sys.argv[0]).stem or "run",
            "policy": str(assembly.apply_policy),
            "unit": "samples",
            "num_samples": 0,
            "total_windows": None,
            "params": sum(parameter.numel() for parameter in assembly.flat.parameters),
            "backend": assembly.comm.backend,
            "backend_reason": assembly.comm.reason,
        }

    def learn(self, **facts: Any) -> None:
        """Keep facts for ``run_started``.

        Args:
            **facts: Its fields, also ``t`` and ``window`` of the start; ``resumed_from``: the
                checkpoint that was loaded; ``new_data``: whether the run continues with other data.
        """
        self._facts |= facts

    def report_to(self, sinks: Sequence[Sink | SinkMaker]) -> None:
        """Pass every further event to these sinks, windows included; all ranks call it.

        Functions that make a sink are called only on the main process: here, and when another rank
        becomes it. ``end`` closes the sinks; a main process that is parked closes them, too.

        Raises:
            ConfigError: A function returned something else.
        """
        if self._engine.rounds.is_main and sinks:
            self._sinks = self._sinks or Fanout(warn)
            self._sinks.add(open_sinks(sinks))
        if sinks and not self._makers:
            self._names = {self._engine.rounds.state.generation: self._present()}
            self._engine.commits.observe(self.window)
            self._engine.generations.call_on_change(self.change)
            self._team.call_on_handover(self._close_sinks)
            atexit.register(self._end_script)
        self._makers += sinks

    def _close_sinks(self) -> None:
        sinks, self._sinks = self._sinks, None
        if sinks is not None:
            sinks.close()

    def emit(self, kind: str, **fields: Any) -> None:
        """Pass an event to every sink; ``run_started`` precedes the first one.

        Args:
            kind: See ``FIELDS`` of ``evener.observe.events``.
            **fields: The fields of the kind; ``t`` is the present time by default.
        """
        is_main = self._engine.rounds.is_main and self._makers
        if is_main and self._team.membership.may_write():
            self._emit_start()
            self._emit(make_event(kind, **{"t": time.time(), **fields}))

    def _emit(self, event: Event) -> None:
        if self._sinks is None:  # another rank was the main process
            self._sinks = open_sinks(self._makers)
            self._sinks.introduce(self._start())
        self._sinks.emit(event)

    def start(self, **facts: Any) -> None:
        """Write ``run_started`` with the team and the facts of the run, once.

        On resume ``run_resumed`` precedes it, with the window from which earlier events are void.
        """
        self._facts |= {**facts, "t": time.time(), "window": self._engine.window}
        self._emit_start()

    def _emit_start(self) -> None:
        if self._has_started or not self._engine.rounds.is_main or not self._makers:
            return
        self._has_started, facts = True, self._facts
        t = facts["t"]
        if (path := facts.get("resumed_from")) is not None:
            new_data = facts.get("new_data", False)
            self.emit("run_resumed", t=t, window=facts["window"], path=str(path), new_data=new_data)
        self._emit(self._start())
        for member in self._team.member_by_rank:
            self._emit_worker(member, t)

    def _emit_worker(self, member: Member, t: float) -> None:
        if member.device:  # empty if no worker has that number
            slowed = {"emulated": member.emulated} if member.emulated != 1 else {}
            self.emit("worker_started", t=t, pid=member.pid, **_place(member), **slowed)

    def _start(self) -> Event:
        # Facts of a resume are in ``run_resumed``.
        facts = {k: v for k, v in self._facts.items() if k not in ("resumed_from", "new_data")}
        # In an elastic team a number may be unused.
        names = [name for name in self._team.names if name]
        return make_event("run_started", members=names, **facts)

    def window(self, result: WindowResult) -> None:
        """Record a committed window, its plan if shares have changed, and stragglers."""
        if not self._engine.rounds.is_main:
            self._has_started = True  # the main process has written ``run_started``
        if self._kept and self._kept[-1].window + 1 != result.window:
            self._kept.clear()  # this rank was parked, or out of the team
        self._kept.append(result)
        # In the middle of a change, ``change`` does it if this rank is the main process then.
        if self._engine.rounds.is_main and self._engine.rounds.state.generation in self._names:
            self._kept.clear()
            self._record(result)

    def _record(self, result: WindowResult) -> None:
        place = _pick(result, "window", "generation", "epoch")
        place["t"] = round(result.applied_t, 5)
        shares, cadence = [record.samples for record in result.ranks], result.cadence
        # Windows closed by time differ by a step or two, so only a new anchor is a new plan.
        planned = shares if cadence is None else [cadence.anchor]
        if planned != self._planned:
            self._planned = planned
            piece = {**_pick(result, "start", "size"), "shares": shares}
            self.emit("plan", **place, **piece, reason=self._engine.policy.why(result.window))
        # A window may be recorded in a later generation, in which other members have the numbers.
        names = self._names.get(result.generation) or self._present()
        self._emit_decisions(result, names)
        rows = [self._row(rank, name, result.ranks[rank]) for rank, name in names.items()]
        further: dict[str, Any] = {}
        if cadence is not None:  # local steps
            for row in rows:
                row |= _pick(result.ranks[row["rank"]], "steps", "stale_steps")
            further = {
                **_pick(cadence, "anchor", "guard"),
                "optimizer_steps": result.progress.optimizer_steps,
                "window_s": _short(cadence.window_s) if math.isfinite(cadence.window_s) else None,
                "divergence": _short(cadence.divergence),
            }
        if (redo_s := self._engine.generations.redo_s) is not None:
            further["redo_s"] = _rounded(redo_s)
        self.emit(
            "window",
            **place,
            committed=[list(part) for part in result.ranges or [result.committed]],
            ranks=rows,
            **{name: _short(getattr(result, name)) for name in ("loss", "lr", "grad_norm")},
            skipped=result.skipped,
            update_parts=max(record.update_parts for record in result.ranks),
            parked=list(self.parked),
            **further,
        )
        for one in result.stragglers:
            member = self._team.member_by_rank[one.rank]
            self.emit(
                "straggler_over" if one.is_over else "straggler",
                **_pick(one, "window", "since", "cause"),
                **_seconds(one, "factor", "compute_s", "expected_s", "delay_s"),
                **_place(member),
            )

    def _emit_decisions(self, result: WindowResult, names: Mapping[int, str]) -> None:
        """Record who is parked or called back with a window, and who was refused before it."""
        before, self.parked = self.parked, result.parked
        why = self._engine.why_parked or "the team is predicted to be faster without it"
        for kind, ranks, reason in (
            ("parked", {*self.parked} - {*before}, why),
            ("recalled", {*before} - {*self.parked}, "the team tries again with it"),
        ):
            for rank in sorted(ranks & names.keys()):
                place = {"rank": rank, "member": names[rank], "window": result.window}
                self.emit(kind, **place, reason=reason)
        for member, reason in self._team.membership.take_refused():
            self.emit("join_refused", member=member, window=result.window, reason=reason)

    def _row(self, rank: int, name: str, record: RankRecord) -> dict[str, Any]:
        """Return the ``RankRow`` of a rank."""
        return {
            "rank": rank,
            "member": name,
            **_pick(record, "samples", "weight", "sent_bytes", "micro_batches"),
            "loss": _short(record.loss_sum / record.weight) if record.weight else None,
            **_seconds(record, *_SECONDS),
        }

    def _present(self) -> dict[int, str]:
        return {rank: self._team.names[rank] for rank in self._team.everyone}

    def change(self, change: MembershipChange) -> None:
        """Record that the team has changed: lost and new members, and the time it took."""
        *_, newest = self._names
        self._names = {newest: self._names[newest], change.generation: self._present()}
        if not self._engine.rounds.is_main:
            self._has_started = True  # a run that has changed its team has begun
            return
        window = change.window
        # Not windows before this rank was parked, or before the team went back to a checkpoint.
        # The window before this one may be committed later.
        again = [result for result in self._kept if result.window < window]
        if again and again[-1].window < window - 2:
            again = []
        self._kept.clear()

        def emit_each(kind: str, ranks: Mapping[int, str], **fields: Any) -> None:
            for rank, name in ranks.items():
                self.emit(kind, rank=rank, member=name, window=window, **fields)

        emit_each("worker_lost", change.lost, reason=change.why)
        emit_each("worker_left", change.left)
        self.emit(
            "reformed",
            # Readers drop the events of the previous main process from this window on.
            window=again[0].window if again else window,
            members=list(change.members),
            backend=self._team.comm.backend,
            backend_reason=self._team.comm.reason,
            **_pick(change, "generation", "detect_s", "reform_s", "recover_s"),
        )
        received = {**_pick(change, "source", "num_bytes"), "elapsed_s": change.recover_s}
        emit_each("recovered", change.recovered, **received)
        for rank in change.joined:
            self._emit_worker(self._team.member_by_rank[rank], time.time())
        emit_each("worker_joined", change.joined, generation=change.generation)
        for result in again:
            self._record(result)

    def checkpoint(self, written: WrittenCheckpoint) -> None:
        """Record a checkpoint that has reached the disk."""
        self.emit(
            "checkpoint",
            window=written.step,
            path=str(written.path),
            rank=self._engine.rounds.rank,
            **_pick(written, "num_bytes", "begin_t"),
            **_seconds(written, "copy_s", "write_s"),
        )

    def pending(self) -> list[threading.Event]:
        """Return events that are set once sinks have written everything so far; do not wait."""
        return self._sinks.pending() if self._sinks is not None else []

    def finish(self, window: int, reason: str, message: str | None = None) -> None:
        """Record the end of a started run, once; later ends add nothing."""
        if self._has_started and not self._has_finished:
            self._has_finished = True
            self.emit("run_finished", window=window, reason=reason, message=message)

    def end(self, *, failed: bool, error: BaseException | None) -> None:
        """Record the end, unless it was recorded, and close all sinks; idempotent.

        A single worker that fails does not end the run of an elastic team.
        """
        atexit.unregister(self._end_script)
        self._error = None  # its traceback holds the frames of the script
        if not (failed and self._team.is_elastic):
            self._emit_start()
            engine = self._engine
            reason = "failed" if failed else "stopped" if engine.rounds.stopping else "completed"
            message = f"{type(error).__name__}: {error}" if failed and error is not None else None
            self.finish(engine.window, reason, message)
        self._close_sinks()

    def note_error(self, error: BaseException) -> None:
        """Record an uncaught exception, for scripts that end without ``close``."""
        self._error = error

    def _end_script(self) -> None:
        """Record the end of a script that has not called ``close``, without other ranks."""
        self.end(failed=self._error is not None, error=self._error)


def open_sinks(sinks: Sequence[Sink | SinkMaker]) -> Fanout:
    """Return one sink that passes events to all of these; functions are called to make theirs.

    Raises:
        ConfigError: One is neither a sink nor a function that returns one.
    """
    fanout = Fanout(warn)
    for given in sinks:
        made: object = given() if callable(given) and not isinstance(given, Sink) else given
        if not isinstance(made, Sink):
            raise ConfigError(
                f"sinks holds {given!r}, and {made!r} is not an evener.Sink: give a list of sinks, "
                "or of functions without arguments that return one"
            )
        fanout.add(made)
    return fanout


def _pick(value: object, *names: str) -> dict[str, Any]:
    """Return some attributes of an object as fields of an event."""
    return {name: getattr(value, name) for name in names}


def _seconds(value: object, *names: str) -> dict[str, float]:
    return {name: _rounded(getattr(value, name)) for name in names}


def _place(member: Member) -> dict[str, Any]:
    """Return a member's rank, name, host and device."""
    device = f"{member.device} ({member.device_name})"
    return {**_pick(member, "rank", "member", "host"), "device": device}


def _rounded(seconds: float) -> float:
    """Return seconds in whole microseconds: further digits are noise and make lines longer."""
    return int(1e6 * seconds + 0.5) / 1e6 if 0 < seconds < math.inf else 0.0


def _short(value: float | None) -> float | None:
    """Return a number rounded to six significant digits."""
    return None if value is None else float(f"{value:.6g}")
