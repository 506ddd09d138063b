"""SYNC: a fixed global batch, split so that all ranks finish together. Pure."""

import math
from collections.abc import Collection, Mapping, Sequence
from statistics import median, median_low
from typing import Any, Final, final

from evener.errors import CheckpointError, ConfigError, ProtocolError
from evener.planning.apportion import apportion
from evener.planning.plan import WindowPlan
from evener.planning.policies import LEAST_APART, ApplyPolicy, Forecast, Parking, Policy
from evener.planning.report import Report
from evener.planning.shares import all_seconds, fastest_shares, finish_s, without_ones
from evener.planning.speed import CostModel, SpeedModel, relative_error

_DEAD_BAND: Final = 0.02
"""Shares stay as they are while a change promises to save less of the window than this."""

_STEADY_WINDOWS: Final = 16
"""After so many windows with the same shares half of that is enough: what is small in a window
adds up, and shares held forever would hide that a rank's cost is mostly fixed."""

_LARGEST_RATIO: Final = 16.0
"""So many times as fast as another a rank counts at most, by a calibration (which times other work
than the run's) or by a first window or two (which something else may have disturbed): a rank that
was all but left out would hardly be measured again."""

_RETRY: Final = 0.02
"""Part of the time spent on looking whether a rank without work has become fast again."""

_MEMORY: Final = 15
"""Exchanges remembered."""

_MEMORY_OF_BEFORE: Final = 3
"""Of these, how many are kept when the team changes: new measurements soon outvote them."""

_PATIENCE: Final = 6
"""Windows in a row in which a rank must cost more than it contributes before it is parked."""

_TRIALS: Final = 0.01
"""Part of the time spent on trying parked ranks again."""

_TRIAL_WINDOWS: Final = 5
"""Windows in which a rank that is tried again has work, even if it is slow."""

_UNKNOWN_RATIO: Final = 8.0
"""A rank that never had work may be so many times slower than the calibration says, as that is
clipped: its first trial must not be expensive."""

_TRANSFER: Final = 4
"""A rank that is called back receives about so many times what is exchanged in a window:
parameters, and what optimizers keep of them."""

_NUM_SIZES: Final = 4
"""Sizes of windows whose shares are remembered."""


