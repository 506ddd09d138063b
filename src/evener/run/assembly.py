"""Puts a rank's parts together: device, connection, flat buffers, averagers, planner, engine."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from evener.averaging.buffers import BufferAverager
from evener.comm.base import Communicator
from evener.comm.flat import FlatBuffers
from evener.devices import move
from evener.engine.emulate import emulation_of_launcher
from evener.engine.engine import Engine
from evener.engine.habits import refuse_second_team
from evener.engine.registry import Registry
from evener.engine.schedule import Schedule
from evener.engine.team import Member, Team, describe_self, member_document, own_versions
from evener.errors import CheckpointError, UsageError
from evener.planning.policies import ApplyPolicy, Planner
from evener.run.engines import (
    Parts,
    choose_policy,
    lay_out,
    longest_payload,
    make_engine,
)
from evener.run.launching.child import apply_threads
from evener.run.launching.terminal import say
from evener.run.likeness import check_training, check_versions, describe_training
from evener.run.models import (
    Models,
    Schedulers,
    check_optimizers,
    check_parameters,
    combine_models,
    parts_of,
)
from evener.run.precision import HALF, AutocastForward, Precision, choose_precision
from evener.run.settings import DdpConfig
from evener.run.team.backends import check_backend, connect_team
from evener.run.team.environment import DistributedTrainConfig
from evener.run.team.hardware import hardware_summary, memory_in_words
from evener.run.team.news import LEFT, tell
from evener.run.team.placement import Devices, choose_device


@dataclass(slots=True)
class Assembly:
    """Everything that one rank of a team holds; ``Ddp`` is its face."""

    environment: DistributedTrainConfig
    model: nn.Module
    optimizers: Sequence[Optimizer]
    schedule: Schedule
    device: torch.device
    precision: Precision
    comm: Communicator
    backend_reason: str
    team: Team
    members: tuple[Member, ...]
    several_models: bool
    flat: FlatBuffers
    buffers: BufferAverager
    engine: Engine
    autocast: list[AutocastForward]
    registry: Registry

    @property
    def policy(self) -> Planner:
        """Who does how much."""
        return self.engine.policy

    def set_micro_batch_size(self, size: int) -> None:
        """Tells the planner the largest micro-batch, where memory sets no other limit."""
        self.engine.limits.base = size
        self.policy.set_micro_batch_sizes(self.engine.limits.sizes)

    @property
    def takes_turns(self) -> bool:
        """Whether optimizers are likely to be stepped one by one: several, of several models."""
        return self.several_models and len(self.optimizers) > 1

    def part_of(self, optimizer: Optimizer) -> int:
        """Number of one of the optimizers.

        Raises:
            UsageError: It is none of them.
        """
        for number, own in enumerate(self.optimizers):
            if own is optimizer:
                return number
        raise UsageError(
            f"this {type(optimizer).__name__} was not given to Ddp.setup; pass it there, in the "
            "list of optimizers"
        )

    def agree_on_failure(self, failure: str) -> None:
        """Raises rank 0's failure on every rank; all ranks call it together."""
        answers = self.engine.team.introduce({"failure": failure})
        if answers[0]["failure"]:
            raise CheckpointError(answers[0]["failure"])

    def close(self) -> None:
        """Gives back hooks and connections; idempotent."""
        self.engine.close_down()
        self.engine.options.habits.close()
        self.flat.close()
        while self.autocast:
            self.autocast.pop().remove()
        self.comm.close()
        tell(place=LEFT)


def assemble(
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
) -> Assembly:
    """Builds a rank's parts and makes all ranks start alike; all ranks call it together."""
    chosen = choose_policy(policy, config)
    check_backend(backend)
    check_optimizers(optimizers, scheduler)
    whole, models = combine_models(model)
    refuse_second_team(models)
    device = choose_device(devices, environment)
    resolved = choose_precision(precision, device)
    apply_threads(environment)
    _move(whole, optimizers, device)
    wait_s = config.timeout_s
    comm, reason = connect_team(environment, backend, chosen, device, wait_s, communicator)
    try:
        config = _with_emulation(config, comm)
        team = Team(comm, payload_length=longest_payload(comm.world_size))
        training = describe_training(whole, optimizers, scheduler, chosen, config)
        members = _introduce(team, training, environment, device, config, resolved)
        flat = lay_out(whole, chosen, comm.world_size, parts_of(optimizers), config)
        check_parameters(optimizers, flat)
        _start_alike(whole, comm)
        whole.train()
        schedule, registry = Schedule(optimizers, scheduler), Registry()
        parts = Parts(team, members, whole, flat, list(optimizers), schedule, registry, config)
        engine = make_engine(chosen, parts)
    except BaseException:
        comm.close()
        raise
    assembly = Assembly(
        environment=environment,
        model=whole,
        optimizers=optimizers,
        schedule=schedule,
        device=device,
        precision=resolved,
        comm=comm,
        backend_reason=reason,
        team=team,
        members=members,
        several_models=len(models) > 1,
        flat=flat,
        buffers=engine.buffers,
        engine=engine,
        autocast=[AutocastForward(m, device, HALF[resolved]) for m in models if resolved in HALF],
        registry=registry,
    )
    habits = engine.options.habits
    habits.claim(models)
    _print_team(assembly, config)
    return assembly


