"""Parking: a rank that costs more than it brings leaves the windows, and is called back later."""

import math
from abc import abstractmethod
from dataclasses import asdict
from typing import Any, Final

from evener.averaging.gradients import GradientAverager
from evener.engine.engine import Engine, EngineOptions
from evener.engine.results import Progress, Round
from evener.engine.state import TrainingState
from evener.engine.team import Team
from evener.planning.policies import ApplyPolicy, Policy
from evener.planning.report import Report
from evener.protocol.generation import Answer, Said, answer, without
from evener.protocol.machine import Do, Phase
from evener.protocol.row import ADMIT, CALL, Purpose

#: The rank that writes events and checkpoints; it is not parked, people are told instead.
BOOKKEEPER: Final = 0
#: Windows after which a parked rank is tried again, if the epoch does not end before.
PARKED_WINDOWS: Final = 500


class ParkingEngine(Engine):
    """An engine whose planner may park ranks.

    The planner wishes it in the rows of a window, and ``protocol/generation.py`` makes the next
    generation of it. A leaf leaves its plans behind, and makes new ones with those who are present.
    """

    def __init__(self, team: Team, training: TrainingState, options: EngineOptions) -> None:
        super().__init__(team, training, options, ApplyPolicy.SYNC)
        self._averager = GradientAverager(self.flat, team.comm)
        #: Weight of the last applied window, the guess for the next; 0 for none.
        self._expected_weight = 0.0
        self._recall_at = 0
        self._warned_of_rank_0 = False

    @property
    @abstractmethod
    def policy(self) -> Policy:
        """Who does how much, and who is parked."""

    @abstractmethod
    def _drop_plans(self) -> None:
        """Forget all plans and give their slices back."""

    @abstractmethod
    def _exchange_plans(self, *work_for_all: float) -> None:
        """Agree on the plans of the next windows; all ranks that are present call it together."""

    def _wanted_change(self) -> int:
        """Return what the planner wishes to change about the team after this window."""
        misfit = self.policy.rank_to_park(self.batch_size)
        if misfit == BOOKKEEPER:
            if not self._warned_of_rank_0:
                speeds = self.policy.solo_speeds(self.batch_size)
                self.habits.notice(
                    f"rank 0 makes the team slower: alone it does {speeds[0]:.3g} samples/s of the "
                    f"team's {sum(speeds):.3g}, and the exchange costs more than that brings; but "
                    "it keeps the team's books and cannot be parked. Start the fastest device as "
                    "rank 0 (first in devices, on the first host), or leave this one out"
                )
            self._warned_of_rank_0 = True
        elif misfit is not None:
            return misfit + 1
        if self.team.parked and self.window >= self._recall_at:
            return ADMIT
        return CALL if self.team.call_is_due else 0

    def _change(self, found: Round) -> None:
        """Do what the planner wished: the generation changes, or parked ranks are called."""
        applied = Do.APPLY in found.verdict.do  # otherwise a loop was left, whatever was wished
        wish = found.rows[self.state.planner].change if applied else 0
        if wish == CALL:
            self._call(Said.STAY)
        elif wish > 0:
            self._park(wish - 1)
        else:
            self._recall(Said.GO_ON if wish == ADMIT else Said.LEFT)

    def _end_generation(self) -> None:
        """Commit the last window of a generation, as all have applied it; drop all plans."""
        if self.state.applied:
            self._meet(Purpose.CHANGE, report=Report(**self._told()))
        self._drop_plans()

    def _park(self, rank: int) -> None:
        """Park a rank and form the next generation; all ranks that are present call it together."""
        speeds = self.policy.solo_speeds(self.batch_size)
        self._end_generation()
        self.team.park(rank)
        self.state = without(self.state, rank)
        self._use_team()
        self._recall_at = self.window + PARKED_WINDOWS
        why = f"alone it does {speeds[rank]:.3g} samples/s of the team's {sum(speeds):.3g}"
        if not speeds[rank]:  # never had a sample
            why = "by the calibration it is too slow for a single sample of a batch"
        self.habits.notice(
            f"rank {rank} is parked: {why}, and the exchange costs more than that brings; it is "
            f"tried again after {PARKED_WINDOWS} windows or at the end of the epoch"
        )
        if self.rank != rank:
            self._exchange_plans(0.0, 0.0)

    def _recall(self, said: Said) -> None:
        """Call parked ranks back with the state of now; all that are present call it together."""
        self._end_generation()
        self._call(said)

    def _call(self, said: Said) -> None:
        self._rejoin(self._come_to_door(Purpose.CALL, body=(float(said),)), receives=False)

    def _wait_for_recall(self) -> None:
        """Wait, parked, to be called back, and take over the state of the others."""
        self.was_parked = True
        while self.state.phase is Phase.AWAY:
            self._rejoin(self._come_to_door(Purpose.AWAY), receives=True)

    def _come_to_door(self, purpose: Purpose, **said: Any) -> Answer:
        self.team.call(is_parked=purpose is Purpose.AWAY)
        stop = self.stopping or self.wants_stop()
        self.state = self.state.say(purpose, stop=stop, **said)
        assert self.state.own is not None
        rows = self._swap(self.state.own, self.team.whole, range(self.world_size))
        found = answer(self.state, rows)
        self.state = found.state
        return found

    def _rejoin(self, found: Answer, *, receives: bool) -> None:
        """All ranks are present again, with one state; without effect where they stay away."""
        if found.said is Said.STAY:
            return
        self.team.rejoin()
        counters: dict[str, Any] = {
            "progress": asdict(self.progress),
            "expected_weight": self._expected_weight,
            "cursor": self.cursor.state_dict(),
            "loss_scale": self._scale.state_dict(),
        }
        counters = self.training.send(self.comm, counters, receives, found.source)
        if receives:
            self._set_progress(Progress(**counters["progress"]))
            self._expected_weight = counters["expected_weight"]
            self.cursor.load_state_dict(counters["cursor"])
            self._scale.load_state_dict(counters["loss_scale"])
            self.flat.zero_()
            self.buffers.reset()
        self._use_team()
        if found.said is Said.GO_ON:
            self._exchange_plans(math.inf, math.inf)

    def _use_team(self) -> None:
        """Use the ranks that are present from now on, in the policy and in exchanges."""
        self.policy.set_parked(self.team.parked)
        self._averager.use(self.comm)
        self.buffers.use(self.comm)