@final
class SyncPolicy(Policy):
    """Splits a fixed global batch so that all ranks finish together.

    Equal shares until speeds are known, by a hint, a calibration or windows. Then the shares with
    the earliest finish, unless the present ones are within 2 % of it: shares that follow noise cost
    more than they gain. A rank that is too slow for a single sample is tried again now and then, as
    rarely as keeps the time lost below 2 %.

    Args:
        members: Member ids, by rank.
        micro_batch_sizes: Most samples in one forward and backward, by rank; ``None`` for a whole
            share in one.
        avoid_ones: Give no rank a micro-batch of one sample where that can be avoided, for models
            with batch statistics.

    Raises:
        ConfigError: No members, a member twice, or sizes that do not fit them.
    """

    def __init__(
        self,
        members: Sequence[str],
        micro_batch_sizes: Sequence[int | None],
        *,
        avoid_ones: bool = False,
    ) -> None:
        if not members or len(set(members)) != len(members):
            raise ConfigError(f"members={list(members)} must be different ids, at least one")
        super().__init__(members)
        self._avoid_ones = avoid_ones
        self._speeds = [SpeedModel() for _ in members]
        #: Seconds a sample that were given, in any unit; they count until the first measurement.
        self._hints: list[float | None] = [None] * len(members)
        #: What follows from the speeds: costs, and by size the best shares and their finish.
        self._costs: tuple[CostModel, ...] | None = None
        self._best: dict[int, tuple[tuple[int, ...], float]] = {}
        #: Whether each rank that is present makes its part of the optimizer's update.
        self._divides_updates = False
        #: Seconds of exchanges, by the number of ranks that took part.
        self._exchanges_s: dict[int, list[float]] = {}
        #: By rank, windows in a row without work, and those in which it cost more than it brought.
        self._idle_windows = [0] * len(members)
        self._useless_windows = [0] * len(members)
        #: Shares in use, by size of the window (the last one of an epoch is shorter), and for how
        #: many windows they have been kept.
        self._in_use: dict[int, tuple[tuple[int, ...], int]] = {}
        self._last_size = 0
        self._absent: frozenset[int] = frozenset()
        self.set_micro_batch_sizes(micro_batch_sizes)
        self.set_parked(frozenset())
        #: Why the next plan may differ from the last one.
        self._occasion = "the first shares by speed"

    @property
    def is_calibrated(self) -> bool:
        """Return whether every member's speed is known to some degree; see ``Planner``."""
        return all(
            speed.cost is not None or hint is not None
            for speed, hint in zip(self._speeds, self._hints, strict=True)
        )

    # ── what is known ────────────────────────────────────────────────────────────────────────────

    def set_micro_batch_sizes(self, sizes: Sequence[int | None]) -> None:
        """Set how shares are computed; see ``Policy``. Shares in use are forgotten."""
        if len(sizes) != len(self.members):
            raise ConfigError(
                f"{len(sizes)} micro-batch sizes were given for {len(self.members)} members"
            )
        for member, size in zip(self.members, sizes, strict=True):
            if size is not None and size < 1:
                raise ConfigError(
                    f"micro_batch_size={size} of member {member!r} must be at least 1"
                )
        self.micro_batch_sizes = tuple(sizes)
        self._begin_anew("the limits of micro-batches have changed")

    def set_absent(self, ranks: frozenset[int]) -> None:
        """Set the numbers that no member of an elastic team has; see ``Policy``."""
        self._absent = ranks
        self.set_parked(self._parked)

    def set_parked(self, ranks: frozenset[int]) -> None:
        """Give these ranks nothing to do until further notice; see ``Policy``."""
        self._parked, self._away = ranks, ranks | self._absent
        self._present = [r for r in range(len(self.members)) if r not in self._away]
        for known in self._exchanges_s.values():
            del known[:-_MEMORY_OF_BEFORE]
        self._useless_windows = [0] * len(self.members)
        names = ", ".join(map(str, sorted(ranks)))
        self._begin_anew(
            f"without rank {names}, which is parked" if ranks else "all ranks are present"
        )

    def hint(self, speeds: Sequence[float]) -> None:
        """Set the speeds of the ranks relative to one another, until they are measured.

        Args:
            speeds: One a rank, such as ``(1.0, 0.5)``; larger is faster, the unit is free.

        Raises:
            ConfigError: Not one speed a rank, or a speed that is not finite and above 0.
        """
        if len(speeds) != len(self.members):
            raise ConfigError(
                f"speed_hint={list(speeds)} has {len(speeds)} speeds for a team of "
                f"{len(self.members)}; give one a rank"
            )
        if not all(0.0 < speed < math.inf for speed in speeds):
            raise ConfigError(
                f"speed_hint holds {list(speeds)}; speeds are finite numbers above 0, such as 1.0 "
                "for one rank and 0.5 for another that takes twice as long"
            )
        self._hints = [1.0 / speed for speed in speeds]
        self._forget_forecasts()

    def calibrate(self, speeds: Sequence[float]) -> None:
        """Set the speeds of the ranks until they are measured; see ``Policy``."""
        if all(0.0 < speed < math.inf for speed in speeds):
            self.hint([max(speed, max(speeds) / _LARGEST_RATIO) for speed in speeds])

    def observe(self, reports: Sequence[Report], plan: WindowPlan, sync_s: float) -> None:
        """Learn from a window; see ``Policy``."""
        if len(reports) != len(self.members) or len(plan.shares) != len(self.members):
            raise ProtocolError(
                f"window {plan.window} has {len(reports)} reports and {len(plan.shares)} shares "
                f"for a team of {len(self.members)}"
            )
        for rank, (report, share) in enumerate(zip(reports, plan.shares, strict=True)):
            self._speeds[rank].observe(
                report.samples - report.warmup_samples,
                report.micro_batches - report.warmup_micro_batches,
                report.compute_s - report.update_s - report.warmup_s,
                report.update_s * max(report.update_parts, 1),
            )
            self._idle_windows[rank] = 0 if share else self._idle_windows[rank] + 1
        self._divides_updates = any(report.update_parts > 1 for report in reports)
        if 0.0 <= sync_s < math.inf:
            known = self._exchanges_s.setdefault(len(self._present), [])
            known.append(sync_s)
            del known[:-_MEMORY]
        self._forget_forecasts()

    def forget(self, ranks: Collection[int]) -> None:
        """Start ranks as new ones, which count as fast until they are measured; see ``Planner``."""
        fastest = min((hint for hint in self._hints if hint is not None), default=1.0)
        for rank in ranks:
            self._speeds[rank], self._hints[rank] = SpeedModel(), fastest
            self._idle_windows[rank] = 0
        self._begin_anew(self._occasion)

    def solo_speeds(self, batch_size: int) -> tuple[float, ...]:
        """Return the predicted samples per second of each rank alone; see ``Policy``."""
        return tuple(
            0.0 if speed.cost is None else speed.cost.samples_per_s(batch_size, size)
            for speed, size in zip(self._speeds, self.micro_batch_sizes, strict=True)
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what was learnt, by member id, as plain JSON types."""
        known = zip(self.members, self._speeds, strict=True)
        measured = {member: s.state_dict() for member, s in known if s.cost is not None}
        return {"policy": ApplyPolicy.SYNC.value, "members": measured}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``, even of another team: members that are not here are ignored.

        Members of which the state says nothing keep what is known of them. The time of an exchange
        is not part of it, as that belongs to a team and not to a member. See ``Policy``.
        """
        policy, saved = state.get("policy"), state.get("members")
        if policy == "fixed":
            return  # that run had fixed shares and learnt nothing
        if policy != ApplyPolicy.SYNC.value:
            raise CheckpointError(
                f"the checkpoint's planner has {policy=}, this run has "
                f"{ApplyPolicy.SYNC.value!r}: give the policy of that run"
            )
        if not isinstance(saved, Mapping):
            raise CheckpointError(
                "the checkpoint's planner state is damaged (no members): resume from an older "
                "checkpoint"
            )
        for member, speed in zip(self.members, self._speeds, strict=True):
            if member in saved:
                speed.load_state_dict(saved[member])
        self._begin_anew(self._occasion)

    # ── what is predicted ────────────────────────────────────────────────────────────────────────

    @property
    def exchange_s(self) -> float:
        """Return usual seconds of an exchange of the present ranks, without waits; 0 if unknown."""
        known = self._exchanges_with(len(self._present))
        return median_low(known) if known else 0.0

    def _exchanges_with(self, num_ranks: int) -> Sequence[float]:
        """Return seconds of exchanges of so many ranks, or of the nearest number above one."""
        if num_ranks in self._exchanges_s or num_ranks == 1:
            return self._exchanges_s.get(num_ranks, ())
        others = [n for n in self._exchanges_s if n > 1]
        return self._exchanges_s[min(others, key=lambda n: abs(n - num_ranks))] if others else ()

    @property
    def costs(self) -> tuple[CostModel, ...] | None:
        """Return the predicted cost by rank, all in one unit; ``None`` if no rank's speed is known.

        A rank of which nothing is known is taken for a middling one, so that it gets work and is
        measured. A rank that is only hinted at is put on the scale of those that are measured.
        """
        return self._costs_with(len(self._present))

    def _costs_with(self, num_ranks: int) -> tuple[CostModel, ...] | None:
        """Return the costs where so many ranks are present, which may divide the update."""
        if self._costs is None:
            self._costs = self._presumed_costs()
        if self._costs is None or not self._divides_updates:
            return self._costs
        return tuple(cost._replace(window_s=cost.window_s / num_ranks) for cost in self._costs)

    def _presumed_costs(self) -> tuple[CostModel, ...] | None:
        costs = [speed.cost for speed in self._speeds]
        if not any(costs):
            costs = [None if hint is None else CostModel(0.0, hint) for hint in self._hints]
        known = [cost for cost in costs if cost is not None]
        if all(speed.is_settled for speed in self._speeds) or not known:
            return tuple(known) or None
        middle = CostModel(median(c.fixed_s for c in known), median(c.per_sample_s for c in known))
        slowest_s = _LARGEST_RATIO * min(cost.per_sample_s for cost in known)
        units = [c.per_sample_s / h for c, h in zip(costs, self._hints, strict=True) if c and h]
        presumed = []
        for cost, hint, speed in zip(costs, self._hints, self._speeds, strict=True):
            if cost is None:
                cost = CostModel(0.0, hint * median(units)) if hint and units else middle
            elif speed.cost is not None and not speed.is_settled:
                cost = cost.scaled(min(1.0, slowest_s / cost.per_sample_s))
            presumed.append(cost)
        return tuple(presumed)

    def forecast(self, batch_size: int, away: frozenset[int]) -> Forecast:
        """Return what a window takes if these ranks are away; see ``Policy``."""
        working = [r for r in range(len(self.members)) if r not in away]
        costs = self._costs_with(len(working))
        if costs is None:
            return Forecast()
        ranks = [costs[r] for r in working], [self.micro_batch_sizes[r] for r in working]
        finished_s = finish_s(fastest_shares(batch_size, *ranks), *ranks)
        compute_s = max([finished_s, *(cost.window_s for cost in ranks[0])])
        differs = max(self._speeds[r].relative_error for r in working)
        exchanges_s = self._exchanges_with(len(working))
        exchange_s = median_low(exchanges_s) if exchanges_s else 0.0
        error_s = math.hypot(compute_s * differs, exchange_s * relative_error(exchanges_s))
        return Forecast(compute_s + exchange_s, exchange_s, error_s)

    def _best_shares(self, size: int, costs: Sequence[CostModel]) -> tuple[tuple[int, ...], float]:
        """Return the shares with the earliest finish, and that."""
        if size not in self._best:
            shares = self._fastest(size, costs, {})
            self._best[size] = shares, finish_s(shares, costs, self.micro_batch_sizes)
        return self._best[size]

    def _fastest(
        self, size: int, costs: Sequence[CostModel], least: Mapping[int, int]
    ) -> tuple[int, ...]:
        """Return the shares with the earliest finish, and no less than ``least`` by rank."""
        best = fastest_shares(
            size,
            [costs[r] for r in self._present],
            [self.micro_batch_sizes[r] for r in self._present],
            [least.get(r, 0) for r in self._present],
        )
        shares = [0] * len(costs)
        for rank, share in zip(self._present, best, strict=True):
            shares[rank] = share
        return tuple(shares)

    def _forget_forecasts(self) -> None:
        """Forget what follows from the speeds, because they are others now."""
        self._costs = None
        self._best = {}

    def _begin_anew(self, occasion: str) -> None:
        """Forget the shares in use."""
        self._occasion = occasion
        self._in_use.clear()
        self._forget_forecasts()

    # ── shares ───────────────────────────────────────────────────────────────────────────────────

    def plan(
        self, window: int, epoch: int, start: int, size: int, *, work_for_all: float = 0.0
    ) -> WindowPlan:
        """Plan a window with the earliest predicted finish; see ``Policy``."""
        costs = self.costs if len(self.members) > 1 else None
        least = 0
        if costs is None:
            present = [float(rank not in self._away) for rank in range(len(self.members))]
            shares, reason = apportion(size, present), "the shares are equal until speeds are known"
        else:
            reason, self._occasion = self._occasion, ""
            shares, reason = self._steady_shares(size, costs, reason)
            if work_for_all:
                steady = shares
                shares, least = self._with_work_for_all(shares, costs, work_for_all)
                if shares != steady:
                    reason = "every rank gets work in the first window"
                    self._occasion = f"the exception is over: {reason}"
        if self._avoid_ones:
            shares = without_ones(shares, self.micro_batch_sizes, self._away, least)
        if not reason and size != self._last_size:
            reason = f"the window has {size} samples instead of {self._last_size}"
        self._last_size = size
        self._give_reason(window, reason)
        return WindowPlan(window=window, epoch=epoch, start=start, size=size, shares=shares)

    def _steady_shares(
        self, size: int, costs: Sequence[CostModel], reason: str
    ) -> tuple[tuple[int, ...], str]:
        """Return the best shares, or those in use where the best are hardly better; and why."""
        best, best_s = self._best_shares(size, costs)
        retried = self._rank_to_retry(best, best_s, costs)
        if retried is not None:
            reason = f"rank {retried} is tried after {self._idle_windows[retried]} windows"
            reason += " without work"
            self._idle_windows[retried] = 0
            self._occasion = f"the exception is over: {reason}"
            return self._fastest(size, costs, {retried: 1}), reason
        held, windows = self._in_use.pop(size, (best, 0))
        held_s = finish_s(held, costs, self.micro_batch_sizes)
        band = _DEAD_BAND if windows < _STEADY_WINDOWS else _DEAD_BAND / 2
        if best_s < (1.0 - band) * held_s:
            held, windows = best, 0
            sooner = f"the window is predicted to end {1.0 - best_s / held_s:.1%} sooner"
            reason = f"{sooner}, by the speeds that are known now"
        self._in_use[size] = held, windows + 1
        if len(self._in_use) > _NUM_SIZES:
            del self._in_use[next(iter(self._in_use))]  # the least recently used one
        return held, reason

    def _rank_to_retry(
        self, best: Sequence[int], best_s: float, costs: Sequence[CostModel]
    ) -> int | None:
        """Return a rank that was idle for so long that it is worth one sample, if any."""
        idle = [r for r in self._present if best[r] == 0]
        if not idle:
            return None
        rank = max(idle, key=lambda candidate: self._idle_windows[candidate])
        lost_s = costs[rank].seconds(1, self.micro_batch_sizes[rank]) - best_s
        # At least a window's worth: where the retry is free, as with fewer samples than ranks,
        # work should not go round in circles either.
        affordable_s = _RETRY * self._idle_windows[rank] * best_s
        return rank if max(lost_s, best_s) <= affordable_s else None

    def _with_work_for_all(
        self, shares: tuple[int, ...], costs: Sequence[CostModel], affordable: float
    ) -> tuple[tuple[int, ...], int]:
        """Return shares with work for each present rank, if they cost little; and the least."""
        least = 2 if self._avoid_ones else 1
        if least * len(self._present) > sum(shares):
            return shares, 0
        if min(shares[r] for r in self._present) >= least:
            return shares, least
        raised = self._fastest(sum(shares), costs, dict.fromkeys(self._present, least))
        best_s, raised_s = (finish_s(s, costs, self.micro_batch_sizes) for s in (shares, raised))
        if raised_s - best_s > affordable * (best_s + self.exchange_s):
            return shares, 0
        return raised, least

    # ── parking ──────────────────────────────────────────────────────────────────────────────────

    def decide_parking(self, batch_size: int, main: int) -> Parking | None:
        """Return the ranks without which windows are predicted to be shorter; see ``Policy``.

        So the team is never slower than its fastest rank alone. It works in one of three ways: all
        ranks together; those which are worth a sample; the fastest rank alone. Other choices are
        no better, as long as an exchange takes as long with fewer ranks: the best shares of fewer
        ranks never finish earlier.

        A rank that has work is parked only if the forecast without it is better by more than the
        measurements differ. One without work is parked unless windows would be longer without it:
        where the update is divided, it still makes a part of that.

        Ranks are named only after several windows in a row, so that noise parks no rank. A rank
        that is hardly measured counts while it has no work: it contributes nothing then, and each
        exchange costs.
        """
        present, costs = self._present, self.costs
        is_settled = all(self._speeds[r].is_settled or self._idle_windows[r] for r in present)
        if costs is None or not is_settled or len(present) == 1:
            self._useless_windows = [0] * len(self.members)
            return None
        shares, best_s = self._best_shares(batch_size, costs)
        kept = self._better_alone(batch_size, main, best_s + self.exchange_s)
        for rank in present:
            is_useless = not shares[rank] if kept is None else rank != kept
            self._useless_windows[rank] = self._useless_windows[rank] + 1 if is_useless else 0
        ranks = tuple(r for r in present if self._useless_windows[r] >= _PATIENCE)
        if not ranks:
            return None
        before, after = (self.forecast(batch_size, self._away.union(r)) for r in ((), ranks))
        if any(shares[rank] for rank in ranks):
            is_better = after.is_clearly_below(before)
        else:
            is_better = after.window_s <= before.window_s
        speeds = self.solo_speeds(batch_size)
        return Parking({r: speeds[r] for r in ranks}, before, after) if is_better else None

    def _better_alone(self, batch_size: int, main: int, together_s: float) -> int | None:
        """Return the rank that is clearly faster alone than all together, if there is one.

        Args:
            batch_size: Samples of a window.
            main: The rank that stays unless another one is clearly faster.
            together_s: Seconds of a window of those ranks that are worth a sample.
        """
        costs = self._costs_with(1) or ()
        each_s = all_seconds([batch_size] * len(costs), costs, self.micro_batch_sizes)
        kept = min(self._present, key=lambda rank: each_s[rank])
        exchanges_s = self._exchanges_with(1)
        exchange_s = median_low(exchanges_s) if exchanges_s else 0.0
        # Forecasts of thousands of ranks take their time, and few teams come to need them.
        if each_s[kept] + exchange_s >= together_s:
            return None
        everyone = self._away.union(self._present)
        alone = self.forecast(batch_size, everyone - {kept})
        if main in self._present and main != kept:
            of_main = self.forecast(batch_size, everyone - {main})
            kept, alone = (kept, alone) if alone.is_clearly_below(of_main) else (main, of_main)
        return kept if alone.is_clearly_below(self.forecast(batch_size, self._away)) else None

    def windows_apart(self, batch_size: int, change_s: float) -> int:
        """Return after how many windows parked ranks are tried again; see ``Policy``.

        The less often, the more a trial costs: it takes 1 % of the time at most.
        """
        costs, everyone = self.costs, self.forecast(batch_size, self._absent)
        now_s, exchange_s, _ = self.forecast(batch_size, self._away)
        if costs is None or not self._parked or now_s <= 0.0:
            return LEAST_APART
        slowest_s = max(
            costs[r].seconds(1, self.micro_batch_sizes[r])
            * (_UNKNOWN_RATIO if self._speeds[r].cost is None else 1.0)
            for r in self._parked
        )
        slow_s = max(slowest_s + everyone.exchange_s - now_s, 0.0)
        idle_s = max(everyone.window_s - now_s, 0.0)
        moving_s = change_s or _TRANSFER * max(everyone.exchange_s, exchange_s)
        lost_s = _TRIAL_WINDOWS * slow_s + 2 * _PATIENCE * idle_s + moving_s
        return max(LEAST_APART, math.ceil(lost_s / (_TRIALS * now_s)))
