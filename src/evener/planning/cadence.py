"""CADENCE and ASYNC: windows of local steps, planned by El Che. Pure."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, final

from evener.planning.elche import ElChe
from evener.planning.guard import DivergenceGuard, Verdict, ask_guard
from evener.planning.plans import LocalPlan
from evener.planning.policies import ApplyPolicy, Planner
from evener.planning.report import Report
from evener.planning.shares import fastest_shares
from evener.planning.speed import CostModel

_OF_WHAT_OTHERS_BRING = 0.5
"""Fraction of the contribution of all ranks but the fastest that averaging may take."""


@final
class CadencePolicy(Planner):
    """Plans windows that the slowest rank fills with ``anchor`` local steps.

    Before speeds are known, a window is one step of each rank, or follows the user's hint. Then
    windows last as long as the slowest rank needs for its anchor, and ranks close them by time. The
    last batches of an epoch are divided so that all ranks finish together.

    Args:
        members: Member ids, by rank.
        elche: The cadence, with its settings.
        guard: Judges the divergence of ranks.
        max_batch_diff: Most local steps by which a rank may be ahead of another in a window; 0 is
            lockstep, ``None`` no limit.
        way: The policy of the run.
    """

    def __init__(
        self,
        members: Sequence[str],
        elche: ElChe,
        guard: DivergenceGuard,
        *,
        max_batch_diff: int | None = None,
        way: ApplyPolicy = ApplyPolicy.CADENCE,
    ) -> None:
        super().__init__(members)
        self.elche = elche
        self._guard = guard
        self._max_batch_diff = max_batch_diff
        self._way = way
        #: Whether there are other ranks with which to average.
        self._in_background = way.in_background and len(members) > 1
        self._verdict = Verdict.STABLE
        self._samples_per_step = [0.0] * len(members)
        self._last_anchor = 0
        self._absent: frozenset[int] = frozenset()

    def set_absent(self, ranks: frozenset[int]) -> None:
        """Give these ranks no work, and forget their speeds."""
        self._absent = ranks
        if ranks:
            self.elche.forget(ranks)

    def solo_speeds(self, batch_size: int) -> tuple[float, ...]:
        """Return measured samples per second of each rank alone; see ``Planner``."""
        return tuple(
            1000.0 * samples / ms if ms > 0 else 0.0
            for samples, ms in zip(self._samples_per_step, self.elche.ms_per_batch, strict=True)
        )

    def observe(self, reports: Sequence[Report], sync_s: float) -> None:
        """Learn from a window.

        Args:
            reports: One per rank.
            sync_s: Seconds that averaging took, without waits for the slowest rank; of the previous
                window if it is known only afterwards.
        """
        self._verdict, factor = ask_guard(self._guard, max(r.divergence for r in reports))
        steps = [r.steps - r.warmup_steps for r in reports]
        if not any(steps):
            return
        for rank, report in enumerate(reports):
            if report.steps:
                self._samples_per_step[rank] = report.samples / report.steps
        busy_ms = [1000.0 * (r.busy_s - r.warmup_busy_s) for r in reports]
        # Without a sync time the anchor stays as it is.
        if self._verdict is not Verdict.STABLE:
            sync_s = 0.0
        self.elche.report_timing(busy_ms, steps, 1000.0 * sync_s * self._weight(busy_ms, steps))
        if self._verdict is Verdict.NUDGE_DOWN:
            self.elche.nudge_anchor_down(factor)

    def plan(
        self, window: int, epoch: int, *, left: int, limit: int | None, stop: bool = False
    ) -> LocalPlan:
        """Plan a window.

        Args:
            window: Its number.
            epoch: Its epoch.
            left: Remaining batches of the epoch.
            limit: Remaining local steps of the run; ``None`` for any number.
            stop: Whether the team stops with this window.
        """
        elche = self.elche
        counts: Sequence[int] = elche.batch_counts
        if not elche.is_calibrated and not elche.has_speed_hint:
            counts = [1] * len(self.members)
        slowest = min(count for rank, count in enumerate(counts) if rank not in self._absent)
        steps = self._bounded(counts, slowest)
        most = self._bounded([c + max(2, c // 2) for c in steps], slowest)
        available = left if limit is None else min(left, limit)
        is_tail = available <= sum(most)
        window_ms = elche.anchor_wall_ms
        if is_tail:
            steps = most = self._last_steps(available)
            window_ms = max(1.0, *(c * ms for c, ms in zip(steps, self._ms(), strict=True)))
            rest = self._split(left - sum(steps))
            queues = tuple(s + r for s, r in zip(steps, rest, strict=True))
        else:
            if not elche.is_calibrated:  # this window is not closed by time
                most = steps
            # Enough for this window, and in ASYNC for the beginning of the next.
            queues = tuple(2 * m for m in most)
        self._give_reason(window, self._reason(is_tail=is_tail))
        self._last_anchor = elche.anchor
        return LocalPlan(
            window=window,
            epoch=epoch,
            window_s=window_ms / 1000.0 if elche.is_calibrated else math.inf,
            blocking=(
                stop
                or is_tail
                or not self._in_background
                or not elche.is_calibrated
                # Until this window's average is applied, ranks may make as many steps of the next.
                or (limit is not None and limit < 2 * sum(most))
            ),
            steps=steps,
            most=most,
            queues=queues,
            # Otherwise a rank would fall too far behind a rank that makes all of its steps.
            least=0 if self._max_batch_diff is None else max(0, max(most) - self._max_batch_diff),
            anchor=elche.anchor,
            verdict=self._verdict,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the learnt state in JSON types."""
        return {
            "policy": self._way.value,
            "members": list(self.members),
            "cadence": self.elche.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state`` if it is of the same members, in any order.

        With another team, or after a run of SYNC, the cadence starts over: a wrong one would cost
        more than one window of a step per rank.
        """
        saved = list(state.get("members", ()))
        if sorted(saved) != sorted(self.members) or "cadence" not in state:
            return
        order = [saved.index(member) for member in self.members]
        by_rank = {key: [state["cadence"][key][i] for i in order] for key in ("counts", "ms")}
        self.elche.load_state_dict({**state["cadence"], **by_rank})

    def _weight(self, busy_ms: Sequence[float], steps: Sequence[int]) -> float:
        """Return the factor for the averaging time that is reported to El Che.

        Averaging takes as long after a short window, such as the last of an epoch, as after a full
        one; and its time is known only with the report of the next window. The anchor affects the
        fraction of averaging in a full window, so that fraction is reported.

        If averaging takes more time than all ranks but the fastest save, the fastest would be
        faster alone. So averaging is limited to half of their contribution, like
        ``overhead_target``.
        """
        elche = self.elche
        slowest_ms = max(ms / n for ms, n in zip(busy_ms, steps, strict=True) if n)
        part = max(busy_ms) / (elche.anchor * slowest_ms) if slowest_ms > 0 else 1.0
        speeds = [1.0 / ms for ms in elche.ms_per_batch if ms > 0]
        if len(speeds) < 2:
            return part
        brought = 1.0 - max(speeds) / math.fsum(speeds)
        return part * max(1.0, elche.overhead_target / (_OF_WHAT_OTHERS_BRING * brought))

    def _reason(self, *, is_tail: bool) -> str:
        """Return why the next plan has another anchor than the last one, or is short."""
        elche, before = self.elche, self._last_anchor
        if not elche.is_calibrated:
            return "the ranks' speeds are not known yet"
        if elche.anchor < before and self._verdict is Verdict.NUDGE_DOWN:
            return "the ranks diverged, so they average more often"
        if elche.anchor != before:
            took = "more than" if elche.anchor > before else "less than half of"
            return f"averaging took {took} {elche.overhead_target:.0%} of the time"
        return "it is the last window of the epoch" if is_tail else ""

    # ── counts ───────────────────────────────────────────────────────────────────────────────────

    def _bounded(self, counts: Sequence[int], slowest: int) -> tuple[int, ...]:
        """Return counts within the allowed lead over the slowest, and 0 for absent ranks."""
        furthest = math.inf if self._max_batch_diff is None else slowest + self._max_batch_diff
        return tuple(
            0 if rank in self._absent else int(min(count, furthest))
            for rank, count in enumerate(counts)
        )

    def _ms(self) -> list[float]:
        """Return milliseconds per step by rank; an untimed rank counts as the slowest."""
        known = self.elche.ms_per_batch
        slowest = max(known)
        if slowest > 0:
            return [ms or slowest for ms in known]
        return [1.0 / count for count in self.elche.batch_counts]

    def _last_steps(self, available: int) -> tuple[int, ...]:
        """Return steps by rank; without a limit on how far ranks are apart, they are all."""
        if self._max_batch_diff is None:
            return self._split(available)
        present = [rank for rank in range(len(self.members)) if rank not in self._absent]
        least = available // len(present)
        if least:
            return self._bounded(self._split(available, least), least)
        # The first ranks: the choice must not depend on speed.
        return tuple(int(rank in present[:available]) for rank in range(len(self.members)))

    def _split(self, total: int, least: int = 0) -> tuple[int, ...]:
        """Return steps by rank, ``least`` or more, that sum to ``total``; the earliest finish."""
        costs = [CostModel(0.0, ms) for ms in self._ms()]
        return fastest_shares(total, costs, [None] * len(costs), least=least, idle=self._absent)
