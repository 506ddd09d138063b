"""The windows of one rank: what loaders and loops ask for, and what every policy does alike."""

import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

from evener.data.cursor import Cursor, derive_seed
from evener.data.randomness import seed_training
from evener.devices import kind_of, queue_of
from evener.engine.collectives import Collectives
from evener.engine.commits import Commits
from evener.engine.consensus import Consensus
from evener.engine.engine_options import EngineOptions
from evener.engine.generations import GenerationChangedError, Generations
from evener.engine.results import CadenceRecord, WindowResult, Work
from evener.engine.rounds import Round, Rounds
from evener.engine.run_state import RunState
from evener.engine.schedule import agree_on_rates, rates_of, set_rates
from evener.engine.share import Share, WindowSpans
from evener.engine.team import Team
from evener.engine.training_state import OptimizerState, TrainingState
from evener.errors import UsageError
from evener.planning.plans import WindowPlan
from evener.planning.policies import ApplyPolicy, Planner
from evener.planning.report import Report
from evener.protocol.machine import Action
from evener.protocol.row import Plan, Purpose, Row
from evener.team.terminal import write_unmarked

#: In rounds of these purposes states are compared always, where ``verify_every`` is given.
_AT_REST = frozenset({Purpose.REST, Purpose.IDLE, Purpose.CHANGE})


