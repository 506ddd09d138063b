"""Parking: a rank that costs more than it contributes leaves the windows for a while."""

import math
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from evener.averaging.gradients import GradientAverager
from evener.engine.answers import Heard
from evener.engine.changing import ElasticEngine
from evener.engine.engine import EngineOptions
from evener.engine.results import Round
from evener.engine.state import TrainingState
from evener.engine.team import Team
from evener.errors import CollectiveError
from evener.planning.policies import NOTEWORTHY_S, ApplyPolicy, Parking, Policy
from evener.planning.report import Report
from evener.protocol.formation import PARKED
from evener.protocol.generation import Answer, Said, answer, call, without
from evener.protocol.machine import Do, Phase
from evener.protocol.row import ADMIT, CALL, PARK, RENEW, Purpose

_MAIN_STAYS = (
    "rank {} costs more than it contributes. It is not parked, as it is the main process of an "
    "elastic team. If you end it by Ctrl-C (SIGINT), the next rank becomes the main process"
)


class ParkingEngine(ElasticEngine):
    """An engine whose planner may park ranks.

    The planner asks for it in the rows of a window, and ``protocol/generation.py`` returns the next
    generation. A subclass drops its plans, and makes new ones with the ranks that are present.

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
        #: What the planner wishes to park, where this rank plans.
        self._wanted: Parking | None = None
        #: The last decision to park ranks, until it is told; and when it took effect.
        self._untold: Parking | None = None
        self._parked_at_s = 0.0
        #: Since when this rank costs more than it contributes, as a main process that stays.
        self._costs_since_s = math.inf
        #: The window at which parked ranks are tried again.
        self._recall_at = 0
        #: Seconds that calling parked ranks back took last; 0 before the first time.
        self._change_s = 0.0
        #: Windows that this rank had committed when it was parked last, until it comes back.
        self._known_windows = 0

    @property
    @abstractmethod
    def policy(self) -> Policy:
        """Return the policy, which divides the work and decides which ranks are parked."""

    @abstractmethod
    def _drop_plans(self) -> None:
        """Forget all plans and give their slices back."""

    def _wanted_change(self) -> int:
        """Return what the planner wishes to change about the team after this window."""
        if renewal := self._wanted_renewal():
            # Call parked ranks back first: the rank that leaves may be the last one that holds the
            # state.
            return ADMIT if self.team.parked else renewal
        self._tell_parking()
        self._wanted = self._find_misfits()
        if self._wanted is not None:
            return PARK
        if self.team.parked and self._trial_is_due:
            return ADMIT
        return CALL if self.team.call_is_due else 0

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

    def _change(self, found: Round) -> None:
        """Do what the planner wished: the generation changes, or parked ranks are called."""
        applied = Do.APPLY in found.verdict.do  # otherwise a loop was left
        wish = found.rows[self.state.planner].change if applied else 0
        if wish == CALL:
            self._call(Said.STAY)
        elif wish == RENEW:
            self._end_generation()
            # As after a loss. This rank may be left out here, too, if it is stopped meanwhile.
            self._survive(CollectiveError(""), may_join=self.in_epoch)
        elif wish == PARK:
            self._park_misfits()
        else:
            self._recall(Said.GO_ON if wish == ADMIT else Said.LEFT)

    def _end_generation(self, *said: float) -> Sequence[float]:
        """Commit the last window of a generation, as all have applied it; drop all plans.

        Args:
            *said: What this rank has to say of the change.

        Returns:
            What the planner says.
        """
        told: Sequence[float] = ()
        if self.state.applied:
            found = self._meet(Purpose.CHANGE, report=Report(**self._told()), body=said)
            told = found.rows[self.state.planner].body
        self._drop_plans()
        return told

    def _park_misfits(self) -> None:
        """Park the ranks that the planner names; all that are present call it together."""
        wanted = () if self._wanted is None else self._wanted.pack()
        parking = Parking.unpack(self._end_generation(*wanted))
        if self.is_main and self.rank in parking.ranks:
            self.team.hand_over()
        earlier = self._untold
        if earlier is not None and self.team.parked.issuperset(earlier.ranks):  # tell both at once
            alone = {**earlier.alone, **parking.alone}
            self._untold = parking._replace(alone=alone, before=earlier.before)
        else:
            self._untold, self._parked_at_s = parking, time.monotonic()
        self._park(parking.ranks)
        self._recall_at = self.window + self.policy.windows_apart(self.batch_size, self._change_s)
        if self.rank not in parking.ranks:
            self._exchange_plans(0.0, 0.0)

    def _park_again(self) -> None:
        """Park those that were parked when the last epoch ended; all ranks call it together."""
        if self.state.again:
            self._park(self.state.again)

    def _park(self, ranks: Sequence[int]) -> None:
        """Form the next generation, without some ranks."""
        self._sharded.join()
        # Before the exchange, because others may see its end while this rank does not.
        self.state = without(self.state, ranks)
        self._is_in = not (self.team.is_elastic and self.rank in ranks)
        self._known_windows = self.window if self.rank in ranks else 0
        self.team.park(ranks)
        self._use_team()

    def _tell_parking(self) -> None:
        """Warn that ranks are parked, once their time without work is noteworthy."""
        parking, parked_s = self._untold, time.monotonic() - self._parked_at_s
        if parking is None or not self.team.parked.issuperset(parking.ranks):
            return
        if parked_s < NOTEWORTHY_S:
            return
        self._untold = None
        self.habits.notice(describe_parking(parking, self.batch_size, self._recall_at))

    def _recall(self, said: Said) -> None:
        """Call parked ranks back with the state of now; all that are present call it together."""
        self._end_generation()
        started_s = time.perf_counter()
        self._call(said)
        self._change_s = time.perf_counter() - started_s

    def _call(self, said: Said) -> None:
        body = call(self.state, said, tries=said is Said.GO_ON or self._trial_is_due)
        self._rejoin(self._come_to_door(Purpose.CALL, body=body), receives=False)

    def _wait_for_recall(self) -> None:
        """Wait, parked, to be called back, and take over the state of the others."""
        self.was_parked = True
        with self.team.in_phase(PARKED):
            while self.state.phase is Phase.AWAY:
                try:
                    self._rejoin(self._come_to_door(Purpose.AWAY), receives=True)
                except CollectiveError as error:
                    self._survive(error)

    def _come_to_door(self, purpose: Purpose, **said: Any) -> Answer:
        self.team.call(is_parked=purpose is Purpose.AWAY)
        stop = self.stopping or self.wants_stop()
        self.state = self.state.say(purpose, stop=stop, leaving=self.team.is_leaving, **said)
        assert self.state.own is not None
        rows = self._swap(self.state.own, self.team.whole, self.team.everyone)
        found = answer(self.state, rows)
        self.state = found.state
        return found

    def _rejoin(self, found: Answer, *, receives: bool) -> None:
        """Make all ranks present again, with one state; without effect where they stay away."""
        if found.said is Said.STAY:
            return
        if not receives:
            self._sharded.join()
        self.team.rejoin()
        counters = self.training.send(self.comm, self._counters(), receives, found.source)
        if receives:
            self._take_counters(counters)
            self._known_windows = 0
            self._is_in = True
        self._use_team()
        if found.said is Said.GO_ON:
            self._exchange_plans(math.inf, math.inf)

    def _counters(self) -> dict[str, Any]:
        heard = self._heard.number
        return {**super()._counters(), "expected_weight": self._expected_weight, "heard": heard}

    def _take_counters(self, counters: Mapping[str, Any]) -> None:
        super()._take_counters(counters)
        self._expected_weight = counters["expected_weight"]
        if self._heard.number != counters["heard"]:  # this rank was parked meanwhile
            self._heard = Heard(counters["heard"])

    def _take_learnt(self, learnt: Mapping[str, Any]) -> None:
        super()._take_learnt(learnt)
        applied, known, self._known_windows = self._applied, self._known_windows, 0
        if applied is not None and applied.result.window < known:
            # A rank was lost in the round that committed it, whose end this rank has seen.
            self._applied = None
            for lease in applied.leases:
                self.cursor.commit(lease)

    def _use_team(self) -> None:
        """Use the ranks that are present from now on, in the policy and in exchanges."""
        super()._use_team()
        self.policy.set_parked(self.team.parked)
        if self._home is not self.team.whole:
            # A rank of an earlier generation that was stopped and continues may write into that
            # generation's memory, so the tensors move out of it.
            self._home = self.team.whole
            self.flat.move(self._home)
            self.buffers.move(self._home)
        self._averager.use(self.comm)
        self.buffers.use(self.comm)
        if self.state.phase is not Phase.AWAY:
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
