"""What a rank's windows offer to ``Ddp`` and to loaders, whatever the policy."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from evener.averaging.buffers import BufferAverager
from evener.averaging.verification import ReplicaCheck
from evener.comm.base import Communicator
from evener.comm.flat import FlatBuffers
from evener.data.cursor import Cursor, derive_seed
from evener.data.randomness import seed_training
from evener.devices import kind_of
from evener.engine.emulate import Slowdown
from evener.engine.habits import Habits
from evener.engine.loss_scale import LossScale
from evener.engine.membership import ActiveTeam
from evener.engine.memory import MicroBatchLimits
from evener.engine.moments import SavedState
from evener.engine.results import Progress, WindowResult
from evener.engine.share import Share
from evener.engine.team import Meeting, Team
from evener.errors import UsageError
from evener.planning.policies import Planner


@dataclass(slots=True, kw_only=True)
class EngineOptions:
    """What an engine is told; see ``DdpConfig`` for the meaning."""

    max_grad_norm: float | None = None
    non_finite: str = "raise"
    unlike_devices: bool = False
    avoid_ones: bool = False
    dtype: torch.dtype = torch.float32
    loss_scale: LossScale = field(default_factory=lambda: LossScale(()))
    slowdown: Slowdown
    check: ReplicaCheck
    check_model: Callable[[], None]
    stop_requested: Callable[[], bool]
    on_commit: list[Callable[[WindowResult], None]] = field(default_factory=list)
    #: Told of the micro-batches of a local step that was left out on this rank.
    on_left_out: list[Callable[[int], None]] = field(default_factory=list)
    before_update: Callable[[Progress], None]
    after_update: Callable[[Optimizer | None], None]
    transfer_state: Callable[[dict[str, Any], bool], dict[str, Any]]
    notice: Callable[[str], None]
    habits: Habits


class Engine(ABC):
    """Runs windows on one rank; a leaf for each way of applying updates.

    Attributes:
        team: Those who take part.
        flat: The trainable parameters.
        buffers: Keeps the model's buffers equal.
        options: What the engine was told.
        progress: What the team has applied so far.
        stopping: Whether the team has agreed to stop.
        leave_soon: Whether this rank wants to.
        share: The micro-batches between two updates, while they are computed.
        known_sizes: Sizes of micro-batches that this rank has computed; see ``Share``.
        in_epoch: Whether a loader with plans is being iterated over.
        committing: Whether the functions of ``on_commit`` are being called.
        left: Whether the user has left a loader's loop by ``break``, and others may not know.
        others_left: Whether the others have, while this rank had no share.
    """

    def __init__(
        self, team: Team, flat: FlatBuffers, buffers: BufferAverager, options: EngineOptions
    ) -> None:
        self.team = ActiveTeam(team)
        self.flat = flat
        self.buffers = buffers
        self.options = options
        self.progress = Progress()
        self.stopping = False
        self.leave_soon = False
        self.in_epoch = False
        self.committing = False
        self.left = False
        self.others_left = False
        self.limits = MicroBatchLimits(team.world_size)
        self.share = Share(0, scale=1.0, slowdown=options.slowdown)
        self.known_sizes: set[int] = set()

    @property
    @abstractmethod
    def policy(self) -> Planner:
        """Who does how much; rank 0's word counts."""

    @property
    def window(self) -> int:
        """Number of the window that is being computed."""
        return self.progress.window

    @property
    @abstractmethod
    def turns(self) -> int:
        """What ``max_steps`` counts: optimizer steps of the team, those left out included."""

    def wants_stop(self) -> bool:
        """Whether this rank was told to stop, by ``Ddp.stop`` or by a signal."""
        return self.leave_soon or self.options.stop_requested()

    @abstractmethod
    def begin(self, cursor: Cursor, batch_size: int) -> None:
        """Starts or goes on with the cursor's epoch; all ranks call it together."""

    @abstractmethod
    def settle(self) -> None:
        """Commits what has been applied and not yet committed; all ranks call it together."""

    @abstractmethod
    def flush(self) -> None:
        """Commits the last window of an epoch; all ranks call it together."""

    @abstractmethod
    def open_share(self, num_micro_batches: int) -> Share:
        """Starts this rank's part of a window, or a local step."""

    def seed_draws(self, *place: int | str) -> None:
        """Derives what the model draws next, such as dropout, from a micro-batch's place.

        Args:
            *place: What tells the micro-batch from all others, on the CPU's generator and on that
                of each kind of device that the model lies on.
        """
        seed = derive_seed(*place)
        seed_training(seed)
        for device in {group.data.device for group in self.flat.groups}:
            kind_of(device).seed(seed)

    def leave(self) -> None:
        """Leaves an epoch in its middle, by ``break`` or with an error."""
        self.drop_share()

    def begin_stream(self, epoch: int) -> None:
        """Starts an epoch of windows without plans; all ranks call it together.

        Raises:
            UsageError: This policy has none.
        """
        raise self._needs_plans()

    def close_unplanned(
        self, part: int | None = None, *, idle: bool = False
    ) -> WindowResult | None:
        """Closes a window without a plan; ``idle`` goes along with what the others do."""
        raise self._needs_plans()

    def step_part(self, part: int) -> WindowResult | None:
        """Steps one optimizer alone; see ``Ddp.step``."""
        raise UsageError(
            "ddp.step(optimizer) needs policy 'sync': in windows of local steps every optimizer is "
            "stepped on every batch; leave the argument out, or use policy 'sync'"
        )

    def _needs_plans(self) -> UsageError:
        return UsageError(
            "windows of local steps need ddp.loader over a map-style data set, whose samples can "
            "be queued for each rank; use one, or policy 'sync'"
        )

    def drop_share(self) -> None:
        """Throws away what the open share has accumulated, in gradients and buffers."""
        self.flat.zero_()
        self.buffers.restore()

    @abstractmethod
    def end_micro_batch(self) -> WindowResult | None:
        """Ends a micro-batch, and with it whatever ends there; see ``Ddp.step``."""

    @abstractmethod
    def consensus(self) -> AbstractContextManager[None]:
        """Shows what all ranks have agreed on in the model, for the length of a block."""

    def verify(self) -> None:
        """Compares what all ranks have agreed on, where ``verify_every`` is given.

        All ranks call it together, outside of an exchange: at a commit, or between epochs.

        Raises:
            ReplicasDifferError: On every rank.
        """
        if self.options.check.is_wanted:
            with self.consensus():
                self.options.check.compare(self.team.comm, self.window - 1)

    def tell_committed(self, result: WindowResult) -> None:
        """Calls the functions of ``on_commit``, while the model shows the consensus."""
        self.committing = True
        try:
            for callback in self.options.on_commit:
                callback(result)
        finally:
            self.committing = False

    @abstractmethod
    def restored(self) -> None:
        """Takes the model as it is for what all ranks have agreed on, as after a load."""

    def prepare_save(self) -> None:
        """Agrees on what ``saved_states`` returns; all ranks call it together, before a save."""
        return  # where optimizers are in the same state on all ranks

    @abstractmethod
    def saved_states(self) -> list[SavedState]:
        """The state of each optimizer as a checkpoint holds it; on rank 0."""

    def hurry(self, timeout_s: float) -> None:
        """Shortens the deadlines of exchanges, to ``timeout_s`` seconds at most."""
        self.team.comm.hurry(timeout_s)
        self.team.whole.comm.hurry(timeout_s)

    def close_down(self) -> None:
        """Ends whatever runs beside the training loop; idempotent."""
        return  # where nothing does

    @property
    def rank(self) -> int:
        """Number of this rank."""
        return self.team.rank

    @property
    def world_size(self) -> int:
        """Ranks of the team, those that are parked included."""
        return self.team.world_size

    @property
    def present(self) -> tuple[int, ...]:
        """The ranks that are not parked, in order."""
        return tuple(r for r in range(self.world_size) if r not in self.team.parked)

    @property
    def comm(self) -> Communicator:
        """Joins the ranks that are present."""
        return self.team.comm

    @property
    def device(self) -> torch.device:
        """Where the model lies on this rank."""
        return self.flat.groups[0].data.device

    @property
    def most_numbers(self) -> int:
        """How many numbers ``ask`` exchanges at most."""
        return self.team.whole.payload_length

    def ask(self, purpose: Meeting, numbers: Sequence[float] = ()) -> dict[int, Sequence[float]]:
        """Exchanges numbers between the ranks that are present; all of them call it together.

        First commits what a loop that was left by ``break`` has applied. Takes note of ranks that
        want to stop.

        Args:
            purpose: What this rank wants; must be the same on all ranks.
            numbers: At most ``most_numbers``.

        Returns:
            Each rank's numbers, followed by zeros, by rank and in rank order.

        Raises:
            CollectiveMismatchError: Ranks came for different things.
        """
        if self.left:
            self.settle()
        rows, leaving = self.team.meet(
            purpose, window=self.window, leaving=int(self.wants_stop()), payload=numbers
        )
        self.stopping |= leaving > 0
        return {rank: rows[rank] for rank in self.present}

    def tell_once(self, text: str) -> None:
        """Tells the user something, the first time that it is said."""
        self.options.habits.tell_once(text)

    def call_on_commit(self, function: Callable[[WindowResult], None]) -> None:
        """Calls ``function`` with every window that is committed, after those given before."""
        self.options.on_commit.append(function)

    def set_micro_batch_size(self, size: int) -> None:
        """Tells the planner the largest micro-batch, where memory sets no other limit."""
        self.limits.start_with(size)
        self.policy.set_micro_batch_sizes(self.limits.sizes)

    def saved_state(self, members: Sequence[str]) -> dict[str, Any]:
        """How far the team has got and what it has learnt, in JSON: without model and optimizers.

        Args:
            members: The ranks' names, which stay the same when ranks are numbered anew.
        """
        scale = self.options.loss_scale
        return {
            "progress": asdict(self.progress),
            "planner": self.policy.state_dict(),
            "micro_batch_limits": self.limits.state_dict(members),
            "loss_scale": scale.state_dict(),
        }

    def restore_state(self, state: Mapping[str, Any], members: Sequence[str]) -> None:
        """Goes on from ``saved_state``, with the model as it is; of a team of any size."""
        self.policy.load_state_dict(state["planner"])
        self.limits.load_state_dict(state["micro_batch_limits"], members, self.team.rank)
        self.policy.set_micro_batch_sizes(self.limits.sizes)
        scale = self.options.loss_scale
        scale.load_state_dict(state["loss_scale"])
        self.restored()
        self.progress = Progress(**state["progress"])