class Engine(ABC):
    """Runs windows on one rank; there is a leaf for each way of applying updates.

    It exchanges rows with the other ranks, and carries out what follows by the rules of
    ``protocol/``.

    Attributes:
        rounds: Exchange rows; they hold the state of the team, as this rank knows it.
        run: What the team has applied and learnt.
        consensus: What all ranks have agreed on.
        commits: Commit windows, and call functions that follow commits.
        generations: Change the team.
        collectives: Exchanges outside of windows.
        training: What this rank trains with, of which ``flat``, ``buffers`` and ``optimizers`` are
            parts.
        options: The options.
        batch_size: Samples of a window of SYNC over all ranks, or of a local step.
        whole_micro_batches: Of how many samples the shares of SYNC are multiples; 0 for any share.
        commits_at_once: Whether each window of SYNC is committed by a round of its own, before
            anything of the next window is computed.
        max_steps: Most optimizer steps of the run, as ``optimizer_steps`` counts them; ``None`` for
            no limit.
        share: The micro-batches between two updates, while they are computed.
        spans: What this rank's time goes to in a window.
        known_sizes: Sizes of micro-batches that this rank has computed; see ``Share``.
        queue: Of the device that the model lies on, if it has one.
        in_epoch: Whether a loader with plans is being iterated over.
        is_planning: Whether this rank is where the windows of an epoch are planned.
        result: The window that was applied last in the call under way.
        on_left_out: Called with the micro-batches of a local step that this rank leaves out.
        windows_s: Seconds that the latest windows took.
    """

    def __init__(
        self,
        team: Team,
        training: TrainingState,
        options: EngineOptions,
        way: ApplyPolicy,
        consensus: Consensus,
    ) -> None:
        self.team, self.options = team, options
        self.training = training
        self.flat, self.buffers = training.flat, training.buffers
        self.optimizers = training.optimizers
        self.rounds = Rounds(team, way, options.stop_requested)
        options.guards.speak(for_all=self.rounds.is_main)
        self.run = RunState(team.world_size, options.loss_scale)
        self.consensus = consensus
        self.commits = Commits(self.rounds, self.run, consensus, training.schedule)
        self.generations = Generations(self.rounds, self.run, self)
        self.collectives = Collectives(self.generations)
        self.batch_size = self.whole_micro_batches = 0
        self.commits_at_once = False
        self.max_steps: int | None = None
        self.known_sizes: set[int] = set()
        self.queue = queue_of(self.flat.groups[0].data.device)
        self.share = self._open(0, 1.0)
        self.spans = WindowSpans(team)
        self.in_epoch = self.is_planning = False
        #: Whether the loop's present micro-batch is void, as the team has changed meanwhile.
        self._is_void = False
        self.result: WindowResult | None = None
        self.on_left_out: list[Callable[[int], None]] = []
        self.windows_s: deque[float] = deque(maxlen=64)
        if team.is_elastic:
            self.commits.observe(self.generations.time_redo)

    # ── what others ask ──────────────────────────────────────────────────────────────────────────

    @property
    @abstractmethod
    def policy(self) -> Planner:
        """Return the policy that divides the work; only the planner's decides."""

    @property
    def why_parked(self) -> str:
        """Return why the planner, if this rank is it, has parked ranks; empty without any."""
        return ""

    @property
    def window(self) -> int:
        """Number of the window that is being computed."""
        return self.run.progress.window

    @property
    def optimizer_steps(self) -> int:
        """Return what ``max_steps`` limits: the team's optimizer steps, skipped ones included."""
        return self.run.progress.optimizer_steps

    @property
    def is_training(self) -> bool:
        """Return whether this rank is in a training loop, of a loader or of its own."""
        return self.in_epoch or self.share.in_micro_batch

    def seed_draws(self, *place: int | str) -> None:
        """Derive what the model draws next, such as dropout, from a micro-batch's place.

        Args:
            *place: What identifies the micro-batch, on the CPU's generator and on that
                of each kind of device that the model lies on.
        """
        seed = derive_seed(*place)
        seed_training(seed)
        for device in {group.data.device for group in self.flat.groups}:
            kind_of(device).seed(seed)

    # ── an epoch, as loaders see it ──────────────────────────────────────────────────────────────

    def check_start(self, epoch: int) -> None:
        """Refuse to begin an epoch inside another one, or with a model of other parameters.

        Raises:
            UsageError: Says which.
        """
        if self.in_epoch:
            raise UsageError(
                f"epoch {epoch} was begun inside the loop over another one; finish that loop, or "
                "leave it by break, first"
            )
        self.training.check_identity()

    def begin(self, cursor: Cursor, batch_size: int, max_steps: int | None) -> None:
        """Start or continue the cursor's epoch; all ranks call it together.

        Args:
            cursor: The data position.
            batch_size: Samples of a window of SYNC over all ranks, or of a local step.
            max_steps: Most optimizer steps of the run, as ``optimizer_steps`` counts them;
                ``None`` for no limit.
        """
        self.settle()
        self.run.cursor, self.batch_size, self.max_steps = cursor, batch_size, max_steps
        self._begin()

    def _begin(self) -> None:
        """Get ready for an epoch, when all before is settled."""
        self.spans.restart()
        self.rounds.state = self.rounds.state.begin()

    @contextmanager
    def epoch_open(self) -> Iterator[None]:
        """Keep the user's loop over a loader with plans open, in a ``with`` block."""
        self.in_epoch = True
        try:
            yield
        finally:
            self.in_epoch = False

    def work(self) -> Iterator[Work]:
        """Yield what this rank is to compute in the epoch that was begun; all ranks go through it.

        Between two pieces it takes part in what the others exchange.
        """
        self._calibrate()
        self.generations.is_cold = False
        self.generations.step_in()
        self.is_planning = True
        try:
            # The team may change here, too: epochs of one window have no other place for it. It may
            # also begin another epoch without this rank.
            while not self.generations.is_alone:
                renew = self.generations.wants_renewal
                if self.generations.keep(partial(self.exchange_plans, renew=renew)):
                    break
            yield from self._work()
        finally:
            self.is_planning = False

    def _calibrate(self) -> None:
        """Learn how fast ranks are beside one another, where that is needed."""
        return

    @abstractmethod
    def _work(self) -> Iterator[Work]:
        """Yield what this rank is to compute, by plans."""

    @abstractmethod
    def exchange_plans(self, *, renew: bool = False, work_for_all: bool = False) -> bool:
        """Agree on the plans of the next windows; all ranks that are present call it together.

        Args:
            renew: Whether the planner wishes that the members of the team change before.
            work_for_all: Whether every rank gets work in these windows, if at all possible.

        Returns:
            Whether that was done.
        """

    def _agree_on_plan(self, plan: Plan | None, *, renew: bool) -> Round | None:
        """Take the planner's plan; all ranks that are present call it together.

        Args:
            plan: That of the planner.
            renew: See ``exchange_plans``.

        Returns:
            The round; ``None`` where the planner wishes that members change.
        """
        data = self.run.data(self.batch_size)
        found = self.meet(Purpose.PLAN, plan=plan, renew=renew, **data)
        is_wished = found.rows[self.rounds.state.planner].renew and not self.rounds.stopping
        return None if is_wished else found

    @abstractmethod
    def end_epoch(self) -> None:
        """Commit the last window of an epoch; all ranks call it together."""

    @abstractmethod
    def open_share(self, num_micro_batches: int) -> Share:
        """Start this rank's part of a window, or a local step."""

    def _open(self, num_micro_batches: int, scale: float | None) -> Share:
        self.share = Share(
            num_micro_batches, scale, self.options.slowdown, self.queue, self.known_sizes
        )
        return self.share

    @contextmanager
    def in_backward(self, part: int | None) -> Iterator[None]:
        """Compute gradients, in a ``with`` block.

        Args:
            part: Of the optimizer that they are for; ``None`` for all together.
        """
        yield
        self.flat.attach_grads()

    def plan_ahead(self) -> None:
        """Use the time in which a device computes gradients; called after each backward."""
        self.commits.judge()

    @abstractmethod
    def end_micro_batch(self) -> WindowResult | None:
        """End a micro-batch, and with it whatever ends there; see ``Ddp.step``."""

    @abstractmethod
    def drop_share(self) -> None:
        """Discard gradients and buffer changes of the open share."""

    def redo(self) -> bool:
        """Discard the open share, a micro-batch of which did not fit into memory.

        Returns:
            Whether all ranks compute the window again; otherwise only this one its share.
        """
        self.drop_share()
        return False

    def leave(self) -> None:
        """Leave an epoch in its middle, by ``break`` or an error; others learn of it later."""
        self.rounds.state = self.rounds.state.leave()

    @abstractmethod
    def settle(self) -> None:
        """Commit what has been applied and not yet committed; all ranks call it together.

        What a loop that was left by ``break`` has begun is brought to its end first.
        """

    # ── state ────────────────────────────────────────────────────────────────────────────────────

    def prepare_save(self) -> None:
        """Agree on what is saved: at a commit, or between epochs; all ranks call it together.

        Raises:
            ReplicasDifferError: On every rank, where ``verify_every`` is given.
        """
        if self.consensus.check.every:
            digest = self.consensus.digest(at_rest=True)
            digests = self.collectives.ask("comparing replicas (verify_every)", digest)
            if len(set(digests.values())) > 1:
                self.consensus.compare(self.team.comm, self.window - 1, at_rest=True)

    @abstractmethod
    def optimizer_states(self) -> list[OptimizerState]:
        """Return the state of each optimizer as a checkpoint holds it; on the main rank."""

    def load_state_dict(self, state: Mapping[str, Any], members: Sequence[str]) -> None:
        """Continue from ``RunState.state_dict``, with the model as it is; of a team of any size."""
        self.run.load_state_dict(state, self.policy, members, self.rounds.rank)
        self.policy.set_micro_batch_sizes(self.run.limits.sizes)
        self.consensus.accept()
        self.rounds.state = self.rounds.state._replace(window=self.window)

    def close_down(self) -> None:
        """End the exchanges and all work beside the training loop; idempotent."""
        self.rounds.state = self.rounds.state.end()
        self.team.close()  # while a rank is parked, the others have connections of their own

    # ── a change of the team ─────────────────────────────────────────────────────────────────────

    def let_go(self) -> None:
        """End what uses the connections of this generation."""
        # With Gloo, ranks that were not connected to the lost one wait until every other rank has
        # closed its group.
        self.team.let_go()

    def drop(self) -> None:
        """Drop all that is under way: the share, plans, and whatever waits for other ranks."""
        share = self.share
        self.drop_share()
        self._open(0, 1.0)
        # The loop may be in a micro-batch, which is then void.
        self._is_void = share.in_micro_batch and self.in_epoch
        if self._is_void:
            self.share.start_micro_batch(share.open_samples)

    def use_team(self) -> None:
        """Use the ranks that are present from now on, in the policy and in exchanges."""
        self.policy.set_absent(self.team.absent)
        self.options.guards.speak(for_all=self.rounds.is_main)
        write_unmarked(self.rounds.is_main)

    def recovered(self) -> None:
        """Continue with the state that has arrived."""
        self.consensus.reset_model()

    # ── rounds ───────────────────────────────────────────────────────────────────────────────────

    def meet(self, purpose: Purpose, **fields: Any) -> Round:
        """Exchange rows and carry out what follows; all ranks call it together.

        Args:
            purpose: What this rank wants.
            **fields: As in ``Rounds.meet``.
        """
        if purpose is not Purpose.ASK and not self.rounds.state.is_parked:
            at_rest = purpose in _AT_REST
            fields["digest"] = self.consensus.digest_if_due(self.window - 1, at_rest=at_rest)
        found = self.rounds.meet(purpose, **fields)
        self._follow(found)
        return found

    def _commit_applied(self) -> None:
        """Commit the applied window before the team changes; all ranks call it together."""
        if self.rounds.state.applied:
            self.meet(Purpose.CHANGE, report=Report(**self.run.late_fields))

    def _follow(self, found: Round) -> None:
        """Carry out what follows from a round.

        The state follows when all is done: functions of ``on_commit`` see the window before, and
        what they exchange may ask for a stop. A change of the generation belongs to the new state.

        Raises:
            GenerationChangedError: The team has changed meanwhile: the rest is void.
        """
        rounds, decision, generation = self.rounds, found.decision, self.rounds.state.generation
        after = decision.state
        rounds.state = rounds.state._replace(own=None, stopping=rounds.stopping or after.stopping)
        limits = {rank: row.report.limit for rank, row in found.rows.items() if row.report.limit}
        if limits and self.run.limits.learn(limits):
            self.policy.set_micro_batch_sizes(self.run.limits.sizes)
        for action in decision.actions:
            if action is Action.COMMIT:
                self.commits.commit(found.rows)
                if rounds.state.generation != generation:
                    raise GenerationChangedError("a rank was lost while ddp.on_commit ran")
            elif action is Action.CHANGE:
                continue  # in the new state
            elif action is Action.VERIFY:
                if not rounds.state.is_parked:
                    self.consensus.compare(self.team.comm, self.window - 1, at_rest=True)
            elif action is Action.RATES:
                if not rounds.state.is_parked:
                    self._agree_on_rates(found.rows)
            else:
                self._carry_out(action, found)
        rounds.state = after._replace(stopping=rounds.stopping)
        if decision.culprit is not None:
            self._refuse_non_finite(decision.culprit, found)
        if decision.error is not None:
            raise decision.error
        if Action.CHANGE in decision.actions:
            self._commit_applied()
            # This rank may be left out here, too, if it is stopped meanwhile.
            self.generations.change()
        elif not rounds.committing and rounds.state.due_to_park != rounds.state.parked:
            if rounds.state.applied:  # first notify those that have taken part in it
                self._commit_applied()
            else:
                self.generations.regroup()

    @abstractmethod
    def _carry_out(self, action: Action, found: Round) -> None:
        """Carry out an action that is not the same for every policy."""

    @abstractmethod
    def _refuse_non_finite(self, rank: int, found: Round) -> NoReturn:
        """Stop every rank: something is not finite on ``rank``."""

    def _agree_on_rates(self, rows: Mapping[int, Row]) -> None:
        """Take the learning rates of the ranks that have a share, if this rank has none.

        A user may set them in the loop, whose body does not run on a rank without a share.

        Raises:
            UsageError: On every rank, when ranks that have a share differ.
        """
        gathered = self.team.introduce(rates_of(self.optimizers))
        rates = dict(zip(self.team.members, gathered, strict=True))
        busy = {rank: rates[rank] for rank in rates if rows[rank].purpose is not Purpose.IDLE}
        set_rates(self.optimizers, agree_on_rates(busy))

    def _result_of(
        self,
        found: Round,
        plan: Plan,
        *,
        skipped: bool,
        grad_norm: float = math.nan,
        lr: float = math.nan,
        ranges: tuple[tuple[int, int], ...] = (),
        cadence: CadenceRecord | None = None,
    ) -> WindowResult:
        """Return what a round has made of a window; times of waiting come when it is committed.

        Args:
            found: The round.
            plan: Of the window.
            skipped: See ``WindowResult``, here and below.
            grad_norm: 2-norm of the averaged gradient.
            lr: The learning rate.
            ranges: What was trained, where the plan does not say so.
            cadence: How the plan of local steps was made.
        """
        start, size = ranges[0][0] if ranges else 0, sum(stop - start for start, stop in ranges)
        if isinstance(plan, WindowPlan):
            start, size = plan.start, plan.size
        return WindowResult(
            window=plan.window,
            epoch=plan.epoch,
            start=start,
            size=size,
            loss=found.decision.loss,
            weight=found.decision.weight,
            grad_norm=grad_norm,
            lr=lr,
            skipped=skipped,
            progress=self.run.progress,
            applied_t=time.time(),
            ranks=found.records(self.team.world_size),
            ranges=ranges,
            cadence=cadence,
            generation=self.rounds.state.generation,
            parked=tuple(sorted(self.rounds.state.parked)),
        )
