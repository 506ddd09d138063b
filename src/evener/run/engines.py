"""Builds what runs the windows of a rank, for each policy."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from evener.averaging.buffers import BufferAverager
from evener.averaging.parameters import ParameterAverager
from evener.averaging.verification import ReplicaCheck
from evener.comm.flat import FlatBuffers
from evener.engine.emulate import Slowdown, compute_clock, patient_sleep
from evener.engine.engine import Engine, EngineOptions
from evener.engine.habits import Habits
from evener.engine.local import LocalEngine
from evener.engine.local_update import LocalUpdate
from evener.engine.local_window import local_payload_length
from evener.engine.loss_scale import LossScale
from evener.engine.registry import Registry
from evener.engine.replica import Replica
from evener.engine.results import WindowResult
from evener.engine.schedule import Schedule
from evener.engine.sync import WindowEngine
from evener.engine.sync_row import payload_length
from evener.engine.team import Member, Team
from evener.engine.transfer import transfer_state
from evener.engine.updates import Updater
from evener.planning.cadence import CadencePolicy
from evener.planning.fixed import FixedShares
from evener.planning.guard import make_guard
from evener.planning.hints import HintWatch
from evener.planning.policies import ApplyPolicy, Policy
from evener.planning.sync import SyncPolicy
from evener.run.launching.terminal import warn
from evener.run.models import check_identity
from evener.run.precision import HALF
from evener.run.settings import DdpConfig
from evener.run.team.backends import check_policy


@dataclass(frozen=True, slots=True)
class Parts:
    """What every engine is made of."""

    team: Team
    members: Sequence[Member]
    model: nn.Module
    flat: FlatBuffers
    optimizers: Sequence[Optimizer]
    schedule: Schedule
    registry: Registry
    config: DdpConfig


def choose_policy(policy: str, config: DdpConfig) -> ApplyPolicy:
    """The policy of that name.

    Raises:
        ConfigError: There is none, or an option has no effect with it.
    """
    chosen = check_policy(policy)
    config.check_policy(chosen)
    return chosen


def longest_payload(world_size: int) -> int:
    """Numbers that a rank may have to say in a meeting, whatever the policy."""
    return max(payload_length(world_size), local_payload_length(world_size))


def lay_out(
    model: nn.Module,
    policy: ApplyPolicy,
    world_size: int,
    parts: Mapping[int, int],
    config: DdpConfig,
) -> FlatBuffers:
    """Moves the trainable parameters into flat buffers.

    Local steps exchange no gradients, so there they stay where autograd has put them.
    """
    exchanging = world_size if policy is ApplyPolicy.SYNC else 1
    return FlatBuffers(
        list(model.named_parameters()), exchanging, parts=parts, buckets=config.gradient_buckets
    )


def make_engine(policy: ApplyPolicy, parts: Parts) -> Engine:
    """The engine of a policy; all ranks call it together."""
    engine: Engine
    if policy is ApplyPolicy.SYNC:
        engine = _sync(parts)
    else:
        engine = _local(parts, in_background=policy is ApplyPolicy.ASYNC)
    speeds = parts.config.hinted_speeds(parts.team.world_size)
    if speeds is not None and len(speeds) > 1 and parts.team.rank == 0:  # it knows the speeds
        _watch_hint(engine, HintWatch(speeds))
    return engine


def _watch_hint(engine: Engine, watch: HintWatch) -> None:
    """Warns, after the first windows, of ranks whose speed contradicts the hint."""
    options = engine.options

    def look(result: WindowResult) -> None:
        worked = [record.samples > 0 for record in result.ranks]
        for found in watch.observe(worked, engine.policy.solo_speeds(result.size)):
            options.notice(
                f"speed_hint gives rank {found.rank} {found.hinted:.0%} of the speed of the ranks "
                f"that were measured, and it has {found.measured:.0%} ({found.windows} windows); "
                "the work follows the measurement. In speed_hint a larger number stands for a "
                "faster rank; DdpConfig().with_speed_hint(slow_rank, ratio) says how slow one is"
            )
        if watch.is_done:  # a new list, as this one is being gone through
            options.on_commit = [function for function in options.on_commit if function is not look]

    options.on_commit.append(look)


def _sync(parts: Parts) -> WindowEngine:
    buffers = BufferAverager(parts.model, parts.team.comm)
    options = _options(parts, buffers)
    return WindowEngine(
        team=parts.team,
        flat=parts.flat,
        buffers=buffers,
        updater=Updater(parts.flat, buffers, parts.optimizers, parts.team.comm, options),
        policy=_sync_planner([m.member for m in parts.members], parts.config, options.avoid_ones),
        options=options,
    )


def _local(parts: Parts, *, in_background: bool) -> LocalEngine:
    team, config = parts.team, parts.config
    background = None
    if in_background and team.world_size > 1:
        comm = team.comm.split(range(team.world_size), name="background")
        assert comm is not None
        background = Team(comm, payload_length=team.payload_length)
    cadence = config.make_cadence(team.world_size)
    if (speeds := config.hinted_speeds(team.world_size)) is not None:
        cadence.with_speeds(speeds)
    buffers = BufferAverager(parts.model, team.comm)
    options = _options(parts, buffers)
    return LocalEngine(
        team=team,
        replica=Replica(parts.flat, ParameterAverager(parts.flat), buffers, options.check),
        update=LocalUpdate(
            parts.flat,
            parts.optimizers,
            max_grad_norm=config.max_grad_norm,
            lr_factor=1.0 + (team.world_size - 1) * config.lr_scale_ratio,
        ),
        schedule=parts.schedule,
        policy=CadencePolicy(
            [m.member for m in parts.members],
            cadence,
            make_guard(config.divergence_guard, config.divergence_threshold),
            max_batch_diff=config.max_batch_diff,
            in_background=background is not None,
        ),
        options=options,
        background=background,
        avoid_ones=options.avoid_ones,
    )


def _options(parts: Parts, buffers: BufferAverager) -> EngineOptions:
    team, config, members = parts.team, parts.config, parts.members

    def bring_up_to_date(counters: dict[str, Any], receives: bool) -> dict[str, Any]:
        return transfer_state(
            team.comm,
            parts.model,
            parts.flat,
            parts.optimizers,
            parts.schedule,
            parts.registry,
            counters,
            receives=receives,
        )

    stop_requested = config.stop_when or _never
    notice = _never_mind if team.rank else warn
    alike = len({(m.device.partition(":")[0], m.device_name) for m in members}) == 1
    return EngineOptions(
        max_grad_norm=config.max_grad_norm,
        non_finite=config.non_finite,
        unlike_devices=not alike,
        avoid_ones=has_batch_statistics(parts.model),
        dtype=HALF.get(members[team.rank].precision, torch.float32),
        loss_scale=LossScale(m.rank for m in members if m.precision == "fp16"),
        slowdown=Slowdown(
            config.emulate_slow.get(team.rank, 1.0),
            clock=compute_clock(members[team.rank].device),
            sleep=patient_sleep(stop_requested),
        ),
        check=ReplicaCheck(parts.model, parts.flat, buffers, every=config.verify_every or 0),
        check_model=lambda: check_identity(parts.model, parts.flat),
        stop_requested=stop_requested,
        before_update=parts.schedule.before_update,
        after_update=parts.schedule.after_update,
        transfer_state=bring_up_to_date,
        notice=notice,
        habits=Habits(parts.flat, parts.optimizers, notice, warn=warn, rank=team.rank),
    )


def has_batch_statistics(model: nn.Module) -> bool:
    """Whether a layer of the model normalises over the batch in training."""
    return any(isinstance(module, _BatchNorm) for module in model.modules())


def _sync_planner(members: Sequence[str], config: DdpConfig, avoid_ones: bool) -> Policy:
    if config.partition_ratios is not None:
        return FixedShares(members, config.partition_ratios, avoid_ones=avoid_ones)
    planner = SyncPolicy(members, [None] * len(members), avoid_ones=avoid_ones)
    if (speeds := config.hinted_speeds(len(members))) is not None:
        planner.hint(list(speeds))
    return planner


def _never() -> bool:
    return False


def _never_mind(text: str) -> None:
    pass
