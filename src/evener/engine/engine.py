"""Run the windows of one rank, in every policy: exchange rows, carry out verdicts."""

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, NoReturn

import torch

from evener.averaging.verification import ReplicaCheck
from evener.comm.base import Communicator
from evener.data.cursor import Cursor, derive_seed
from evener.data.randomness import seed_training
from evener.devices import kind_of, queue_of
from evener.engine.emulate import Slowdown
from evener.engine.habits import Habits
from evener.engine.loss_scale import LossScale
from evener.engine.memory import MicroBatchLimits
from evener.engine.results import Applied, Progress, Round, WindowResult, Work
from evener.engine.schedule import agree_on_rates, rates_of, set_rates
from evener.engine.share import Share, WindowSpans, needs_plans
from evener.engine.slowness import Slowness
from evener.engine.state import OptimizerState, TrainingState
from evener.engine.team import PARKED_TIMEOUT_S, Team
from evener.errors import (
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    EvenerError,
    UsageError,
)
from evener.planning.plans import LocalPlan, WindowPlan
from evener.planning.policies import ApplyPolicy, Planner
from evener.planning.report import NOTHING, TOLD_LATER, RankRecord, Report
from evener.planning.stragglers import Straggler
from evener.protocol import wording
from evener.protocol.machine import Do, Phase, State, judge
from evener.protocol.row import Purpose, Row, decode, encode


class Superseded(CollectiveError):
    """The generation of a round has ended while functions of ``on_commit`` ran."""


@dataclass(slots=True, kw_only=True)
class EngineOptions:
    """Options of an engine; see ``DdpConfig`` for the meaning."""

    max_grad_norm: float | None
    non_finite: str
    verify_every: int
    lr_factor: float
    unlike_devices: bool
    avoid_ones: bool
    dtype: torch.dtype
    loss_scale: LossScale
    slowdown: Slowdown
    stop_requested: Callable[[], bool] | None
    habits: Habits
    slowness: Slowness


