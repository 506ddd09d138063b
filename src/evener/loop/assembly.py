"""Build the objects of a rank: device, connection, flat buffers, averagers, planner, engine."""

import os
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from evener.averaging.buffers import BufferAverager
from evener.averaging.outer import make_outer
from evener.averaging.sharded_update import (
    FAST_BACKENDS,
    LEAST_DIVIDED,
    ShardedUpdate,
    why_replicated,
)
from evener.comm.base import Communicator
from evener.comm.flat import FlatBuffers
from evener.config.settings import DdpConfig
from evener.devices import kind_of, move
from evener.doctor.judgement import has_kernels
from evener.engine.emulate import Slowdown, compute_clock, emulation_of_launcher
from evener.engine.engine import Engine
from evener.engine.engine_options import EngineOptions
from evener.engine.guards import OptimizerGuards, refuse_second_team
from evener.engine.local import LocalEngine
from evener.engine.loss_scale import LossScale
from evener.engine.schedule import Schedule
from evener.engine.sync import SyncEngine
from evener.engine.team import Team
from evener.engine.training_state import TrainingState
from evener.errors import CollectiveError, ConfigError, UsageError
from evener.loop.arguments import Models, Schedulers, combine_models, parts_of
from evener.loop.consistency import Description, check_consistency, describe_training, summarise
from evener.loop.precision import HALF, AutocastForward, choose_precision
from evener.planning.policies import ApplyPolicy
from evener.team.backends import check_backend, check_policy, connect_team, describe_exchange
from evener.team.child import apply_threads, notify_supervisor
from evener.team.elastic_membership import join_team
from evener.team.environment import ELASTIC, AverageBackend, DistributedTrainConfig
from evener.team.failures import note
from evener.team.members import Member, describe_self, team_lines
from evener.team.membership import Membership, begin_generation
from evener.team.placement import Devices, choose_device
from evener.team.terminal import say, warn
from evener.team.wire import LEFT


