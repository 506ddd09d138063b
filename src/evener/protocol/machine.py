"""The state machine of a window: the decision from the rows of all ranks. Pure.

A *round* is one exchange of rows. Before it, a rank makes the row of its next action
(``State.make_row``). After it, ``judge`` returns the decision: a list of actions, and the next
state. All ranks judge the same rows by the same function, so all decide the same. Engines carry out
the decision, and keep no state of their own about which ranks have left, rest, stop or are away.

The whole table is in ``judge`` and the functions below it; the first line that matches applies::

    rows                                              what is done
    ------------------------------------------------  -------------------------------------------
    different windows, generations or purposes        error on every rank: ranks disagree
    ASK                                               nothing: the exchange itself follows
    PLAN                                              the planner's plan is accepted: work begins;
                                                      error if ranks hold different data
    REST or IDLE, an exchange in flight               nothing: it lands first
    REST or IDLE                                      COMMIT; idle ranks leave their loops
    CHANGE                                            COMMIT; then ranks are parked or recalled,
                                                      or a new generation is formed
    WINDOW or STEP                                    COMMIT, and:
      ... in SYNC, trainable parameters differ        error on every rank
      ... learning rates differ                       RATES, and one of the lines below
      ... a rank drops it, as it was asked to stop    DROP
      ... a rank's share did not fit into memory      REDO; DROP if the team stops
      ... different optimizers are to be stepped      error on every rank
      ... a number is not finite, no skip allowed     RESTORE, error on every rank
      ... a weight is negative or not finite          error on every rank
      ... some losses are means and some are sums     error on every rank
      ... in CADENCE and ASYNC                        EXCHANGE, then PLAN; ``land``: LAND, and
                                                      CHANGE if the planner wishes it
      ... one optimizer is to be stepped (WINDOW)     STEP_ONE
      ... samples differ from the plan (WINDOW)       error on every rank
      ... otherwise                                   APPLY; CHANGE if the planner wishes it

A *parked* rank costs more than it contributes. It stays in the rounds of an epoch, in which it
sends an ``IDLE`` row at once. It does not take part in exchanges between rounds: of tensors, and in
functions of ``on_commit``. The plan of a window says which ranks are parked in it; between epochs
none is (``State.regroup``). If the planner is parked, the lowest remaining rank plans from then on,
also after the other is recalled, because that one lacks the others' measurements.

In an elastic team the coordinator numbers and forms generations, and ``State.renew`` returns the
state with which one begins. A rank that joins or leaves changes the generation by agreement; before
that, parked ranks are recalled. A lost rank forces the change: the others drop the current window
and redo it, and parked ranks return like ranks that join.

If replicas are compared, rows carry digests of the state after the previous window. If they differ,
``VERIFY`` precedes the commit: it finds the difference, and every rank raises an error.

``COMMIT`` concerns the previous window, if one was applied: the rows of all ranks show that all
have applied it. In a line that has it, it precedes everything else, errors included.
"""

import math
from collections.abc import Mapping
from enum import Enum, auto
from typing import Any, NamedTuple

from evener.errors import CollectiveMismatchError, EvenerError, ProtocolError, UsageError
from evener.planning.plans import LocalPlan, WindowPlan
from evener.planning.policies import ApplyPolicy
from evener.planning.report import Report
from evener.protocol import wording
from evener.protocol.formation import Formation
from evener.protocol.row import ALL, Plan, Purpose, Row


class Phase(Enum):
    """The phase of a rank."""

    OUT = auto()
    """No epoch with plans is open."""
    WORK = auto()
    """In an epoch, with a plan."""
    REST = auto()
    """Its loop was left by ``break``, which others may not know: it still owes them rows."""
    ENDED = auto()
    """Closed, or in disagreement with the others: no further agreement is possible."""


class Action(Enum):
    """An action of the decision, which an engine carries out."""

    VERIFY = auto()
    """Find the difference of the ranks' states."""
    COMMIT = auto()
    """Commit the previous window, which all ranks have applied."""
    RATES = auto()
    """Exchange learning rates, which differ; ranks without a share use those of the others."""
    DROP = auto()
    """Drop this window; its samples stay uncommitted."""
    REDO = auto()
    """Drop this window, and compute it again by the same plan."""
    RESTORE = auto()
    """Discard all steps since the last average."""
    STEP_ONE = auto()
    """Average and step one optimizer; the window continues."""
    APPLY = auto()
    """Average and step; the window is over."""
    EXCHANGE = auto()
    """Exchange differences from the consensus, then the next plan."""
    LAND = auto()
    """Apply the exchanged average to the consensus."""
    CHANGE = auto()
    """End the generation, because the members of an elastic team change."""


