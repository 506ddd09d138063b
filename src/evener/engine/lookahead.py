"""Plans of SYNC, made two windows ahead, so that data is loaded before it is needed."""

import math
import time
from collections import deque
from dataclasses import replace
from typing import Final, NamedTuple

from evener.data.cursor import Slice
from evener.engine.generations import Generations
from evener.engine.guards import OptimizerGuards
from evener.engine.run_state import RunState
from evener.errors import UsageError
from evener.planning.plans import WindowPlan
from evener.planning.policies import NOTEWORTHY_S, Parking, Policy
from evener.planning.report import Report
from evener.planning.shares import in_whole_micro_batches
from evener.protocol.row import Plan

_UNLEARNT: Final = 32
"""Windows kept for the policy to learn of; it remembers fewer."""

#: Plans in which a rank that is called back surely gets work, so that it is measured.
_TRIALS: Final = 2

_MAIN_STAYS = (
    "rank {} costs more than it contributes. It is not parked, as it is the main process of an "
    "elastic team. If you end it by Ctrl-C (SIGINT), the next rank becomes the main process"
)

_HANDED_OVER = (
    "{}. Rank {} is the main process from now on. Code that logs or saves where ddp.rank == {} "
    "misses the windows in which that rank is parked: use ddp.is_main_process there, and read it "
    "each time"
)


class Untold(NamedTuple):
    """A decision to park ranks of which the user was not told yet, and when it took effect."""

    parking: Parking
    batch_size: int
    since_s: float