def _print_team(assembly: Assembly, config: DdpConfig) -> None:
    if not config.quiet and assembly.comm.rank == 0:
        say("\n".join(team_lines(assembly)))


def team_lines(assembly: Assembly) -> list[str]:
    """The team in words: its devices, one line a rank, then the backend and why."""
    lines = [f"team of {len(assembly.members)}: {hardware_summary(assembly.members)}"]
    for m in assembly.members:
        slow = f", emulated {m.emulated:g}x slower" if m.emulated != 1 else ""
        half = f", {m.precision}" if m.precision != "fp32" else ""
        threads = f", {m.threads} threads" if m.device == "cpu" else ""
        memory = memory_in_words(m, before=" | ")
        lines.append(
            f"  rank {m.rank}  {m.device:7} {m.device_name}{memory}{threads}{half}{slow} | "
            f"{m.host} pid {m.pid}"
        )
    lines.append(f"  backend {assembly.comm.backend}: {assembly.backend_reason}")
    return lines


def _move(model: nn.Module, optimizers: Sequence[Optimizer], device: torch.device) -> None:
    """Moves the model, and what optimizers remember to where their parameters have gone."""
    move(model, device)
    if device.type != "cpu":
        for optimizer in optimizers:
            if optimizer.state:
                optimizer.load_state_dict(optimizer.state_dict())


def _with_emulation(config: DdpConfig, comm: Communicator) -> DdpConfig:
    """The options with the ranks that the launcher's command line slows."""
    factors, absent = emulation_of_launcher(os.environ, comm.world_size)
    if absent and comm.rank == 0:
        there = "rank 0 only" if comm.world_size == 1 else f"ranks 0 to {comm.world_size - 1}"
        for rank in absent:
            say(f"evener: --emulate-slow for rank {rank} is ignored: this team has {there}")
    return replace(config, emulate_slow={**config.emulate_slow, **factors}) if factors else config


def _introduce(
    team: Team,
    training: Mapping[str, Any],
    environment: DistributedTrainConfig,
    device: torch.device,
    config: DdpConfig,
    precision: Precision,
) -> tuple[Member, ...]:
    config.check_team(team.world_size)
    slow = config.emulate_slow.get(team.rank, 1.0)
    own = describe_self(
        team.rank,
        environment.local_rank,
        device,
        emulated=slow,
        versions=own_versions(),
        precision=precision,
    )
    greetings = team.introduce({**member_document(own), "training": training})
    check_versions([greeting["versions"] for greeting in greetings])
    check_training([greeting.pop("training") for greeting in greetings])
    taken: set[str] = set()
    for greeting in greetings:
        # Machines may share a host name; in rank order, so that every rank finds the same ids.
        name, number = greeting["member"], 2
        while greeting["member"] in taken:
            greeting["member"] = f"{name}#{number}"
            number += 1
        taken.add(greeting["member"])
    return tuple(Member(**g) for g in greetings)


@torch.no_grad()
def _start_alike(model: nn.Module, comm: Communicator) -> None:
    """Gives every rank rank 0's parameters (frozen ones too) and buffers."""
    if comm.world_size == 1:
        return
    kinds: dict[torch.dtype, list[Any]] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        kinds.setdefault(tensor.dtype, []).append(tensor)
    for dtype, tensors in kinds.items():
        packed = torch.cat([t.detach().reshape(-1) for t in tensors])
        wire = packed.to(torch.uint8) if dtype == torch.bool else packed
        comm.broadcast(wire, 0, what="initial model")
        offset = 0
        for tensor in tensors:
            part = wire[offset : offset + tensor.numel()].view(tensor.shape)
            tensor.copy_(part.to(dtype))
            offset += tensor.numel()