class State(NamedTuple):
    """The state of the team, as one rank knows it.

    Attributes:
        me: This rank's number in the team.
        world_size: Ranks of the team, parked and absent ones included.
        policy: What a window is.
        members: Ranks of this generation, in order.
        parked: The parked ranks among them.
        planner: The rank that plans, writes and prints. It is rank 0 until that is parked, then the
            lowest present rank until that is parked. In an elastic team it is the oldest member; -1
            on a rank that has not joined.
        generation: Its number.
        phase: The phase of this rank.
        window: Number of the window that is being computed.
        own: The row that this rank has sent and that is not answered yet.
        plans: Agreed plans, that of this window first; one at a time in CADENCE and ASYNC.
        flight: Plan of the window whose exchange has begun, and whose average is not applied yet.
        applied: Whether the previous window is applied and not yet known to be committed.
        stopping: Whether the team has agreed to stop.
        winding: Whether the epoch ends early, with one more window at which all wait.
        led_out: Whether this rank has left its loop because the others have left theirs.
        is_elastic: Whether members may join and leave.
        absent: Numbers of an elastic team that no member has.
        leaving: Ranks that leave an elastic team for good, by their last rows.
    """

    me: int
    world_size: int
    policy: ApplyPolicy
    members: tuple[int, ...]
    parked: frozenset[int] = frozenset()
    planner: int = 0
    generation: int = 0
    phase: Phase = Phase.OUT
    window: int = 0
    own: Row | None = None
    plans: tuple[Plan, ...] = ()
    flight: LocalPlan | None = None
    applied: bool = False
    stopping: bool = False
    winding: bool = False
    led_out: bool = False
    is_elastic: bool = False
    absent: frozenset[int] = frozenset()
    leaving: tuple[int, ...] = ()

    @property
    def plan(self) -> Plan | None:
        """Return the plan of the window that is being computed."""
        return self.plans[0] if self.plans else None

    @property
    def is_sync(self) -> bool:
        """Return whether a window is one optimizer step."""
        return self.policy is ApplyPolicy.SYNC

    @property
    def is_working(self) -> bool:
        """Return whether there is a window to compute."""
        return self.phase is Phase.WORK

    @property
    def is_parked(self) -> bool:
        """Return whether this rank is parked."""
        return self.me in self.parked

    @property
    def planned_to_park(self) -> list[frozenset[int]]:
        """Return the ranks that each agreed plan parks."""
        return [plan.parked_ranks for plan in self.plans if isinstance(plan, WindowPlan)]

    @property
    def due_to_park(self) -> frozenset[int]:
        """Return the ranks that the plan of this window parks; between epochs no rank is parked."""
        planned = self.planned_to_park if self.is_working else []
        return planned[0] if planned else frozenset()

    # ── actions ──────────────────────────────────────────────────────────────────────────────────

    def make_row(self, purpose: Purpose, **fields: Any) -> "State":
        """Make this rank's row; the returned state holds it as ``own``.

        Args:
            purpose: Its purpose.
            **fields: Further fields of ``Row``.
        """
        row = Row(
            purpose=purpose,
            window=self.window,
            generation=self.generation,
            left=self.phase is Phase.REST,
            **fields,
        )
        return self._replace(own=row)

    def start(self) -> "State":
        """End a window of local steps, and begin its exchange."""
        assert isinstance(self.plan, LocalPlan)
        return self._replace(flight=self.plan)

    def leave(self) -> "State":
        """Leave the loop, by ``break`` or by an error: ``REST`` follows.

        In SYNC that also holds in ``OUT``, which is the phase in windows of streams, and between
        epochs. In CADENCE and ASYNC it holds in ``OUT`` if the last window of an epoch is not
        committed: ranks that end their loops commit it. Without effect in all other phases.
        """
        has_landed = self.applied and self.flight is None
        is_owed = self.phase is Phase.OUT and (self.is_sync or has_landed)
        return self._replace(phase=Phase.REST) if self.is_working or is_owed else self

    def release(self) -> "State":
        """Drop all plans, at the beginning or the end of an epoch."""
        phase = self.phase if self.phase is Phase.ENDED else Phase.OUT
        return self._replace(phase=phase, plans=(), winding=False)

    def begin(self) -> "State":
        """Begin an epoch, without state of the previous one."""
        return self.release()._replace(led_out=False)

    def regroup(self) -> "State":
        """Park exactly the ranks that the plan of this window names."""
        parked = self.due_to_park
        present = [rank for rank in self.members if rank not in parked]
        planner = self.planner if self.planner in present else present[0]
        return self._replace(parked=parked, planner=planner)

    def renew(self, formation: Formation, me: int) -> "State":
        """Begin a generation of an elastic team, without plans.

        The first member plans. Members that stay come first, in their order, so the planner changes
        only if it is lost.

        Args:
            formation: The generation.
            me: The rank's number.
        """
        return self.release()._replace(
            me=me,
            generation=formation.generation,
            members=formation.numbers,
            parked=frozenset(),
            absent=frozenset(range(self.world_size)) - frozenset(formation.numbers),
            planner=formation.numbers[0],
            window=formation.base,
            own=None,
            flight=None,
            applied=False,
            phase=Phase.OUT,
            leaving=(),
        )

    def end(self) -> "State":
        """End the team, which was left or lost."""
        return self._replace(phase=Phase.ENDED, own=None, flight=None)


