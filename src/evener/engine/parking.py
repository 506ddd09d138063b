"""Parking: a rank that costs more than it contributes leaves the windows for a while."""

import math
import time
from abc import abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any, Final

from evener.averaging.gradients import GradientAverager
from evener.engine.answers import Heard
from evener.engine.changing import ElasticEngine
from evener.engine.engine import EngineOptions
from evener.engine.results import Progress, Round
from evener.engine.team import Team
from evener.engine.training_state import TrainingState
from evener.planning.policies import NOTEWORTHY_S, ApplyPolicy, Parking, Policy
from evener.planning.report import Report
from evener.protocol.row import Purpose

#: Longest that the main process may take to hand over, in seconds.
HAND_OVER_S: Final = 3600.0

#: Plans in which a rank that is called back surely gets work, so that it is measured.
_TRIALS: Final = 2

_MAIN_STAYS = (
    "rank {} costs more than it contributes. It is not parked, as it is the main process of an "
    "elastic team. If you end it by Ctrl-C (SIGINT), the next rank becomes the main process"
)


class ParkingEngine(ElasticEngine):
    """An engine whose planner may park ranks.

    The plan of a window says who is parked in it. A parked rank takes part in the rounds of an
    epoch, like a rank without a share, and receives the state when it is called back.

    A parked rank does not hold the current state, because the others train on. So if its generation
    ends meanwhile in an elastic team, it joins the next one like a new rank.
    """

    def __init__(self, team: Team, training: TrainingState, options: EngineOptions) -> None:
        super().__init__(team, training, options, ApplyPolicy.SYNC)
        #: Tensors that are exchanged lie in its memory.
        self._home = team.whole
        self._averager = GradientAverager(self.flat, team.comm)
        self._sharded = training.sharded
        #: Weight of the last applied window, the guess for the next; 0 for none.
        self._expected_weight = 0.0
        #: Ranks that the planner parks by the plan that it makes next.
        self._to_park: frozenset[int] = frozenset()
        #: What belongs to the model that this rank holds while it is parked.
        self._parked_at: dict[str, Any] | None = None
        #: Ranks that the policy knows to be parked.
        self._planned_without: frozenset[int] = frozenset()
        #: Plans in which all ranks get work, as those that were parked are tried again.
        self._num_trials = 0
        #: The last decision to park ranks, until it is told; and when it took effect.
        self._untold: Parking | None = None
        self._parked_at_s = 0.0
        #: Since when this rank costs more than it contributes, as a main process that stays.
        self._costs_since_s = math.inf
        #: The window at which parked ranks are tried again.
        self._recall_at = 0
        #: Seconds that calling parked ranks back took last; 0 before the first time.
        self._change_s = 0.0

    @property
    @abstractmethod
    def policy(self) -> Policy:
        """Return the policy, which divides the work and decides which ranks are parked."""

    @abstractmethod
    def _drop_plans(self) -> None:
        """Forget all plans and give their slices back."""

    def _judge_ranks(self) -> None:
        """Decide who is to be parked from the window on that is planned next; the planner does."""
        agreed = self.state.planned_to_park
        self._to_park, parked = agreed[-1], self.team.parked
        if any(ranks != parked for ranks in agreed):
            return  # what was decided last has not taken effect so far
        if self._wants_renewal:
            # Call parked ranks back first: the rank that leaves may be the last one that holds the
            # state.
            self._to_park = frozenset()
            return
        self._tell_parking()
        if (found := self._find_misfits()) is not None:
            self._note_parking(found)
            self._to_park = parked.union(found.ranks)
        elif parked and self._trial_is_due:
            self._to_park, self._num_trials = frozenset(), _TRIALS

    def _go_back_to_parking(self) -> None:
        """Forget the windows that this rank has followed since it was parked: its model lacks them.

        Only where the team is lost that has applied them does anything follow from that.
        """
        if self.state.is_parked and self._parked_at is not None:
            self._applied = None
            self._take_counters(self._parked_at)

    def _plan_without(self, ranks: frozenset[int]) -> None:
        """Tell the policy who is parked in what it plans next, if that is news."""
        if ranks != self._planned_without:
            self._planned_without = ranks
            self.policy.set_parked(ranks)

    def _note_parking(self, found: Parking) -> None:
        """Remember a decision, until it is told."""
        earlier = self._untold
        if earlier is not None and self.team.parked.issuperset(earlier.ranks):  # tell both at once
            alone = {**earlier.alone, **found.alone}
            self._untold = found._replace(alone=alone, before=earlier.before)
        else:
            self._untold, self._parked_at_s = found, time.monotonic()

    def _find_misfits(self) -> Parking | None:
        """Return the ranks to park, but for the main process of an elastic team."""
        found = self.policy.decide_parking(self.batch_size, self.rank)
        if found is None or not self.team.is_elastic or self.rank not in found.ranks:
            self._costs_since_s = math.inf
            return found
        now_s = time.monotonic()
        self._costs_since_s = min(self._costs_since_s, now_s)
        if now_s - self._costs_since_s >= NOTEWORTHY_S:
            self.habits.tell_once(_MAIN_STAYS.format(self.rank))
        others = {rank: speed for rank, speed in found.alone.items() if rank != self.rank}
        after = self.policy.forecast(self.batch_size, self.team.away.union(others))
        # A window of the same length has no work for them.
        is_better = after.is_clearly_below(found.before) or after.window_s == found.before.window_s
        if not others or not is_better:
            return None
        return found._replace(alone=others, after=after)

    @property
    def _trial_is_due(self) -> bool:
        return self.window >= self._recall_at

    def _follow(self, found: Round) -> None:
        """Carry out a verdict; then let those be parked that the plan of the next window names."""
        super()._follow(found)
        if self.committing or self.state.due_to_park == self.state.parked:
            return
        if self.state.applied:  # first tell those who have taken part in it that it is committed
            self._meet(Purpose.CHANGE, report=Report(**self._told()))
        else:
            self._regroup()

    def _regroup(self) -> None:
        """Take parked ranks back with the state of now, or park others; all call it together."""
        before, parked = self.state.parked, self.state.due_to_park
        was_parked, takes_back = self.rank in before, bool(before - parked)
        if self.state.planner in parked and not was_parked:
            if self.is_main:
                self.team.hand_over()
            # It may be writing a checkpoint.
            self.comm.barrier(what="the hand-over of the main process", timeout_s=HAND_OVER_S)
        # Before the exchange, because others may see its end while this rank does not.
        self.state = self.state.regroup()
        if not was_parked:
            self._sharded.join()
        if takes_back:
            self._take_back(before)
        if self.rank in parked and (takes_back or not was_parked):
            self.was_parked, self._is_in = True, not self.team.is_elastic
            self._parked_at = self._counters()
        if parked:
            self.team.park(parked - self.team.parked)
            apart = self.policy.windows_apart(self.batch_size, self._change_s)
            self._recall_at = self.window + apart
        self._use_team()

    def _take_back(self, ranks: Collection[int]) -> None:
        """Make all ranks present again, with one state."""
        started_s = time.perf_counter()
        source = self.team.members[0]
        self.team.rejoin()
        receives = self.rank in ranks
        self._is_in &= not receives
        counters = self.training.send(
            self.comm, self._counters_of_recall(), receives, self.team.members.index(source)
        )
        if receives:
            self._take_counters_of_recall(counters)
            self._is_in = True
        self._change_s = time.perf_counter() - started_s

    def _tell_parking(self) -> None:
        """Warn that ranks are parked, once their time without work is noteworthy."""
        parking, parked_s = self._untold, time.monotonic() - self._parked_at_s
        if parking is None or not self.team.parked.issuperset(parking.ranks):
            return
        if parked_s < NOTEWORTHY_S:
            return
        self._untold = None
        self.habits.notice(describe_parking(parking, self.batch_size, self._recall_at))

    def _counters(self) -> dict[str, Any]:
        return {**super()._counters(), "expected_weight": self._expected_weight}

    def _take_counters(self, counters: Mapping[str, Any]) -> None:
        super()._take_counters(counters)
        self._expected_weight = counters["expected_weight"]

    def _counters_of_recall(self) -> dict[str, Any]:
        """Return what a parked rank has missed beside the model, in JSON."""
        return {
            "progress": asdict(self.progress),
            "loss_scale": self._scale.state_dict(),
            "expected_weight": self._expected_weight,
            "heard": self._heard.number,
        }

    def _take_counters_of_recall(self, counters: Mapping[str, Any]) -> None:
        """Undo ``_counters_of_recall``."""
        self._set_progress(Progress(**counters["progress"]))
        self._scale.load_state_dict(counters["loss_scale"])
        self._expected_weight = counters["expected_weight"]
        if self._heard.number != counters["heard"]:
            self._heard = Heard(counters["heard"])
        self._take_model()

    def _use_team(self) -> None:
        """Use the ranks that are present from now on, in the policy and in exchanges."""
        super()._use_team()
        self._plan_without(self.team.parked)
        if self._home is not self.team.whole:
            # A rank of an earlier generation that was stopped and continues may write into that
            # generation's memory, so the tensors move out of it.
            self._home = self.team.whole
            self.flat.move(self._home)
        self._averager.use(self.comm)
        self.buffers.use(self.comm)
        if not self.state.is_parked:
            self._sharded.divide(self.comm)


def describe_parking(parking: Parking, batch_size: int, recall_at: int) -> str:
    """Return the warning that ranks are parked, with the forecasts that led to it.

    Args:
        parking: The decision.
        batch_size: Samples of a window.
        recall_at: The window at which they are tried again.
    """
    ranks, before, after = parking.ranks, parking.before, parking.after
    each = [
        f"rank {rank} alone does {speed:.3g} samples/s"
        if speed
        else f"rank {rank} is too slow for a single sample of a batch, by the calibration"
        for rank, speed in parking.alone.items()
    ]
    whom, are = ("it", "is") if len(ranks) == 1 else ("them", "are")
    text = f"{' and '.join(f'rank {rank}' for rank in ranks)} {are} parked: {', '.join(each)}"
    if 0.0 < after.window_s < before.window_s:
        text += (
            f"; the team is predicted to do {batch_size / before.window_s:.3g} samples/s with "
            f"{whom} (a window takes {1000 * before.window_s:.3g} ms, of which the exchange "
            f"{1000 * before.exchange_s:.3g} ms) and {batch_size / after.window_s:.3g} without"
        )
    elif after.window_s:
        text += f"; a window takes no longer without {whom}"
    return f"{text}. The team tries again with {whom} at window {recall_at}"
