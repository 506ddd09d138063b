"""What ranks tell one another about windows; and with it, that the window before is committed."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from evener.engine.engine import Engine
from evener.engine.plans import AppliedWindow, PlanQueue
from evener.engine.schedule import agree_on_rates, digest_of, rates_of, set_rates
from evener.engine.sync_row import (
    Note,
    Row,
    decode_row,
    encode_row,
    refuse_other_parameters,
    seconds_of_exchange,
)
from evener.engine.team import Meeting
from evener.engine.updates import Updater
from evener.planning.plan import WindowPlan, WindowReport


@dataclass(frozen=True, slots=True)
class Met:
    """What came of a meeting about a window."""

    rows: list[Row]
    abandoned: bool
    wait_s: float
    exchange_s: float

    @property
    def reports(self) -> list[WindowReport]:
        """What each rank did."""
        return [row.report for row in self.rows]

    @property
    def buffers_changed(self) -> bool:
        """Whether a buffer was written on any rank."""
        return any(row.note.buffers_changed for row in self.rows)


class WindowMeetings:
    """One rank's side of the meetings.

    Args:
        engine: Whose windows they are.
        plans: Agreed plans; committing a window commits its lease.
        updater: Knows gradients and learning rates.

    Attributes:
        applied: The window that is applied and not known to be committed.
        draft: This rank's draft of the plan after the next, while its window is open.
    """

    def __init__(self, engine: Engine, plans: PlanQueue, updater: Updater) -> None:
        self.applied: AppliedWindow | None = None
        self.draft: list[float] | None = None
        self._engine = engine
        self._plans = plans
        self._updater = updater

    def meet(self, kind: Meeting, payload: Sequence[float]) -> list[list[float]]:
        """Exchanges rows about anything; all ranks call it together."""
        engine = self._engine
        rows, leaving = engine.team.meet(
            kind, window=engine.window, leaving=int(engine.wants_stop()), payload=payload
        )
        engine.stopping |= leaving > 0
        return rows

    def flush(self) -> None:
        """Commits the window before; all ranks call it together."""
        note = self._note(at_rest=True)
        payload = encode_row(WindowReport(), (), note, self._engine.team.world_size)
        self._commit([decode_row(n) for n in self.meet(Meeting.FLUSH, payload)])

    def close(
        self,
        plan: WindowPlan | None,
        report: WindowReport,
        *,
        part: int | None = None,
        idle: bool = False,
    ) -> Met:
        """Learns what all ranks did in the window, and that the one before is committed."""
        draft, misfit = [], None
        if plan is not None:
            if self.draft is None:
                self.draft = self._plans.draft(self._engine.window)
            draft, misfit = self.draft, self._plans.policy.rank_to_park(self._plans.batch_size)
        note = self._note(park=misfit, part=part, at_rest=idle)
        own = Row(report, draft, note)
        payload = encode_row(report, draft, note, self._engine.team.world_size)
        kind = Meeting.STEP if plan is None else Meeting.WINDOW
        started_s = time.perf_counter()
        numbers, leaving = self._engine.team.meet(
            Meeting.IDLE if idle else kind,
            window=self._engine.window,
            leaving=report.leaving,
            payload=payload,
        )
        rows = [
            own if r == self._engine.team.rank else decode_row(n) for r, n in enumerate(numbers)
        ]
        wait_s = time.perf_counter() - started_s
        exchange_s = math.nan
        if self.applied is not None:
            exchange_s = seconds_of_exchange(rows, self._engine.team.parked)
        self._commit(rows)
        engine = self._engine
        if engine.limits.learn([r.note.limit for r in rows]):
            engine.policy.set_micro_batch_sizes(engine.limits.sizes)
        engine.stopping |= leaving > 0
        refuse_other_parameters(rows, self._engine.team.parked)
        self._agree_on_rates({r: w.note for r, w in enumerate(rows) if r not in engine.team.parked})
        return Met(rows, leaving == 2, wait_s, exchange_s)

    def report(
        self, abandon: bool = False, part: int | None = None, *, turns: bool = False
    ) -> WindowReport:
        """What this rank did; in an optimizer's turn, as far as its own losses go."""
        share = self._engine.share
        closes_turns = turns and part is None
        index = None if closes_turns else self._updater.gather(part)
        loss_sum = share.loss_sum_of(part)
        non_finite = 0 if index is None else index + 1
        if not math.isfinite(loss_sum):
            non_finite = -1
        update_s = self._updater.update_s
        # The part of the update that its samples stand for goes with a warm-up.
        idle_s = update_s * share.warmup_samples / share.samples if share.warmup_samples else 0.0
        return WindowReport(
            weight=share.weight if closes_turns else share.weight_of(part),
            loss_sum=loss_sum,
            # The last update is this rank's own work too, and part of what it costs a window.
            compute_s=share.compute_s + update_s,
            micro_batches=share.micro_batches,
            samples=share.samples,
            non_finite=non_finite,
            leaving=2 if abandon else int(self._engine.wants_stop()),
            warmup_s=share.warmup_s + idle_s,
            warmup_micro_batches=share.warmup_micro_batches,
            warmup_samples=share.warmup_samples,
        )

    def _note(
        self, *, park: int | None = None, part: int | None = None, at_rest: bool = False
    ) -> Note:
        wait_s, sync_s = (a.wait_s, a.sync_s) if (a := self.applied) else (0.0, 0.0)
        return Note(
            park=park,
            buffers_changed=self._engine.buffers.changed(),
            wait_s=wait_s,
            sync_s=sync_s,
            trainable=len(self._engine.flat.parameters),
            part=part,
            rates=digest_of(rates_of(self._updater.optimizers)),
            limit=self._engine.limits.own,
            at_rest=at_rest,
            own_norm=self._updater.own_norm,
            calls=self._engine.team.call_is_due,
        )

    def _agree_on_rates(self, notes: Mapping[int, Note]) -> None:
        """Adopt the learning rates of the ranks that have a share, where this rank has none.

        A user may set them in the loop, whose body does not run on a rank without a share.

        Raises:
            UsageError: On every rank, when ranks that have a share differ.
        """
        idle = all(note.at_rest for note in notes.values())  # all the others have left the loop
        if idle or len({note.rates for note in notes.values()}) == 1:
            return
        team, optimizers = self._engine.team, self._updater.optimizers
        told = team.introduce({"rank": team.rank, "rates": rates_of(optimizers)})
        agreed = agree_on_rates(
            {t["rank"]: t["rates"] for t in told if not notes[t["rank"]].at_rest}
        )
        set_rates(optimizers, agreed)

    def _commit(self, rows: Sequence[Row]) -> None:
        """All ranks are here, so all have applied the window before: it is committed."""
        if self.applied is None:
            return
        self._compare_last(rows)
        applied, self.applied = self.applied, None
        if applied.lease is not None:
            self._plans.commit(applied.lease)
        if not self._engine.options.on_commit:
            return
        ranks = tuple(
            replace(record, wait_s=row.note.wait_s, sync_s=row.note.sync_s)
            for record, row in zip(applied.result.ranks, rows, strict=True)
        )
        result = replace(applied.result, ranks=ranks)
        # Buffers have moved on with this rank's part of the next window: show the consensus.
        with self._engine.buffers.consensus():
            self._engine.tell_committed(result)

    def _compare_last(self, rows: Sequence[Row]) -> None:
        """Compares replicas where no window follows, so that the last of a run is not left out.

        The rows say so, as a rank without a share may be in its loader where others end the epoch.
        """
        parked = self._engine.team.parked
        if all(row.note.at_rest for rank, row in enumerate(rows) if rank not in parked):
            self._engine.verify()