class Decision(NamedTuple):
    """The decision of a round.

    Attributes:
        state: The state after it.
        actions: What to do, in this order.
        part: The optimizer that is stepped; ``None`` for all of them.
        weight: Weight of the window, over all ranks.
        divisor: By which the sum of the ranks' gradients is divided: ``weight``, or 1 for losses
            that are sums.
        loss: Mean loss; ``nan`` without weight.
        skip: Whether the window is skipped; its samples count as used.
        culprit: The first rank with a non-finite value, if that is an error.
        error: The error to raise after all actions.
    """

    state: State
    actions: tuple[Action, ...] = ()
    part: int | None = None
    weight: float = 0.0
    divisor: float = 0.0
    loss: float = math.nan
    skip: bool = False
    culprit: int | None = None
    error: EvenerError | None = None


# Purposes with which an idle rank can exchange rows: it joins what the others do.
_WITH_IDLE = frozenset({Purpose.WINDOW, Purpose.STEP, Purpose.REST, Purpose.IDLE})


def judge(state: State, rows: Mapping[int, Row]) -> Decision:
    """Return the decision from the rows of a round; it is the same on every rank.

    Args:
        state: This rank's state.
        rows: By rank, of all members of the generation, in rank order.
    """
    present = {rank: row for rank, row in rows.items() if rank not in state.parked}
    purpose = _common_purpose(present)
    places = {(row.window, row.generation) for row in rows.values()}
    if purpose is None or len(places) > 1:
        error = CollectiveMismatchError(wording.mismatch(rows, {}))
        return Decision(state=state.end(), error=error)
    leaving = tuple(rank for rank, row in rows.items() if row.leaving)
    # If all of them leave, no rank would continue: they stop together, and save their state.
    stops = len(leaving) == len(rows) or any(row.stop or row.drop for row in rows.values())
    state = state._replace(own=None, stopping=state.stopping or stops, leaving=leaving)
    if purpose is Purpose.ASK:
        return Decision(state=state)
    if purpose is Purpose.PLAN:
        return _begin(state, rows)
    commit = _commit(state, present)
    if purpose in (Purpose.REST, Purpose.IDLE):
        return _settle(state, rows, commit)
    if purpose is Purpose.CHANGE:
        return Decision(state=state._replace(applied=False), actions=commit)
    return _judge_window(state._replace(applied=False), present, purpose, commit)


def _common_purpose(rows: Mapping[int, Row]) -> Purpose | None:
    """Return the purpose of all ranks; ``None`` if purposes differ."""
    wanted = {row.purpose for row in rows.values()}
    busy = wanted - {Purpose.IDLE}
    if len(busy) > 1:
        return None
    purpose = busy.pop() if busy else Purpose.IDLE
    return None if Purpose.IDLE in wanted and purpose not in _WITH_IDLE else purpose


def _commit(state: State, rows: Mapping[int, Row]) -> tuple[Action, ...]:
    differ = len({row.digest for row in rows.values() if row.digest}) > 1
    return (Action.VERIFY,) * differ + (Action.COMMIT,) * state.applied