class Lookahead:
    """Plans the window after the next: its plan travels in the rows of the present one.

    Every rank leases the same slices of the epoch. Only the planner plans, while its device
    computes gradients, and decides which ranks are parked in that window.

    Args:
        generations: Know the team.
        run: Holds the data position.
        policy: Divides the work.
        guards: Tell the user of parked ranks.

    Attributes:
        stale_policy: The policy, which may not have learnt from the last windows.
        draft: The plan of the window after the next, on the planner.
        leases: Leases of planned windows, and of the one whose plan comes next, by window.
        renews: Whether the planner wishes that the members of an elastic team change.
        recall_at: The window at which parked ranks are tried again.
        why_parked: Why ranks were parked last, on the planner.
    """

    def __init__(
        self, generations: Generations, run: RunState, policy: Policy, guards: OptimizerGuards
    ) -> None:
        self._generations, self._rounds = generations, generations.rounds
        self._team = generations.rounds.team
        self._run, self._guards = run, guards
        self.stale_policy = policy
        self.draft: WindowPlan | None = None
        #: Whether the slice after the last planned one was leased, and planned by the planner.
        self._is_made = False
        self.leases: dict[int, Slice] = {}
        self.renews = False
        self.recall_at = 0
        self.why_parked = ""
        self._unlearnt: deque[tuple[list[Report], WindowPlan, float]] = deque(maxlen=_UNLEARNT)
        #: Ranks that are parked by the plan that is made next.
        self._to_park: frozenset[int] = frozenset()
        #: Ranks that the policy knows to be parked.
        self._known_parked: frozenset[int] = frozenset()
        #: Plans in which all ranks get work, as those that were parked are tried again.
        self._num_trials = 0
        self._untold: Untold | None = None
        #: Since when this rank costs more than it contributes, as a main process that stays.
        self._costs_since_s = math.inf
        self._team.call_on_handover(self._announce_handover)

    # ── what is learnt ───────────────────────────────────────────────────────────────────────────

    def observe(self, reports: list[Report], plan: WindowPlan, exchange_s: float) -> None:
        """Let the policy learn from a window that is over, when the policy is needed."""
        self._unlearnt.append((reports, plan, exchange_s))

    @property
    def policy(self) -> Policy:
        """Return the policy, which has learnt from all windows that are over.

        Any rank may become the planner. One that is not keeps the last windows in mind until then:
        to judge each of them costs more than all of them at once.
        """
        for window in self._unlearnt:
            self.stale_policy.observe(*window)
        self._unlearnt.clear()
        return self.stale_policy

    # ── plans ────────────────────────────────────────────────────────────────────────────────────

    def plan_ahead(self, batch_size: int, multiple: int) -> None:
        """Make the plan of the window after the next, once; see ``make``."""
        state = self._rounds.state
        if state.plans and not self._is_made:
            if self._rounds.is_main and self._team.world_size > 1:
                self._judge_ranks(batch_size)
            self.make(batch_size, multiple)
            parks = self._to_park or self._team.parked or any(state.planned_to_park)
            self.renews = self._generations.wants_renewal and not parks

    def make(self, batch_size: int, multiple: int, *, work_for_all: float = 0.0) -> int:
        """Lease the slice after the last planned one; the planner plans it.

        Args:
            batch_size: Samples of a window.
            multiple: Of how many samples shares are multiples; 0 for any share.
            work_for_all: See ``Policy.plan``.

        Returns:
            The number of the window that it will be.
        """
        number = self._run.progress.window + len(self._rounds.state.plans)
        piece = self._run.open_cursor.take(batch_size)
        self._is_made, self.renews = True, False
        if piece is None:
            return number
        self.leases[number] = piece
        if self._rounds.is_main:
            policy = self.policy if self._team.world_size > 1 else self.stale_policy
            self.plan_without(self._to_park)
            if self._num_trials:
                self._num_trials, work_for_all = self._num_trials - 1, math.inf
            plan = policy.plan(
                number, piece.epoch, piece.start, piece.size, work_for_all=work_for_all
            )
            if self._to_park:
                flags = (int(rank in self._to_park) for rank in range(self._team.world_size))
                plan = replace(plan, parked=tuple(flags))
            if multiple:
                plan = replace(plan, shares=in_whole_micro_batches(plan.shares, multiple))
            self.draft = plan
        return number

    def make_first(
        self, batch_size: int, multiple: int, *, work_for_all: float, renew: bool
    ) -> int:
        """Make the plan of one of the first windows, in which ranks stay parked if they were."""
        planned = self._rounds.state.planned_to_park
        if planned:
            self._to_park = planned[-1]
        elif renew or self._run.progress.window >= self.recall_at:
            self._to_park = frozenset()
        return self.make(batch_size, multiple, work_for_all=work_for_all)

    def take(self) -> WindowPlan | None:
        """Return the draft, which is a plan from now on."""
        draft, self.draft, self._is_made = self.draft, None, False
        return draft

    def check(self, plan: Plan | None, number: int) -> None:
        """Refuse a plan for another slice of the epoch than the one that this rank has leased.

        Args:
            plan: That of the planner.
            number: Of its window.

        Raises:
            UsageError: The planner is at another place of the data.
        """
        piece, state = self.leases.get(number), self._rounds.state
        own = None if piece is None else (number, piece.epoch, piece.start, piece.size)
        agreed = None
        if isinstance(plan, WindowPlan):
            agreed = plan.window, plan.epoch, plan.start, plan.size
        if agreed != own:
            raise UsageError(
                f"rank {state.planner} plans (window, epoch, start, size) {agreed}, rank "
                f"{state.me} is at {own}; every rank must use the same data set size, batch_size "
                "and seed, and resume from the same checkpoint"
            )

    def drop(self) -> None:
        """Forget all plans and give their slices back."""
        self._rounds.state = self._rounds.state.release()
        self.leases.clear()
        self.draft, self._is_made = None, False
        if self._run.cursor is not None:
            self._run.cursor.release()

    # ── parking ──────────────────────────────────────────────────────────────────────────────────

    def use_team(self, batch_size: int) -> None:
        """Plan for the ranks that are present from now on."""
        self.plan_without(self._team.parked)
        if self._team.parked:
            apart = self.policy.windows_apart(batch_size, self._generations.recall_s)
            self.recall_at = self._run.progress.window + apart

    def park_nobody(self) -> None:
        """Forget who was to be parked, as the team has changed."""
        self._to_park, self._num_trials = frozenset(), 0

    def plan_without(self, ranks: frozenset[int]) -> None:
        """Tell the policy who is parked in what it plans next, if that is news."""
        if ranks != self._known_parked:
            self._known_parked = ranks
            self.policy.set_parked(ranks)

    def _judge_ranks(self, batch_size: int) -> None:
        """Decide who is to be parked from the window on that is planned next; the planner does."""
        agreed = self._rounds.state.planned_to_park
        self._to_park, parked = agreed[-1], self._team.parked
        if any(ranks != parked for ranks in agreed):
            return  # what was decided last has not taken effect so far
        if self._generations.wants_renewal:
            # Call parked ranks back first: the rank that leaves may be the last one that holds the
            # state.
            self._to_park = frozenset()
            return
        self._announce_parking()
        if (found := self._find_misfits(batch_size)) is not None:
            self._note_parking(found, batch_size)
            self.why_parked = explain_parking(found, batch_size)
            self._to_park = parked.union(found.ranks)
        elif parked and self._run.progress.window >= self.recall_at:
            self._to_park, self._num_trials = frozenset(), _TRIALS

    def _find_misfits(self, batch_size: int) -> Parking | None:
        """Return the ranks to park, but for the main process of an elastic team."""
        policy, main = self.policy, self._team.rank
        found = policy.decide_parking(batch_size, main)
        if found is None or not self._team.is_elastic or main not in found.ranks:
            self._costs_since_s = math.inf
            return found
        now_s = time.monotonic()
        self._costs_since_s = min(self._costs_since_s, now_s)
        if now_s - self._costs_since_s >= NOTEWORTHY_S:
            self._guards.warn_once(_MAIN_STAYS.format(main))
        others = {rank: speed for rank, speed in found.alone.items() if rank != main}
        after = policy.forecast(batch_size, self._team.away.union(others))
        # A window of the same length has no work for them.
        is_better = after.is_clearly_below(found.before) or after.window_s == found.before.window_s
        if not others or not is_better:
            return None
        return found._replace(alone=others, after=after)

    def _note_parking(self, found: Parking, batch_size: int) -> None:
        """Remember a decision, until it is told."""
        untold = self._untold
        if untold is not None and self._team.parked.issuperset(untold.parking.ranks):
            alone = {**untold.parking.alone, **found.alone}  # tell both at once
            both = found._replace(alone=alone, before=untold.parking.before)
            self._untold = untold._replace(parking=both)
        else:
            self._untold = Untold(found, batch_size, time.monotonic())

    def _announce_parking(self) -> None:
        """Warn that ranks are parked, once their time without work is noteworthy."""
        if self._untold is None:
            return
        parking, _, since_s = self._untold
        took_effect = self._team.parked.issuperset(parking.ranks)
        if took_effect and time.monotonic() - since_s >= NOTEWORTHY_S:
            text, self._untold = _describe(self._untold), None
            whom = "it" if len(parking.ranks) == 1 else "them"
            self._guards.notice(
                f"{text}. The team tries again with {whom} at window {self.recall_at}"
            )

    def _announce_handover(self) -> None:
        """Warn at once that this rank, the main process until now, is parked.

        A script that tells ranks apart by their numbers does less from now on.
        """
        untold, self._untold = self._untold, None
        rank = self._team.rank
        if untold is not None and rank in untold.parking.ranks:
            new_main = self._rounds.state.regroup().planner
            self._guards.notice(_HANDED_OVER.format(_describe(untold), new_main, rank))