class Engine(ABC):
    """Runs windows on one rank; there is a subclass for each way of applying updates.

    It exchanges rows with the other ranks, and carries out the verdict of ``protocol/``. Only
    ``state`` says which ranks have left, rest, stop or are away.

    Attributes:
        team: The ranks.
        state: The state of the team, as this rank knows it.
        training: What this rank trains with, of which ``flat``, ``buffers`` and ``optimizers`` are
            parts.
        rank: Number of this rank.
        world_size: Ranks of the team, those that are parked included.
        options: The options.
        habits: Watches the user's loop.
        slowdown: Stretches compute on a rank that is emulated slower.
        progress: What the team has applied so far.
        batch_size: Samples of a window of SYNC over all ranks, or of a local step.
        whole_micro_batches: Of how many samples the shares of SYNC are multiples; 0 for any share.
        share: The micro-batches between two updates, while they are computed.
        spans: What this rank's time goes to in a window.
        slowness: Watches how fast the ranks are.
        limits: The largest micro-batches that fit.
        known_sizes: Sizes of micro-batches that this rank has computed; see ``Share``.
        queue: Of the device that the model lies on, if it has one.
        in_epoch: Whether a loader with plans is being iterated over.
        committing: Whether the functions of ``on_commit`` are being called.
        was_parked: Whether this rank has ever been parked.
        windows_s: Seconds that the latest windows took.
    """

    def __init__(
        self, team: Team, training: TrainingState, options: EngineOptions, way: ApplyPolicy
    ) -> None:
        self.team, self.rank, self.world_size = team, team.rank, team.world_size
        self.state = State(team.rank, team.world_size, way, team.members)
        self.training = training
        self.flat = training.flat
        self.buffers = training.buffers
        self.optimizers = training.optimizers
        self.options = options
        self.progress = Progress()
        self.batch_size = self.whole_micro_batches = 0
        self._cursor: Cursor | None = None
        self._max_steps: int | None = None
        self.limits = MicroBatchLimits(team.world_size)
        self.slowdown = options.slowdown
        self.known_sizes: set[int] = set()
        self.queue = queue_of(self.device)
        self.share = self._open(0, 1.0)
        self.spans, self.slowness = WindowSpans(team), options.slowness
        self._unjudged: list[WindowResult] = []
        self._stragglers: tuple[Straggler, ...] = ()
        self.in_epoch = self.committing = self.was_parked = self._wants_stop = False
        self._applied: Applied | None = None
        #: Windows of whose commit this rank was told. Where a rank is lost in a commit, those that
        #: have not heard of it commit in the next generation, and may send their state to this one.
        self._num_told = 0
        self.windows_s: deque[float] = deque(maxlen=64)
        self._on_commit: list[Callable[[WindowResult], None]] = []
        self._on_left_out: list[Callable[[int], None]] = []
        self.habits = options.habits
        self._skips = options.non_finite == "skip"
        self._check = ReplicaCheck(
            training.model, self.flat, self.buffers, every=options.verify_every
        )
        self._scale = options.loss_scale
        self._schedule = training.schedule

    # ── what others ask ──────────────────────────────────────────────────────────────────────────

    @property
    @abstractmethod
    def policy(self) -> Planner:
        """Return the policy that divides the work; only the lowest present rank's decides."""

    @property
    def turns(self) -> int:
        """Return what ``max_steps`` limits: the team's optimizer steps, skipped ones included."""
        return self.progress.steps + self.progress.skipped

    @property
    def parts_of_batch(self) -> int:
        """Return over how many ranks the samples of one optimizer step are spread."""
        return self.world_size if self.state.is_sync else 1

    @property
    def window(self) -> int:
        """Number of the window that is being computed."""
        return self.progress.window

    @property
    def comm(self) -> Communicator:
        """Return the communicator of the ranks that are present."""
        return self.team.comm

    @property
    def device(self) -> torch.device:
        """Return the device of the model on this rank."""
        return self.flat.groups[0].data.device

    @property
    def stopping(self) -> bool:
        """Return whether the team has agreed to stop."""
        return self.state.stopping

    @property
    def is_lost(self) -> bool:
        """Return whether waiting for others is useless: a connection or the agreement was lost."""
        return self.team.has_ended or self.state.phase is Phase.ENDED

    @property
    def is_working(self) -> bool:
        """Return whether there is a window to compute."""
        return self.state.is_working

    @property
    def is_main(self) -> bool:
        """Return whether this rank plans, writes and prints for the team; it is not parked then."""
        return self.rank == self.state.planner

    @property
    def is_training(self) -> bool:
        """Return whether this rank is in a training loop, of a loader or of its own."""
        return self.in_epoch or self.share.in_micro_batch

    @property
    def has_left(self) -> bool:
        """Return whether the user has left a loader's loop by ``break`` and others may not know."""
        return self.state.phase is Phase.REST

    def stop(self) -> None:
        """Ask the team to stop after the window that is being computed."""
        self._wants_stop = True

    def wants_stop(self) -> bool:
        """Return whether this rank was told to stop, by ``stop`` or by a signal."""
        return self._wants_stop or self._is_interrupted()

    def _is_interrupted(self) -> bool:
        """Return whether a signal, or another source, wants this rank to stop without delay."""
        return bool(self.options.stop_requested and self.options.stop_requested())

    def call_on_commit(self, function: Callable[[WindowResult], None]) -> None:
        """Call ``function`` with every window that is committed, after those given before."""
        self._on_commit.append(function)

    def call_on_left_out(self, function: Callable[[int], None]) -> None:
        """Call ``function`` with the micro-batches of a local step that this rank leaves out."""
        self._on_left_out.append(function)

    def seed_draws(self, *place: int | str) -> None:
        """Derive what the model draws next, such as dropout, from a micro-batch's place.

        Args:
            *place: What tells the micro-batch from all others, on the CPU's generator and on that
                of each kind of device that the model lies on.
        """
        seed = derive_seed(*place)
        seed_training(seed)
        for device in {group.data.device for group in self.flat.groups}:
            kind_of(device).seed(seed)

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

    # ── an epoch, as loaders see it ──────────────────────────────────────────────────────────────

    def begin(self, cursor: Cursor, batch_size: int, max_steps: int | None) -> None:
        """Start or continue the cursor's epoch; all ranks call it together.

        Args:
            cursor: The data position.
            batch_size: Samples of a window of SYNC over all ranks, or of a local step.
            max_steps: Optimizer steps of the run, as ``turns`` counts them; ``None`` for any.
        """
        self.settle()
        self._cursor, self.batch_size, self._max_steps = cursor, batch_size, max_steps
        self._begin()

    def _begin(self) -> None:
        """Get ready for an epoch, when all before is settled."""
        self.spans.restart()
        self.state = self.state.begin()

    @property
    def cursor(self) -> Cursor:
        """Return the data position of the epoch that was begun last."""
        assert self._cursor is not None, "no epoch was begun"
        return self._cursor

    def begin_stream(self, epoch: int) -> None:
        """Start an epoch of windows without plans; all ranks call it together.

        Raises:
            UsageError: This policy has none.
        """
        raise needs_plans()

    @contextmanager
    def epoch_open(self) -> Iterator[None]:
        """Keep the user's loop over a loader with plans open, in a ``with`` block."""
        self.in_epoch = True
        try:
            yield
        finally:
            self.in_epoch = False

    @abstractmethod
    def work(self) -> Iterator[Work]:
        """Yield what this rank is to compute in the epoch that was begun; all ranks go through it.

        Between two pieces it takes part in what the others exchange.
        """

    @abstractmethod
    def end_epoch(self) -> None:
        """Commit the last window of an epoch; all ranks call it together."""

    @abstractmethod
    def open_share(self, num_micro_batches: int) -> Share:
        """Start this rank's part of a window, or a local step."""

    def plan_ahead(self) -> None:
        """Use the time in which a device computes gradients; called after each backward."""
        if self._unjudged:
            if self.is_main:
                self._stragglers += self.slowness.judge(self._unjudged, away=self.team.away)
            self._unjudged.clear()

    @abstractmethod
    def end_micro_batch(self) -> WindowResult | None:
        """End a micro-batch, and with it whatever ends there; see ``Ddp.step``."""

    def step_part(self, part: int) -> WindowResult | None:
        """Step one optimizer alone; see ``Ddp.step``."""
        raise UsageError(
            "ddp.step(optimizer) needs policy 'sync': in windows of local steps every optimizer is "
            "stepped on every batch; leave the argument out, or use policy 'sync'"
        )

    def join_unplanned(self) -> WindowResult | None:
        """Take part in a window without a plan, with nothing; ``None`` where no rank had data."""
        raise needs_plans()

    def _open(self, num_micro_batches: int, scale: float | None) -> Share:
        self.share = Share(num_micro_batches, scale, self.slowdown, self.queue, self.known_sizes)
        return self.share

    def drop_share(self) -> None:
        """Discard gradients and buffer changes of the open share."""
        self.flat.zero_()
        self.buffers.restore()

    def shrink(self, samples: int) -> None:
        """Discard the open share, because a micro-batch of ``samples`` did not fit into memory."""
        self.limits.shrink(samples)
        self.drop_share()

    def leave(self) -> None:
        """Leave an epoch in its middle, by ``break`` or an error; others learn of it later."""
        self.state = self.state.leave()

    @abstractmethod
    def settle(self) -> None:
        """Commit what has been applied and not yet committed; all ranks call it together.

        What a loop that was left by ``break`` has begun is brought to its end first.
        """

    # ── state ────────────────────────────────────────────────────────────────────────────────────

    @abstractmethod
    def consensus(self) -> AbstractContextManager[None]:
        """Show the consensus in the model, in a ``with`` block."""

    def _verify(self) -> None:
        """Compare what all ranks have agreed on; see ``AskingEngine.verify``."""
        if self._check.every:
            with self.consensus():
                self._check.compare(self.comm, self.window - 1)

    @abstractmethod
    def restored(self) -> None:
        """Take the present model as the consensus, as after a load."""

    def prepare_save(self) -> None:
        """Agree on ``optimizer_states`` before a save; all ranks call it together."""
        return  # where optimizers are in the same state on all ranks

    @abstractmethod
    def optimizer_states(self) -> list[OptimizerState]:
        """Return the state of each optimizer as a checkpoint holds it; on the main rank."""

    def set_micro_batch_size(self, size: int) -> None:
        """Tell the planner the largest micro-batch, where memory sets no other limit."""
        self.limits.start_with(size)
        self.policy.set_micro_batch_sizes(self.limits.sizes)

    def state_dict(self, members: Sequence[str]) -> dict[str, Any]:
        """Return the team's progress and what it has learnt, in JSON; no model, no optimizers.

        Args:
            members: The ranks' names, which stay the same when ranks get new numbers.
        """
        return {
            "progress": asdict(self.progress),
            "planner": self.policy.state_dict(),
            "micro_batch_limits": self.limits.state_dict(members),
            "loss_scale": self._scale.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any], members: Sequence[str]) -> None:
        """Continue from ``state_dict``, with the model as it is; of a team of any size."""
        self.policy.load_state_dict(state["planner"])
        self.limits.load_state_dict(state["micro_batch_limits"], members, self.rank)
        self.policy.set_micro_batch_sizes(self.limits.sizes)
        self._scale.load_state_dict(state["loss_scale"])
        self.restored()
        self._set_progress(Progress(**state["progress"]))
        self._num_told = self.window

    def hurry(self, timeout_s: float) -> None:
        """Shorten the deadlines of exchanges, to ``timeout_s`` seconds at most."""
        self.team.hurry(timeout_s)

    def close_down(self) -> None:
        """End the exchanges and all work beside the training loop; idempotent."""
        self.state = self.state.end()
        self.team.close()  # while a rank is parked, the others have connections of their own

    # ── rounds ───────────────────────────────────────────────────────────────────────────────────

    def _meet(self, purpose: Purpose, **said: Any) -> Round:
        """Exchange rows and carry out the verdict; all ranks call it together.

        Args:
            purpose: What this rank wants.
            **said: Further fields of its ``Row``.
        """
        started_s = time.perf_counter()
        said["leaving"] = self.state.is_elastic and self.team.is_leaving
        self.state = self.state.say(purpose, stop=self.wants_stop() or self.stopping, **said)
        assert self.state.own is not None
        team, parked = self.team, self.state.parked
        # Parked ranks are not told of commits.
        whole = not self.committing
        comm, ranks = (team.whole, team.everyone) if whole else (team.comm, team.members)
        rows = self._swap(self.state.own, comm, ranks)
        verdict = judge(self.state, rows)
        present = {rank: row for rank, row in rows.items() if rank not in parked}
        found = Round(present, verdict, time.perf_counter() - started_s)
        self._follow(found)
        return found

    def _swap(self, row: Row, comm: Communicator, ranks: Iterable[int]) -> dict[int, Row]:
        """Give every rank of ``comm`` each one's row, in rank order; all call it together."""
        # The label is the same for all purposes. A rank's purpose is in its row, so ranks with
        # different purposes meet, and each can name the purpose of every rank.
        numbers = encode(row, self.world_size) if comm.world_size > 1 else []
        try:
            rows = comm.all_gather_rows(
                numbers,
                what="a meeting of the team",
                timeout_s=PARKED_TIMEOUT_S if self.state.is_parked else None,
            )
        except CollectiveTimeoutError as error:
            raise CollectiveTimeoutError(
                f"{error} (rank {comm.number} was {row.purpose.deed} in window {row.window})",
                missing=error.missing,
            ) from None
        return {
            rank: row if rank == self.rank else decode(received)
            for rank, received in zip(ranks, rows, strict=True)
        }

    def _follow(self, found: Round) -> None:
        """Carry out a verdict.

        The state follows when all is done: functions of ``on_commit`` see the window before, and
        what they exchange may tell of a stop. A change of the generation belongs to the new state.

        Raises:
            Superseded: The team has changed meanwhile: the rest of the verdict is void.
        """
        rows, verdict, generation = found.rows, found.verdict, self.state.generation
        after = verdict.state
        self.state = self.state._replace(own=None, stopping=self.stopping or after.stopping)
        limits = {rank: row.report.limit for rank, row in rows.items() if row.report.limit}
        if limits and self.limits.learn(limits):
            self.policy.set_micro_batch_sizes(self.limits.sizes)
        for do in verdict.do:
            if self.state.is_parked and do in (Do.VERIFY, Do.RATES):
                continue
            if do is Do.COMMIT:
                self._commit(rows)
                if self.state.generation != generation:
                    raise Superseded("a rank was lost while functions of ddp.on_commit ran")
            elif do is Do.VERIFY:
                self._verify()
            elif do is Do.RATES:
                self._agree_on_rates(rows)
            elif do is not Do.CHANGE:
                self._carry_out(do, found)
        self.state = after._replace(stopping=self.stopping)
        if verdict.culprit is not None:
            self._refuse_non_finite(verdict.culprit, rows)
        if verdict.error is not None:
            self._raise(verdict.error, rows)
        if Do.CHANGE in verdict.do:
            self._carry_out(Do.CHANGE, found)

    @abstractmethod
    def _carry_out(self, do: Do, found: Round) -> None:
        """Carry out one action of a verdict."""

    def _raise(
        self, error: EvenerError, rows: Mapping[int, Row], wire: Team | None = None
    ) -> NoReturn:
        if isinstance(error, CollectiveMismatchError):
            places = (wire or self.team).places()
            raise CollectiveMismatchError(wording.mismatch(rows, places))
        raise error

    @abstractmethod
    def _refuse_non_finite(self, rank: int, rows: Mapping[int, Row]) -> NoReturn:
        """Stop every rank: something is not finite on ``rank``."""

    # ── learning rates ───────────────────────────────────────────────────────────────────────────

    def _agree_on_rates(self, rows: Mapping[int, Row]) -> None:
        """Adopt the learning rates of the ranks that have a share, where this rank has none.

        A user may set them in the loop, whose body does not run on a rank without a share.

        Raises:
            UsageError: On every rank, when ranks that have a share differ.
        """
        told = self.team.introduce({"rank": self.rank, "rates": rates_of(self.optimizers)})
        agreed = agree_on_rates(
            {t["rank"]: t["rates"] for t in told if rows[t["rank"]].purpose is not Purpose.IDLE}
        )
        set_rates(self.optimizers, agreed)

    # ── commits ──────────────────────────────────────────────────────────────────────────────────

    def _commit(self, rows: Mapping[int, Row]) -> None:
        """Commit the previous window: all ranks have arrived here, so all have applied it."""
        applied, self._applied = self._applied, None
        self.state = self.state._replace(applied=False)
        assert applied is not None
        for lease in applied.leases:
            self.cursor.commit(lease)
        if self.state.is_parked or applied.result.window < self._num_told:
            return
        self._num_told = applied.result.window + 1
        self._unjudged.append(self._completed(applied.result, rows))
        if self._on_commit:
            self._tell_committed(self._unjudged[-1])

    def _completed(self, result: WindowResult, rows: Mapping[int, Row]) -> WindowResult:
        """Return the result with the waits and exchange times that ranks report a round later."""
        ranks = list(result.ranks)
        for rank, row in rows.items():
            ranks[rank] = ranks[rank]._replace(**{k: getattr(row.report, k) for k in TOLD_LATER})
        found, self._stragglers = self._stragglers, ()
        return replace(result, ranks=tuple(ranks), stragglers=found)

    def _tell_committed(self, result: WindowResult) -> None:
        """Call the functions of ``on_commit``, while the model shows the consensus."""
        self.committing = True
        try:
            with self.consensus():
                for callback in self._on_commit:
                    callback(result)
        finally:
            self.committing = False

    def _data(self) -> tuple[float, ...]:
        """Return what must be the same on every rank: samples, ``batch_size`` and seed."""
        cursor = self.cursor
        return (float(cursor.num_samples), float(self.batch_size), float(cursor.seed % 2**53))

    def _told(self) -> Mapping[str, Any]:
        """Return what this rank's report of this window says of the previous one."""
        return {} if self._applied is None else self._applied.told

    # ── progress ─────────────────────────────────────────────────────────────────────────────────

    def _advance(self, *, made: int, skipped: int, samples: int, weight: float) -> None:
        """Count a window that was applied, of some optimizer steps."""
        self.windows_s.append(self.spans.elapsed_s)
        before = self.progress
        self.progress = Progress(
            window=before.window + 1,
            steps=before.steps + made,
            samples=before.samples + samples,
            weight=before.weight + weight,
            skipped=before.skipped + skipped,
        )

    def _result_of(self, found: Round, plan: WindowPlan | LocalPlan, **rest: Any) -> WindowResult:
        return WindowResult(
            window=plan.window,
            epoch=plan.epoch,
            loss=found.verdict.loss,
            weight=found.verdict.weight,
            progress=self.progress,
            applied_t=time.time(),
            ranks=self._records(found.rows),
            generation=self.state.generation,
            parked=tuple(sorted(self.state.parked)),
            **rest,
        )

    def _set_progress(self, progress: Progress) -> None:
        self.progress = progress
        self.state = self.state._replace(window=progress.window)

    def _reports(self, rows: Mapping[int, Row]) -> list[Report]:
        """Return the reports by rank; blank ones for ranks that are parked."""
        return [rows[r].report if r in rows else NOTHING for r in range(self.world_size)]

    def _records(self, rows: Mapping[int, Row]) -> tuple[RankRecord, ...]:
        """Return what each rank did, as in ``WindowResult``; times of waiting come later."""
        later = {name: getattr(NOTHING, name) for name in TOLD_LATER}
        return tuple(report._replace(**later) for report in self._reports(rows))