def _begin(state: State, rows: Mapping[int, Row]) -> Decision:
    """Accept the planner's plan: an epoch begins, or continues in a new generation."""
    own = rows[state.me]
    for rank, row in rows.items():
        if row.data != own.data:
            error = UsageError(wording.other_data(rank, row, state.me, own))
            return Decision(state=state, error=error)
    return Decision(state=_accept(state, rows[state.planner].plan))


def _accept(state: State, plan: Plan | None) -> State:
    """Accept a plan; without one, or without samples, the epoch is over."""
    plans = state.plans
    if isinstance(plan, WindowPlan):
        plans = (*plans, plan)
    elif plan is not None:
        plans = (plan,) if any(plan.most) else ()
    if state.phase is Phase.REST:
        return state._replace(plans=plans)
    phase = Phase.WORK if plans and not state.stopping else Phase.OUT
    return state._replace(plans=plans, phase=phase)


def _settle(state: State, rows: Mapping[int, Row], commit: tuple[Action, ...]) -> Decision:
    """Commit the applied window: all ranks rest. Idle ranks leave the loop that others left."""
    if any(row.busy for row in rows.values()):
        return Decision(state=state)  # a rank with an exchange in flight applies it first
    state = state._replace(applied=False)
    if state.phase is Phase.REST or rows[state.me].purpose is Purpose.IDLE or not state.plans:
        is_left = any(row.left for row in rows.values())
        led_out = is_left and state.phase is not Phase.REST
        state = state.release()._replace(led_out=led_out)
    return Decision(state=state, actions=commit)


def _judge_window(
    state: State, rows: Mapping[int, Row], purpose: Purpose, actions: tuple[Action, ...]
) -> Decision:
    """Judge the rows that close a window, or step one optimizer in it."""
    if state.is_sync and (error := unlike_parameters(rows)):
        return Decision(state=state, actions=actions, error=error)
    if len({row.rates for row in rows.values()}) > 1:
        actions = (*actions, Action.RATES)
    working = {rank: row for rank, row in rows.items() if row.purpose is not Purpose.IDLE}
    redo = any(row.redo for row in rows.values())
    if any(row.drop for row in rows.values()) or (redo and state.stopping):
        return Decision(state=state.release(), actions=(*actions, Action.DROP))
    if redo:
        return Decision(state=state, actions=(*actions, Action.REDO))
    first, *others = working
    part = working[first].part
    for rank in others:
        if working[rank].part != part:
            parts = (part, working[rank].part)
            words = ["all optimizers" if p == ALL else f"optimizer {p}" for p in parts]
            message = (
                f"rank {first} steps {words[0]}, rank {rank} {words[1]}: every rank must step the "
                "same optimizers in the same order; decide by ddp.window, never by a local counter"
            )
            return Decision(state=state, actions=actions, error=UsageError(message))
    bad = [rank for rank, row in rows.items() if row.report.non_finite]
    if bad and not all(rows[rank].may_skip for rank in bad):
        if not state.is_sync:
            state = state.release()._replace(flight=None)
        return Decision(state=state, actions=(*actions, Action.RESTORE), culprit=bad[0])
    try:
        weight, loss = combine({rank: row.report for rank, row in rows.items()})
    except UsageError as refused:
        return Decision(state=state, actions=actions, error=refused)
    counted = {rank: row.summed for rank, row in rows.items() if row.report.weight}
    if len(set(counted.values())) > 1:
        return Decision(
            state=state, actions=actions, error=UsageError(wording.other_reduction(counted))
        )
    divisor = 1.0 if any(counted.values()) else weight
    skip, only = bool(bad) or weight == 0.0, None if part == ALL else part
    decision = Decision(
        state=state, part=only, weight=weight, divisor=divisor, loss=loss, skip=skip
    )
    if not state.is_sync:
        return decision._replace(actions=(*actions, Action.EXCHANGE))
    if purpose is Purpose.WINDOW and only is not None:
        return decision._replace(actions=(*actions, Action.STEP_ONE))
    if purpose is Purpose.WINDOW and (wrong := _unlike_work(state, rows)):
        return decision._replace(actions=actions, error=wrong)
    return _close(decision, rows, actions)


def _close(decision: Decision, rows: Mapping[int, Row], actions: tuple[Action, ...]) -> Decision:
    """Close a window of SYNC, and accept the plan of the window after the next."""
    before = decision.state
    state = before._replace(window=before.window + 1, applied=True)
    actions = (*actions, Action.APPLY)
    if before.plans:
        state = _accept(state._replace(plans=state.plans[1:]), rows[state.planner].plan)
    goes_on = bool(state.plans) or not before.plans
    if rows[state.planner].renew and goes_on and not state.stopping:
        actions = (*actions, Action.CHANGE)
    return decision._replace(state=state, actions=actions)