class Assembly:
    """All objects of one rank of a team; ``Ddp`` is its public interface.

    All ranks make one together: they connect, compare what they are about to train, and start from
    rank 0's model. See ``Ddp.setup`` for the arguments.

    Attributes:
        apply_policy: What a window is.
        environment: This rank's place.
        model: One module that holds all.
        optimizers: As given.
        state: The training state, which checkpoints hold and ranks that were away receive.
        device: This rank's device.
        precision: The precision of its forward pass.
        team: The ranks.
        flat: The trainable parameters.
        buffers: Keeps the model's buffers equal.
        engine: Runs the windows.
        steps_singly: Whether optimizers are likely to be stepped one by one: several, of several
            models.
    """

    def __init__(
        self,
        model: Models,
        optimizers: Sequence[Optimizer],
        scheduler: Schedulers,
        *,
        policy: str | ApplyPolicy,
        backend: str,
        devices: Devices,
        precision: str,
        config: DdpConfig,
        environment: DistributedTrainConfig,
        communicator: Communicator | None = None,
        membership: Membership | None = None,
    ) -> None:
        self.apply_policy = chosen = check_policy(policy)
        config.check_policy(chosen)
        slow = {**config.emulate_slow, **emulation_of_launcher(os.environ)}
        self._config = config = replace(config, emulate_slow=slow)
        check_backend(backend)
        self.model, models = combine_models(model)
        refuse_second_team(models)
        self.environment = environment
        self.optimizers = optimizers
        self.steps_singly = min(len(models), len(optimizers)) > 1
        self.device = choose_device(devices, environment)
        self.precision = choose_precision(precision, self.device)
        apply_threads(environment)
        self._move()
        training = describe_training(self.model, optimizers, scheduler, chosen, config)
        self.team = self._connect(training, backend, config, communicator, membership)
        try:
            is_divided = self._introduce(training)
            self.flat = FlatBuffers(
                list(self.model.named_parameters()),
                # Local steps exchange no gradients, so these stay where autograd puts them.
                self.team.world_size if chosen is ApplyPolicy.SYNC else 1,
                parts=parts_of(optimizers, self.model),
                buckets=config.gradient_buckets,
                comm=self.comm,
                is_divided=is_divided,
            )
            self._start_alike()
            self.model.train()
            self.buffers = BufferAverager(self.model, self.comm)
            self._sharded = ShardedUpdate(
                self.flat,
                optimizers,
                is_wanted=is_divided,
                is_required=config.sharded_update == "on",
            )
            parts = (self.model, self.flat, self.buffers, optimizers)
            self.state = TrainingState(*parts, Schedule(optimizers, scheduler), self._sharded)
            self.engine = self._make_engine()
            self.team.watch_waits(self.engine.windows_s)
            for number, optimizer in enumerate(optimizers if self._sharded.is_on else ()):
                # On the instance, as ``OptimizerGuards`` does with ``zero_grad``.
                vars(optimizer)["state_dict"] = partial(self._state_dict_of, number)
        except BaseException:
            self.team.close()
            raise
        half = HALF.get(self.precision)
        self._autocast = [AutocastForward(m, self.device, half) for m in models if half]
        self.engine.options.guards.claim(models)
        if self.engine.rounds.is_main and not config.quiet:
            present = [self.team.member_by_rank[rank] for rank in self.team.members]
            exchange = f"  backend {self.comm.backend}: {self.comm.reason}"
            say("\n".join([*team_lines(present), exchange]))

    def _connect(
        self,
        training: Description,
        backend: str,
        config: DdpConfig,
        communicator: Communicator | None,
        membership: Membership | None,
    ) -> Team:
        """Return the team, fixed or elastic, of which this process is to be a rank."""
        place, policy, device = self.environment, self.apply_policy, self.device
        timeout_s = config.timeout_s
        if membership is None and (communicator is not None or ELASTIC not in os.environ):
            return Team(*connect_team(place, backend, policy, device, timeout_s, communicator))
        config.check_elastic()
        if membership is None:
            asked = check_backend(place.comm_backend if backend == AverageBackend.AUTO else backend)
            own = describe_exchange(place, asked, policy, device)
            membership = join_team(
                os.environ,
                summarise(training),
                shares_memory=asked is not AverageBackend.GLOO,
                timeout_s=timeout_s,
                gpu=own if asked is AverageBackend.NCCL else None,
            )
        try:
            return Team(begin_generation(membership), membership)
        except BaseException:
            membership.close()
            raise

    @property
    def comm(self) -> Communicator:
        """Return the communicator of all ranks, parked ones included."""
        return self.team.whole

    @property
    def names(self) -> list[str]:
        """Return the members' names, in rank order."""
        if self.team.is_elastic:  # other members may get the same numbers
            return [f"number {rank}" for rank in range(self.team.world_size)]
        return [member.member for member in self.team.member_by_rank]

    def part_of(self, optimizer: Optimizer) -> int:
        """Return the number of one of the optimizers.

        Raises:
            UsageError: It is none of them.
        """
        if optimizer in self.optimizers:
            return self.optimizers.index(optimizer)
        raise UsageError(
            f"this {type(optimizer).__name__} was not given to Ddp.setup; pass it there, in the "
            "list of optimizers"
        )

    def close(self) -> None:
        """Remove hooks and close connections; idempotent."""
        self.engine.close_down()
        self.engine.options.guards.close()
        self._sharded.abandon()
        for optimizer in self.optimizers:
            vars(optimizer).pop("state_dict", None)
        self.flat.close()
        while self._autocast:
            self._autocast.pop().remove()
        self.comm.close()
        notify_supervisor(place=LEFT)

    def hand_back(self) -> None:
        """Restore the optimizers' whole state if all ranks take part; they call it together."""
        if self._sharded.is_on:
            with suppress(CollectiveError):  # reading a state that stays divided raises an error
                self.engine.collectives.ask("leaving the team (ddp.close)")
                self._sharded.join()

    def _state_dict_of(self, number: int) -> dict[str, Any]:
        """Return the whole of an optimizer's state, which may be divided among ranks."""
        sharded, optimizer = self._sharded, self.optimizers[number]
        if not sharded.is_on:
            return type(optimizer).state_dict(optimizer)
        try:
            self.engine.collectives.ask("gathering optimizer state (optimizer.state_dict)")
            return sharded.state_dict(number, keeps=True)
        except CollectiveError as error:
            note(
                error,
                "evener: optimizer.state_dict() was called, and its state is divided among ranks "
                "(sharded_update): call it on all ranks together, or write a checkpoint with "
                "ddp.save",
            )
            raise

    # ── the members ──────────────────────────────────────────────────────────────────────────

    def _why_replicated(self) -> str:
        """Return why this rank should update all parameters; empty if it can update its part.

        Raises:
            ConfigError: The user wants the update divided, and an optimizer does not allow it.
        """
        given, comm = self._config.sharded_update, self.comm
        is_sync = self.apply_policy is ApplyPolicy.SYNC
        # An elastic team cannot divide state, because a lost rank would take its part with it.
        if given == "off" or not is_sync or comm.world_size == 1 or self.team.is_elastic:
            return "it is not wanted"
        reason = why_replicated(self.optimizers)
        if reason and given == "on":
            raise ConfigError(
                f"sharded_update is 'on', but {reason}: use 'auto' or another optimizer"
            )
        trained = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        does_not_pay = trained < LEAST_DIVIDED or comm.backend not in FAST_BACKENDS
        return "it does not pay" if given == "auto" and does_not_pay else reason

    def _move(self) -> None:
        """Move the model to the device, and the optimizers' state with it."""
        _check_kernels(self.device)
        move(self.model, self.device)
        for optimizer in self.optimizers if self.device.type != "cpu" else ():
            if optimizer.state:
                optimizer.load_state_dict(optimizer.state_dict())

    def _introduce(self, training: Description) -> bool:
        """Gather the ranks' descriptions and compare them; return whether they divide the update.

        All ranks call it together.
        """
        config, team = self._config, self.team
        config.check_team(team.world_size)
        own = describe_self(
            team.rank,
            self.environment.local_rank,
            self.device,
            emulated=config.emulate_slow.get(team.rank, 1.0),
            precision=self.precision,
        )
        if team.is_elastic:
            own = replace(own, member=team.membership.member)
        # Ranks' optimizers may be of different classes with the same name.
        further = {"training": training, "why_replicated": self._why_replicated()}
        greetings = team.introduce({**asdict(own), **further})
        check_consistency({one["rank"]: one.pop("training") for one in greetings})
        reasons = [greeting.pop("why_replicated") for greeting in greetings]
        taken: Counter[str] = Counter()
        for greeting in greetings:
            # Machines may share a host name; rank order makes every rank choose the same ids.
            name = greeting["member"]
            taken[name] += 1
            if taken[name] > 1:
                greeting["member"] = f"{name}#{taken[name]}"
        team.meet([Member(**one) for one in greetings])
        return not any(reasons)

    def _start_alike(self) -> None:
        """Give every rank rank 0's parameters (frozen ones too) and buffers."""
        trained = [group.data for group in self.flat.groups]
        with torch.no_grad():
            for own in (*trained, *self.flat.outside, *self.model.buffers()):
                dense = own.contiguous()
                self.comm.broadcast(dense, 0, what="initial model")
                own.copy_(dense)

    # ── what runs the windows ────────────────────────────────────────────────────────────────

    def _make_engine(self) -> Engine:
        """Return the engine of a policy; all ranks call it together."""
        team, config, options = self.team, self._config, self._make_options()
        if self.apply_policy is ApplyPolicy.SYNC:
            shares = config.make_policy(self.names, avoid_ones=options.avoid_ones)
            return SyncEngine(team, shares, self.state, options)
        if self.apply_policy.in_background and team.world_size > 1:
            team.open_background()
        cadence = config.make_cadence_policy(self.names, self.apply_policy)
        return LocalEngine(team, self.apply_policy, cadence, self.state, options)

    def _make_options(self) -> EngineOptions:
        config, team = self._config, self.team
        own = team.member_by_rank[team.rank]
        return EngineOptions(
            max_grad_norm=config.max_grad_norm,
            non_finite=config.non_finite,
            verify_every=config.verify_every or 0,
            lr_factor=1.0 + (len(team.members) - 1) * config.lr_scale_ratio,
            unlike_devices=team.has_unlike_devices,
            avoid_ones=any(isinstance(module, _BatchNorm) for module in self.model.modules()),
            dtype=HALF.get(own.precision, torch.float32),
            loss_scale=LossScale(team.fp16_ranks, own.rank),
            slowdown=Slowdown(
                own.emulated, clock=compute_clock(own.device), stop_requested=config.stop_when
            ),
            stop_requested=config.stop_when,
            guards=OptimizerGuards(self.flat, self.optimizers, warn=warn),
            say=_say_nothing if config.quiet else say,
            overlap=config.overlap,
            wire=config.wire,
            outer=make_outer(config.outer, config.outer_lr, config.outer_momentum),
        )


def _say_nothing(text: str) -> None:
    """Drop a line: the user has asked for quiet."""


def _check_kernels(device: torch.device) -> None:
    """Refuse a GPU that this build of torch has no kernels for.

    Raises:
        ConfigError: The build has no kernels for it.
    """
    architecture = kind_of(device).architecture(device)
    built_for = tuple(torch.cuda.get_arch_list()) if architecture else ()
    if built_for and not has_kernels(architecture, built_for):
        raise ConfigError(
            f"{device} needs kernels for {architecture}, but this build of torch has kernels for "
            f"{', '.join(built_for)}: install a build whose list has {architecture}, or leave the "
            "device out with devices=... or CUDA_VISIBLE_DEVICES"
        )
