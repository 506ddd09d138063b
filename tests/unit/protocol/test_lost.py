"""A rank is lost between any two effects of a window: no committed window is lost, or made twice.

Ranks here are states of the pure machine, which hand one another rows. Their model is the list of
what was applied, so two ranks with equal models have applied the same windows in the same order.
"""

from itertools import product
from typing import Any

import pytest

from evener.planning.plans import LocalPlan, WindowPlan
from evener.planning.policies import ApplyPolicy
from evener.planning.report import Report
from evener.protocol.formation import Formation
from evener.protocol.machine import Action, Decision, Phase, State, judge, land
from evener.protocol.row import Plan, Purpose, Row

NUM_WINDOWS, MOST = 5, 6
POINTS = ("before rows", "rows", "before tensors", "tensors", "after tensors", "plans", "the end")
"""Where the rank is lost; in ``rows``, ``tensors`` and ``plans`` one of the others still has the
result of that exchange."""


class Rank:
    """A state, the windows that were applied, and how many of them are committed."""

    def __init__(self, number: int, policy: ApplyPolicy, members: tuple[int, ...]) -> None:
        self.name = f"m{number}"
        self.state = State(me=number, world_size=MOST, policy=policy, members=members)
        self.model: list[Any] = []
        self.committed = 0

    def say(self, purpose: Purpose, **said: Any) -> Row:
        self.state = self.state.make_row(purpose, **said)
        assert self.state.own is not None
        return self.state.own

    def plan(self, window: int) -> Plan | None:
        """What the planner says of a window; nothing beyond the last one."""
        if self.state.me != self.state.planner or window >= NUM_WINDOWS:
            return None
        shares = tuple(int(rank in self.state.members) for rank in range(MOST))
        if self.state.is_sync:
            return WindowPlan(window, 0, window * MOST, sum(shares), shares)
        blocking = self.state.policy is ApplyPolicy.CADENCE
        return LocalPlan(
            window=window,
            epoch=0,
            window_s=1.0,
            blocking=blocking,
            steps=shares,
            most=shares,
            queues=shares,
        )

    def commit(self, actions: tuple[Action, ...]) -> None:
        if Action.COMMIT in actions:
            assert self.committed == len(self.model) - 1, "the window before, once"
            self.committed += 1

    def apply(self, decision: Decision) -> None:
        self.model.append((len(self.model), decision.weight))
        self.state = decision.state


class Team:
    """Ranks that train ``NUM_WINDOWS`` windows, and lose one of theirs on the way."""

    def __init__(self, policy: ApplyPolicy, size: int, victim: int, told: int) -> None:
        self.ranks = [Rank(number, policy, tuple(range(size))) for number in range(size)]
        self.victim, self.told = self.ranks[victim], told
        self.generation = 0

    def survivor(self) -> Rank:
        """The one that has the result of an exchange in which the victim is lost."""
        return [rank for rank in self.ranks if rank is not self.victim][self.told]

    def train(self, lost_in: int, point: str) -> None:
        """Go through all windows; in window ``lost_in`` the victim is lost at a point."""
        self.begin()
        while self.ranks[0].state.is_working:
            is_lost = self.victim in self.ranks and self.ranks[0].state.window == lost_in
            if not self.window(point if is_lost else ""):
                self.reform()
        self.meet(Purpose.REST)
        for rank in self.ranks:
            assert rank.state.phase is Phase.OUT
            assert rank.model == self.ranks[0].model
            assert [window for window, _ in rank.model] == [*range(NUM_WINDOWS)]
            assert rank.committed == NUM_WINDOWS

    def meet(self, purpose: Purpose, *, planned: int | None = None) -> None:
        """A round of rows in which nobody is lost."""
        rows = {
            r.state.me: r.say(purpose, plan=None if planned is None else r.plan(planned))
            for r in self.ranks
        }
        for rank in self.ranks:
            decision = judge(rank.state, rows)
            assert decision.error is None
            rank.commit(decision.actions)
            rank.state = decision.state

    def begin(self) -> None:
        """The first plans of an epoch or a generation: SYNC plans two windows ahead."""
        first = self.ranks[0].state
        for ahead in range(2 if first.is_sync else 1):
            self.meet(Purpose.PLAN, planned=first.window + ahead)

    def window(self, point: str) -> bool:
        """Whether the window was applied on all ranks."""
        if point == "before rows":
            return False
        is_sync, window = self.ranks[0].state.is_sync, self.ranks[0].state.window
        rows = {}
        for rank in self.ranks:
            plan = rank.plan(window + 2) if is_sync else None
            report = Report(weight=1.0, samples=1, steps=1)
            rows[rank.state.me] = rank.say(Purpose.WINDOW, report=report, plan=plan)
            if not is_sync:
                rank.state = rank.state.start()
        hear = [self.survivor()] if point == "rows" else self.ranks
        decisions = {rank.name: judge(rank.state, rows) for rank in hear}
        if is_sync:
            for rank in hear:
                rank.commit(decisions[rank.name].actions)
        if point in ("rows", "before tensors"):
            return False
        if not is_sync:
            return self.land(rows, decisions, point)
        receive = [self.survivor()] if point == "tensors" else self.ranks
        for rank in receive:
            assert Action.APPLY in decisions[rank.name].actions
            rank.apply(decisions[rank.name])
        return point in ("", "plans")

    def land(self, rows: dict[int, Row], decisions: dict[str, Decision], point: str) -> bool:
        """The second half of a window of local steps: differences, the next plan, the landing."""
        if point in ("tensors", "after tensors"):
            return False
        window = self.ranks[0].state.window
        plans = {
            r.state.me: r.state.make_row(Purpose.PLAN, plan=r.plan(window + 1)).own
            for r in self.ranks
        }
        for rank in [self.survivor()] if point == "plans" else self.ranks:
            assert Action.EXCHANGE in decisions[rank.name].actions
            plan = plans[rank.state.planner]
            assert plan is not None
            decision = land(rank.state, rows, plan.plan, decisions[rank.name])
            rank.commit(decision.actions)
            rank.apply(decision)
        return not point

    def reform(self) -> None:
        """The victim is gone: the others begin a generation in the state of one that is ahead."""
        self.ranks.remove(self.victim)
        source = max(self.ranks, key=lambda rank: len(rank.model))
        base = len(source.model)
        for rank in (self.victim, *self.ranks):
            assert rank.committed <= base, "a committed window is lost"
            assert rank.model[: rank.committed] == source.model[: rank.committed]
            assert len(rank.model) >= base - 1, "nobody is more than a window ahead"
        self.generation += 1
        formation = Formation(
            generation=self.generation,
            members=tuple(rank.name for rank in self.ranks),
            numbers=tuple(rank.state.me for rank in self.ranks),
            base=base,
            has_state=True,
            source=source.name,
            receivers=tuple(rank.name for rank in self.ranks if len(rank.model) < base),
        )
        for rank in self.ranks:
            rank.state = rank.state.renew(formation, rank.state.me)
            rank.model, rank.committed = [*source.model], base
        if base < NUM_WINDOWS:
            self.begin()


@pytest.mark.parametrize("policy", ApplyPolicy)
@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("point", POINTS)
def test_whoever_is_lost_the_others_train_every_window_once(
    policy: ApplyPolicy, size: int, point: str
) -> None:
    for lost_in, victim, told in product(range(NUM_WINDOWS), {0, size - 1}, {0, size - 2}):
        Team(policy, size, victim, told).train(lost_in, point)