def _describe(untold: Untold) -> str:
    """Return that ranks are parked, with the forecasts that led to it."""
    ranks = untold.parking.ranks
    are = "is" if len(ranks) == 1 else "are"
    named = " and ".join(f"rank {rank}" for rank in ranks)
    return f"{named} {are} parked: {explain_parking(untold.parking, untold.batch_size)}"


def explain_parking(parking: Parking, batch_size: int) -> str:
    """Return the forecasts that led to parking ranks.

    Args:
        parking: The decision.
        batch_size: Samples of a window.
    """
    ranks, before, after = parking.ranks, parking.before, parking.after
    whom = "it" if len(ranks) == 1 else "them"
    text = ", ".join(
        f"rank {rank} alone does {speed:.3g} samples/s"
        if speed
        else f"rank {rank} was never measured, and too slow for a sample by the calibration"
        for rank, speed in parking.alone.items()
    )
    if 0.0 < after.window_s < before.window_s:
        text += (
            f"; the team is predicted to do {batch_size / before.window_s:.3g} samples/s with "
            f"{whom} (a window takes {1000 * before.window_s:.3g} ms, of which the exchange "
            f"{1000 * before.exchange_s:.3g} ms) and {batch_size / after.window_s:.3g} without"
        )
    elif after.window_s:
        text += f"; a window takes no longer without {whom}"
    return text
