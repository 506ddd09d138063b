"""SYNC: a fixed global batch, split so that all ranks finish together. Pure."""

import math
from collections.abc import Collection, Mapping, Sequence
from statistics import median, median_low
from typing import Any, Final, final

from evener.errors import CheckpointError
from evener.planning.plans import WindowPlan
from evener.planning.policies import LEAST_APART, ApplyPolicy, Forecast, Parking, Policy
from evener.planning.report import Report
from evener.planning.shares import all_seconds, apportion, fastest_shares, finish_s, without_ones
from evener.planning.speed import CostModel, SpeedModel, relative_error

_DEAD_BAND: Final = 0.02
"""Shares stay as they are while a change promises to save less of the window than this."""

_LARGEST_RATIO: Final = 16.0
"""How many times as slow as the fastest one a rank counts at most, until its speed is settled. A
calibration times other work than the run's, and something else may disturb a first window. A rank
that gets almost no work would hardly be measured again."""

_MEMORY: Final = 15
"""Exchanges remembered."""

_PATIENCE: Final = 6
"""Windows in a row in which a rank must cost more than it contributes before it is parked."""

_TRIALS: Final = 0.01
"""Part of the time spent on trying parked ranks again."""


@final
class SyncPolicy(Policy):
    """Splits a fixed global batch so that all ranks finish together.

    Equal shares until speeds are known, by a hint, a calibration or windows. Then the shares with
    the earliest finish, unless the present ones are within 2 % of it: shares that follow noise cost
    more than they gain.

    Args:
        members: Member ids, by rank.
        micro_batch_sizes: Most samples in one forward and backward, by rank; ``None`` for a whole
            share in one.
        avoid_ones: Give no rank a micro-batch of one sample where that can be avoided, for models
            with batch statistics.
    """

    def __init__(
        self,
        members: Sequence[str],
        micro_batch_sizes: Sequence[int | None],
        *,
        avoid_ones: bool = False,
    ) -> None:
        super().__init__(members)
        self.micro_batch_sizes = tuple(micro_batch_sizes)
        self._avoid_ones = avoid_ones
        self._speeds = [SpeedModel() for _ in members]
        #: Seconds per sample that were given, in any unit; they count until the first measurement.
        self._hints: list[float | None] = [None] * len(members)
        #: Whether each rank that is present makes its part of the optimizer's update.
        self._divides_updates = False
        #: Seconds of exchanges that nothing has hidden, by the number of ranks that took part.
        self._exchanges_s: dict[int, list[float]] = {}
        #: Ranks that took part in the newest exchange.
        self._num_exchanging = 0
        #: Windows in a row in which a rank cost more than it contributed.
        self._useless_windows: dict[int, int] = {}
        #: Windows in which a rank was given work only to be measured.
        self._num_trials = [0] * len(members)
        #: Shares in use, by size of the window (the last one of an epoch is shorter).
        self._in_use: dict[int, tuple[int, ...]] = {}
        self._last_size = 0
        self._parked: frozenset[int] = frozenset()
        self.set_absent(frozenset())
        self._occasion = "the shares are equal until speeds are known"

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
        super().set_micro_batch_sizes(sizes)
        # Before the first plan nothing has changed: they are only made known.
        changed = "the limits of micro-batches have changed"
        self._begin_again(changed if self._in_use else self._occasion)

    def set_absent(self, ranks: frozenset[int]) -> None:
        """Set the numbers that no member of an elastic team has; see ``Policy``."""
        self._absent = ranks
        self.set_parked(self._parked)

    def set_parked(self, ranks: frozenset[int]) -> None:
        """Give these ranks nothing to do until further notice; see ``Policy``."""
        returns = not self._parked <= ranks
        self._parked, self._away = ranks, ranks | self._absent
        self._present = [rank for rank in range(len(self.members)) if rank not in self._away]
        if returns:  # a trial counts alone: the link may have become another one since
            self._exchanges_s.pop(len(self._present), None)
        self._useless_windows = {}
        names = ", ".join(map(str, sorted(ranks)))
        self._begin_again(
            f"without rank {names}, which is parked" if ranks else "all ranks are present"
        )

    def calibrate(self, speeds: Sequence[float]) -> None:
        """Set the speeds of the ranks until they are measured; see ``Policy``."""
        if all(0.0 < speed < math.inf for speed in speeds):
            self._hints = [1.0 / speed for speed in speeds]
            self._begin_again("the first shares by speed")

    def observe(self, reports: Sequence[Report], plan: WindowPlan, sync_s: float) -> None:
        """Learn from a window; see ``Policy``."""
        for speed, report in zip(self._speeds, reports, strict=True):
            speed.observe(
                report.samples - report.warmup_samples,
                report.micro_batches - report.warmup_micro_batches,
                report.compute_s - report.update_s - report.warmup_s,
                report.update_s * max(report.update_parts, 1),
            )
        self._divides_updates = any(report.update_parts > 1 for report in reports)
        if 0.0 <= sync_s < math.inf:
            self._observe_exchange(sum(report.elapsed_s > 0.0 for report in reports), sync_s)
        self._predict()

    def _observe_exchange(self, num_ranks: int, seconds: float) -> None:
        """Learn from an exchange of ``num_ranks``, which plans may no longer be for.

        The first one of other ranks than before does not count: it sets up connections, and nothing
        of it was hidden, as gradients travel during backward once a window has shown their order.
        """
        is_first, self._num_exchanging = num_ranks != self._num_exchanging, num_ranks
        if not is_first:
            known = self._exchanges_s.setdefault(num_ranks, [])
            known.append(seconds)
            del known[:-_MEMORY]

    def forget(self, ranks: Collection[int]) -> None:
        """Start ranks as new ones, which count as fast until they are measured; see ``Planner``."""
        fastest = min(hint or 1.0 for hint in self._hints)
        for rank in ranks:
            self._speeds[rank], self._hints[rank] = SpeedModel(), fastest
            self._num_trials[rank] = 0
        self._begin_again(self._occasion)

    def solo_speeds(self, batch_size: int) -> tuple[float, ...]:
        """Return the predicted samples per second of each rank alone; see ``Policy``."""
        seconds = all_seconds([batch_size] * len(self.costs), self.costs, self.micro_batch_sizes)
        known = zip(self._speeds, seconds, strict=True)
        return tuple(0.0 if speed.cost is None else batch_size / s for speed, s in known)

    def state_dict(self) -> dict[str, Any]:
        """Return what was learnt, by member id, as plain JSON types."""
        known = zip(self.members, self._speeds, strict=True)
        measured = {member: s.state_dict() for member, s in known if s.cost is not None}
        return {"policy": ApplyPolicy.SYNC.value, "members": measured}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``, even of another team: members that are not here are ignored.

        A run with fixed shares has learnt nothing. Members of which the state says nothing keep
        what is known of them. The time of an exchange is not part of it, as that belongs to a team
        and not to a member. See ``Policy``.

        Raises:
            CheckpointError: The state is of another policy.
        """
        policy = state.get("policy", ApplyPolicy.SYNC)
        if policy != ApplyPolicy.SYNC:
            raise CheckpointError(
                f"the checkpoint is of a run with {policy=}, and this run has "
                f"{ApplyPolicy.SYNC.value!r}: give the policy of that run"
            )
        saved = state.get("members", {})
        for member, speed in zip(self.members, self._speeds, strict=True):
            if member in saved:
                speed.load_state_dict(saved[member])
        self._begin_again("the first shares by speed")

    # ── what is predicted ────────────────────────────────────────────────────────────────────────

    def forecast(self, batch_size: int, away: frozenset[int]) -> Forecast:
        """Return what a window takes if these ranks are away; see ``Policy``."""
        shares, compute_s = self._best_shares(batch_size, away)
        exchanges_s = self._exchanges_without(away)
        exchange_s = median_low(exchanges_s) if exchanges_s else 0.0
        busiest = self._speeds[shares.index(max(shares))]
        error_s = math.hypot(
            compute_s * busiest.relative_error, exchange_s * relative_error(exchanges_s)
        )
        return Forecast(compute_s + exchange_s, exchange_s, error_s)

    def _predict(self) -> None:
        """Derive from the speeds what each rank costs, all in one unit.

        A rank that was never measured costs what its hint says on the scale of the measured ranks.
        Without a hint it counts as a middling one, so that it gets work and is measured.
        """
        hints = [hint or 1.0 for hint in self._hints]
        measured = zip(self._speeds, hints, strict=True)
        units = [speed.cost.per_sample_s / hint for speed, hint in measured if speed.cost]
        unit = median(units) if units else 1.0
        costs = [
            speed.cost or CostModel(0.0, hint * unit)
            for speed, hint in zip(self._speeds, hints, strict=True)
        ]
        slowest_s = _LARGEST_RATIO * min(cost.per_sample_s for cost in costs)
        self.costs = tuple(
            cost if speed.is_settled else cost.scaled(min(1.0, slowest_s / cost.per_sample_s))
            for speed, cost in zip(self._speeds, costs, strict=True)
        )
        #: What ``_best_shares`` has found, by its arguments.
        self._best: dict[tuple[int, frozenset[int], int], tuple[tuple[int, ...], float]] = {}

    def _begin_again(self, occasion: str) -> None:
        """Forget the shares in use.

        Args:
            occasion: Why the next plan may differ from the last one.
        """
        self._occasion = occasion
        self._in_use.clear()
        self._predict()

    def _exchanges_without(self, away: frozenset[int]) -> Sequence[float]:
        """Return seconds of exchanges of the others, or of the nearest number of ranks above 1."""
        num_ranks = len(self.members) - len(away)
        if num_ranks in self._exchanges_s or num_ranks == 1:
            return self._exchanges_s.get(num_ranks, ())
        others = [n for n in self._exchanges_s if n > 1]
        return self._exchanges_s[min(others, key=lambda n: abs(n - num_ranks))] if others else ()

    def _costs_without(self, away: frozenset[int]) -> Sequence[CostModel]:
        """Return the costs where the others are present, which may divide the update."""
        if not self._divides_updates:
            return self.costs
        parts = len(self.members) - len(away)
        return [cost._replace(window_s=cost.window_s / parts) for cost in self.costs]

    def _best_shares(
        self, size: int, away: frozenset[int], least: int = 0
    ) -> tuple[tuple[int, ...], float]:
        """Return the shares of the others with the earliest finish, and that in seconds.

        Args:
            size: Samples over all ranks.
            away: Ranks that get nothing.
            least: Samples that each of the others gets at least.
        """
        if (size, away, least) not in self._best:
            costs, sizes = self._costs_without(away), self.micro_batch_sizes
            shares = fastest_shares(size, costs, sizes, least=least, idle=away)
            self._best[size, away, least] = shares, finish_s(shares, costs, sizes)
        return self._best[size, away, least]

    # ── shares ───────────────────────────────────────────────────────────────────────────────────

    def plan(
        self, window: int, epoch: int, start: int, size: int, *, work_for_all: float = 0.0
    ) -> WindowPlan:
        """Plan a window with the earliest predicted finish; see ``Policy``."""
        shares, reason = self._steady_shares(size)
        if work_for_all and (raised := self._with_work_for_all(shares, work_for_all)) != shares:
            shares, reason = raised, "every rank gets work in the first window"
            self._occasion = f"the exception is over: {reason}"
        elif untried := self._untried():
            shares, reason = self._with_trials(size, untried), "idle ranks are measured"
            self._occasion = f"the exception is over: {reason}"
        if self._avoid_ones:
            shares = without_ones(shares, self.micro_batch_sizes, self._away)
        if not reason and size != self._last_size:
            reason = f"the window has {size} samples instead of {self._last_size}"
        self._last_size = size
        self._give_reason(window, reason)
        return WindowPlan(window=window, epoch=epoch, start=start, size=size, shares=shares)

    def _steady_shares(self, size: int) -> tuple[tuple[int, ...], str]:
        """Return the best shares, or those in use where the best are hardly better; and why."""
        reason, self._occasion = self._occasion, ""
        best, best_s = self._best_shares(size, self._away)
        held = self._in_use.setdefault(size, best)
        costs = self._costs_without(self._away)
        held_s = finish_s(held, costs, self.micro_batch_sizes)
        # Until all speeds are settled, any gain counts, so that each rank with work is measured.
        is_settled = all(self._speeds[rank].is_settled for rank in self._present)
        if best != held and best_s <= (1.0 - _DEAD_BAND * is_settled) * held_s:
            sooner = f"the window is predicted to end {1.0 - best_s / held_s:.1%} sooner"
            reason = f"{sooner}, by the speeds that are known now"
            held = self._in_use[size] = best
        return held, reason

    def _with_work_for_all(self, shares: tuple[int, ...], affordable: float) -> tuple[int, ...]:
        """Return shares with work for each present rank, if they cost little."""
        least = 2 if self._avoid_ones else 1
        size, present = sum(shares), self._present
        if least * len(present) > size or min(shares[rank] for rank in present) >= least:
            return shares
        raised, raised_s = self._best_shares(size, self._away, least)
        window_s = self.forecast(size, self._away).window_s
        longer_s = raised_s - self._best_shares(size, self._away)[1]
        return raised if longer_s <= affordable * window_s else shares

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
        that never had work then gets some first: a calibration or a hint may be wrong. A rank that
        is hardly measured counts while it has no work: it contributes nothing then, and each
        exchange costs.
        """
        useless = self._useless_ranks(batch_size, main)
        self._useless_windows = {r: self._useless_windows.get(r, 0) + 1 for r in useless}
        untried = self._untried()
        ranks = [rank for rank in self._long_useless() if rank not in untried]
        before, after = (self.forecast(batch_size, self._away.union(r)) for r in ((), ranks))
        if not ranks or after.window_s > before.window_s:
            return None
        speeds = self.solo_speeds(batch_size)
        return Parking({rank: speeds[rank] for rank in ranks}, before, after)

    def _long_useless(self) -> list[int]:
        return [rank for rank, n in self._useless_windows.items() if n >= _PATIENCE]

    def _untried(self) -> list[int]:
        """Return the ranks to be measured before they are parked, unless that fails for long."""
        return [
            rank
            for rank in self._long_useless()
            if self._speeds[rank].cost is None and self._num_trials[rank] < _PATIENCE
        ]

    def _with_trials(self, size: int, untried: Sequence[int]) -> tuple[int, ...]:
        """Return shares in which some ranks get the least work there is, to be measured."""
        least = min(2 if self._avoid_ones else 1, size)
        tried = untried[: size // least]
        for rank in tried:
            self._num_trials[rank] += 1
        rest, _ = self._best_shares(size - least * len(tried), self._away.union(tried))
        return tuple(least if rank in tried else share for rank, share in enumerate(rest))

    def _useless_ranks(self, batch_size: int, main: int) -> list[int]:
        """Return the ranks that cost more than they contribute in this window.

        Args:
            batch_size: Samples of a window.
            main: The rank that stays unless another one is clearly faster.
        """
        shares, _ = self._best_shares(batch_size, self._away)
        if not all(self._speeds[rank].is_settled or not shares[rank] for rank in self._present):
            return []
        everyone, speeds = frozenset(range(len(self.members))), self.solo_speeds(batch_size)
        fastest = max(self._present, key=lambda rank: speeds[rank])
        kept, alone = main, self.forecast(batch_size, everyone - {main})
        of_fastest = self.forecast(batch_size, everyone - {fastest})
        if of_fastest.is_clearly_below(alone):
            kept, alone = fastest, of_fastest
        if alone.is_clearly_below(self.forecast(batch_size, self._away)):
            return [rank for rank in self._present if rank != kept]
        return [rank for rank in self._present if not shares[rank]]

    def windows_apart(self, batch_size: int, change_s: float) -> int:
        """Return after how many windows parked ranks are tried again; see ``Policy``.

        The less often, the more a trial costs: it takes 1 % of the time at most. In its first
        windows every rank has a sample. It takes about three times ``_PATIENCE`` windows until
        ranks are parked again.
        """
        everyone = self.forecast(batch_size, self._absent)
        now_s = self.forecast(batch_size, self._away).window_s
        slowest_s = max(
            (self.costs[r].seconds(1, self.micro_batch_sizes[r]) for r in self._parked), default=0.0
        )
        slow_s = max(slowest_s + everyone.exchange_s, now_s)
        lost_s = _PATIENCE * (slow_s + 2.0 * everyone.window_s - 3.0 * now_s) + change_s
        return max(LEAST_APART, math.ceil(lost_s / (_TRIALS * now_s)))


@final
class FixedShares(Policy):
    """Splits every window in given proportions, whatever is measured.

    Args:
        members: Member ids, by rank.
        ratios: Proportions, by rank; 0 gives a rank nothing to do.
        avoid_ones: Give no rank a micro-batch of one sample where that can be avoided.
    """

    def __init__(
        self, members: Sequence[str], ratios: Sequence[float], *, avoid_ones: bool
    ) -> None:
        super().__init__(members)
        self._ratios = tuple(ratios)
        self._avoid_ones = avoid_ones

    def plan(
        self, window: int, epoch: int, start: int, size: int, *, work_for_all: float = 0.0
    ) -> WindowPlan:
        """Plan a window; ``work_for_all`` is ignored: the user has said what each rank does."""
        shares = apportion(size, self._ratios)
        if self._avoid_ones:
            idle = [rank for rank, ratio in enumerate(self._ratios) if not ratio]
            shares = without_ones(shares, self.micro_batch_sizes, idle)
        self._give_reason(window, "partition_ratios set the shares")
        return WindowPlan(window, epoch, start, size, shares)
