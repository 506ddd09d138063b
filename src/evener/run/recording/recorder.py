"""Turns what the team does into events, and the events into what people see; on rank 0."""

import math
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any, Self

from evener.checkpoint import WrittenCheckpoint
from evener.observe.events import (
    RankRow,
    Sink,
    checkpoint_event,
    checkpoint_missed_event,
    eval_event,
    plan_event,
    run_finished_event,
    run_resumed_event,
    run_started_event,
    straggler_event,
    window_event,
    worker_started_event,
)
from evener.observe.jsonl import JsonlSink, read_events
from evener.observe.lineage import effective_events
from evener.observe.progress import ProgressSink
from evener.observe.tally import EventTally
from evener.observe.tensorboard import TensorBoardSink
from evener.run.config.folders import EVENTS
from evener.run.ddp import Ddp
from evener.run.launching.terminal import say
from evener.run.windows.results import RankRecord, WindowResult

GENERATION = 0
"""A fixed team has one generation."""


class RunRecorder:
    """Writes a run's events to ``events.jsonl`` and to further sinks; other ranks keep silent.

    Args:
        ddp: The team.
        folder: The run folder.

    Attributes:
        tally: The events, added up.
        parked: Ranks that were parked in the newest committed window.
    """

    def __init__(self, ddp: Ddp, folder: Path) -> None:
        self._ddp = ddp
        self._path = folder / EVENTS
        self._active = ddp.is_main_process
        self._sinks: list[Sink] = []
        self._watch = StragglerWatch(ddp.world_size)
        self._shares: tuple[int, ...] = ()
        self._has_started = False
        self.parked: tuple[int, ...] = ()
        self.tally = EventTally()
        if self._active:
            self._sinks = [JsonlSink(self._path, on_warning=_warn)]

    def show(self, *, terminal: bool, tensorboard: Path | None) -> None:
        """Tells people too: on standard error, and in a folder of TensorBoard files."""
        if self._active and terminal:
            self.add_sink(ProgressSink(sys.stderr))
        if self._active and tensorboard is not None:
            self.add_sink(TensorBoardSink(tensorboard))

    def add_sink(self, sink: Sink) -> None:
        """Hands every further event to this sink too; it is closed with the recorder."""
        self._sinks.append(sink)

    def emit(self, event: Mapping[str, Any]) -> None:
        """Hands an event to every sink."""
        if self._active:
            self.tally.add(event)
            for sink in self._sinks:
                sink.emit(event)

    def start(
        self,
        *,
        run: str,
        policy: str,
        unit: str,
        num_samples: int,
        total_windows: int,
        resumed_from: Path | None,
        new_data: bool = False,
        **details: Any,
    ) -> None:
        """Says who is there and what will be done; at a resume, which events are void.

        What earlier sessions of a resumed run have done counts in the tally.
        """
        if not self._active:
            return
        self._has_started = True
        now, ddp = time.time(), self._ddp
        if resumed_from is not None:
            event = run_resumed_event(
                t=now, window=ddp.window, path=str(resumed_from), new_data=new_data
            )
            events = read_events(self._path, self._skip)
            self.tally = EventTally.of(effective_events([*events, event])[:-1])
            self.emit(event)
        self.emit(
            run_started_event(
                t=now,
                run=run,
                members=[m.member for m in ddp.members],
                policy=policy,
                backend=ddp.assembly.comm.backend,
                unit=unit,
                num_samples=num_samples,
                total_windows=total_windows,
                window=ddp.window,
                backend_reason=ddp.assembly.backend_reason,
                emulated={str(m.rank): m.emulated for m in ddp.members if m.emulated != 1},
                **details,
            )
        )
        for m in ddp.members:
            device = f"{m.device} ({m.device_name})"
            self.emit(
                worker_started_event(
                    t=now, rank=m.rank, member=m.member, pid=m.pid, host=m.host, device=device
                )
            )

    def window(self, result: WindowResult) -> None:
        """Records a committed window, its plan where shares changed, and stragglers."""
        if not self._active:
            return
        shares = tuple(r.samples for r in result.ranks)
        # Windows that are closed by time differ by a step or two: a new anchor is a new plan.
        planned = shares if result.cadence is None else (result.cadence.anchor,)
        if planned != self._shares:
            self._shares = planned
            self.emit(
                plan_event(
                    t=result.applied_t,
                    window=result.window,
                    generation=GENERATION,
                    epoch=result.epoch,
                    start=result.start,
                    size=result.size,
                    shares=shares,
                )
            )
        event = window_event(
            t=result.applied_t,
            window=result.window,
            generation=GENERATION,
            epoch=result.epoch,
            committed=result.ranges or [result.committed],
            ranks=[self._row(rank, record) for rank, record in enumerate(result.ranks)],
        )
        self.parked = tuple(sorted(self._ddp.assembly.engine.team.parked))
        self.emit(
            {
                **event,
                "loss": result.loss,
                "lr": result.lr,
                "grad_norm": result.grad_norm,
                "skipped": result.skipped,
                "parked": list(self.parked),
                **_cadence_fields(event, result),
            }
        )
        for rank, compute_s, expected_s in self._watch.observe(result.ranks):
            self.emit(
                straggler_event(
                    t=time.time(),
                    rank=rank,
                    member=self._ddp.members[rank].member,
                    window=result.window,
                    compute_s=compute_s,
                    expected_s=expected_s,
                )
            )

    def evaluation(self, window: int, loss: float, weight: float, elapsed_s: float) -> None:
        """Records a held-out loss."""
        self.emit(
            eval_event(t=time.time(), window=window, loss=loss, weight=weight, elapsed_s=elapsed_s)
        )

    def checkpoint(self, written: WrittenCheckpoint) -> None:
        """Records a checkpoint that has reached the disk."""
        self.emit(
            checkpoint_event(
                t=time.time(),
                window=written.step,
                path=str(written.path),
                num_bytes=written.num_bytes,
                write_s=written.write_s,
            )
        )

    def missed_checkpoint(self, step: int, reason: str) -> None:
        """Records a checkpoint that was not written."""
        self.emit(checkpoint_missed_event(t=time.time(), window=step, reason=reason))

    def finish(self, window: int, reason: str, message: str | None = None) -> None:
        """Records the end of a run that has started."""
        if not self._has_started:
            return
        self.emit(run_finished_event(t=time.time(), window=window, reason=reason, message=message))

    def close(self) -> None:
        """Closes all sinks; idempotent."""
        while self._sinks:
            self._sinks.pop().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Records an error as the end of the run, and closes."""
        try:
            if isinstance(error, Exception):
                self.finish(self._ddp.window, "failed", f"{type(error).__name__}: {error}")
        finally:
            self.close()

    def _skip(self, line: int, why: str) -> None:
        _warn(f"{self._path}:{line} is not an event and is left out of the run's totals: {why}")

    def _row(self, rank: int, record: RankRecord) -> RankRow:
        return RankRow(
            rank=rank,
            member=self._ddp.members[rank].member,
            samples=record.samples,
            weight=record.weight,
            loss=record.loss_sum / record.weight if record.weight else None,
            compute_s=record.compute_s,
            wait_s=record.wait_s,
            sync_s=record.sync_s,
        )


def _cadence_fields(event: Mapping[str, Any], result: WindowResult) -> dict[str, Any]:
    """What an event of a window of local steps says beside."""
    cadence = result.cadence
    if cadence is None:
        return {}
    rows = [
        {**row, "steps": record.steps, "stale_steps": record.stale_steps}
        for row, record in zip(event["ranks"], result.ranks, strict=True)
    ]
    return {
        "ranks": rows,
        "turns": result.progress.steps + result.progress.skipped,
        "anchor": cadence.anchor,
        "window_s": cadence.window_s if math.isfinite(cadence.window_s) else None,
        "divergence": cadence.divergence,
        "guard": cadence.guard,
    }


class StragglerWatch:
    """Notices a rank that has become slower than it was, by its own seconds per sample.

    A rank that is slow all the time is no straggler: the plan gives it less.
    """

    FACTOR = 1.5
    IN_A_ROW = 3
    MEMORY = 15

    def __init__(self, world_size: int) -> None:
        self._seconds: list[deque[float]] = [deque(maxlen=self.MEMORY) for _ in range(world_size)]
        self._strikes = [0] * world_size

    def observe(self, ranks: Sequence[RankRecord]) -> list[tuple[int, float, float]]:
        """Takes a window.

        Returns:
            ``(rank, compute_s, expected_s)`` of ranks that have just become stragglers.
        """
        found = []
        for rank, record in enumerate(ranks):
            if (per_sample_s := record.per_sample_s) is None:
                continue
            known = self._seconds[rank]
            usual_s = median(known) if len(known) >= self.IN_A_ROW else per_sample_s
            slow = per_sample_s > self.FACTOR * usual_s
            self._strikes[rank] = self._strikes[rank] + 1 if slow else 0
            if self._strikes[rank] == self.IN_A_ROW:
                found.append((rank, record.compute_s, usual_s * record.samples))
            known.append(per_sample_s)
        return found


def _warn(text: str) -> None:
    say(f"warning: {text}")