def land(state: State, rows: Mapping[int, Row], plan: Plan | None, decision: Decision) -> Decision:
    """Apply the average of a window of local steps whose exchange is over.

    Args:
        state: This rank's state now, with the window in flight.
        rows: Rows of the window.
        plan: The next plan; ``None`` if a value was not finite.
        decision: The decision from the rows.
    """
    over, has_left = state.flight, state.phase is Phase.REST
    assert over is not None, "no window is in flight"
    stopping = state.stopping or decision.state.stopping
    steps = sum(row.report.steps for row in rows.values())
    state = _accept(state._replace(flight=None, stopping=False, plans=()), plan)
    is_over = state.plan is None
    is_left = any(row.left for row in rows.values())
    winds = stopping or state.winding or is_left
    if winds and not over.blocking:
        state = state._replace(winding=True)
    elif winds:
        led_out = not (is_over or stopping or has_left)
        # A rank that has left needs a last REST round, even if nothing is left to commit.
        # So all ranks join it.
        phase = Phase.REST if is_left else Phase.OUT
        state = state._replace(plans=(), winding=False, phase=phase, led_out=led_out)
    state = state._replace(window=state.window + (steps > 0), applied=steps > 0, stopping=stopping)
    state = state._replace(leaving=decision.state.leaving)
    actions = (*(one for one in decision.actions if one is Action.COMMIT), Action.LAND)
    changes = rows[state.planner].renew or state.leaving
    if changes and state.plans and not winds:
        actions = (*actions, Action.CHANGE)
    return decision._replace(state=state, actions=actions)


def unlike_parameters(rows: Mapping[int, Row]) -> UsageError | None:
    """Return the error if ranks train different parameters, by the rows of a window."""
    if len({row.trainable for row in rows.values()}) == 1:
        return None
    counts = ", ".join(f"{row.trainable} on rank {rank}" for rank, row in rows.items())
    return UsageError(
        f"ranks train different numbers of parameter tensors ({counts}): requires_grad_(True) "
        "was called only on some of them. Call it on every rank, at the beginning of an epoch "
        "or when ddp.window, which is the same everywhere, reaches a number"
    )


def _unlike_work(state: State, rows: Mapping[int, Row]) -> ProtocolError | None:
    plan = state.plan
    assert isinstance(plan, WindowPlan)
    for rank, row in rows.items():
        if row.report.samples != plan.shares[rank]:
            return ProtocolError(
                f"rank {rank} computed {row.report.samples} samples of window {plan.window}, "
                f"not the planned {plan.shares[rank]}; ranks run different code, or this is a bug "
                "of evener"
            )
    if sum(plan.shares[rank] for rank in rows) != plan.size:
        return ProtocolError(
            f"window {plan.window} has shares {plan.shares} for ranks {list(rows)}: the samples of "
            "an absent rank would be lost; this is a bug of evener"
        )
    return None


def combine(reports: Mapping[int, Report]) -> tuple[float, float]:
    """Return weight and mean loss of a window over all ranks, by the one weight rule.

    Sums run from the left in rank order: the built-in ``sum()`` rounds differently from Python 3.12
    on.

    Returns:
        The total weight and the mean loss, which is ``nan`` for a weight of 0. The loss is not
        finite if that of a rank with weight is not.

    Raises:
        UsageError: A weight is negative or not finite, or their sum is not finite.
    """
    total = loss_sum = 0.0
    for rank, report in reports.items():
        weight = check_weight(report.weight, owner=f"rank {rank}")
        if weight > 0.0:
            total += weight
            loss_sum += report.loss_sum
    check_weight(total, owner="the window")
    return total, loss_sum / total if total else math.nan


def check_weight(weight: float, *, owner: str) -> float:
    """Return ``weight`` if it can weigh a loss.

    Args:
        weight: Units behind the mean loss, such as samples or tokens.
        owner: The owner of the weight, for the message, such as ``"rank 1"``.

    Raises:
        UsageError: The weight is negative or not finite.
    """
    if not math.isfinite(weight) or weight < 0.0:
        raise UsageError(
            f"{owner} has weight={weight}: a weight is the number of samples or tokens behind a "
            "mean loss, so it must be finite and not negative. Give that number"
        )
    return weight
