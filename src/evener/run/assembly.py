"""Puts a rank's parts together: device, connection, flat buffers, averagers, planner, engine."""

import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from evener.averaging.buffers import BufferAverager
from evener.averaging.gradients import GradientAverager
from evener.cadence.fixed import FixedShares
from evener.cadence.policies import ApplyPolicy, Policy
from evener.cadence.sync import SyncPolicy
from evener.comm.base import Communicator, SingleCommunicator
from evener.comm.flat import FlatBuffers
from evener.comm.groups import connect
from evener.errors import CheckpointError, ConfigError
from evener.run.child import apply_threads
from evener.run.emulate import Slowdown, compute_clock
from evener.run.engine import WindowEngine
from evener.run.environment import DistributedTrainConfig
from evener.run.precision import AutocastForward, Precision, choose_precision
from evener.run.row import payload_length
from evener.run.schedule import ProgressSchedule, Schedule
from evener.run.team import Member, Team, check_alike, describe_self, member_document
from evener.run.transfer import transfer_state
from evener.run.windows import EngineOptions
from evener.version import __version__

if TYPE_CHECKING:
    from evener.run.ddp import DdpConfig


_spent_sockets: set[int] = set()


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
    flat: FlatBuffers
    buffers: BufferAverager
    engine: WindowEngine
    autocast: AutocastForward | None

    @property
    def policy(self) -> Policy:
        """Who does how much."""
        return self.engine.policy

    def set_micro_batch_size(self, size: int) -> None:
        """Tells the planner the largest micro-batch, the same on every rank."""
        self.policy.set_micro_batch_sizes([size] * self.team.world_size)

    def agree_on_failure(self, failure: str) -> None:
        """Raises rank 0's failure on every rank; all ranks call it together."""
        answers = self.engine.team.introduce({"failure": failure})
        if answers[0]["failure"]:
            raise CheckpointError(answers[0]["failure"])

    def close(self) -> None:
        """Gives back hooks and connections; idempotent."""
        self.engine.close_down()
        self.flat.close()
        if self.autocast is not None:
            self.autocast.remove()
            self.autocast = None
        self.comm.close()


def assemble(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    scheduler: LRScheduler | Sequence[LRScheduler] | ProgressSchedule | None,
    *,
    policy: str | ApplyPolicy,
    backend: str,
    devices: str,
    precision: str,
    config: "DdpConfig",
    environment: DistributedTrainConfig,
    communicator: Communicator | None = None,
) -> Assembly:
    """Builds a rank's parts and makes all ranks start alike; all ranks call it together."""
    _check_policy(policy)
    _check_optimizers(optimizers)
    device = choose_device(devices, environment)
    resolved = choose_precision(precision, device)
    apply_threads(environment)
    model.to(device)
    if communicator is not None:
        comm, reason = communicator, "given to Ddp.setup"
    else:
        chosen, reason = choose_backend(backend, device, environment.world_size)
        comm = join(environment, chosen, config.timeout_s)
    try:
        team = Team(comm, payload_length=payload_length(comm.world_size))
        slow = config.emulate_slow.get(comm.rank, 1.0)
        members = _introduce(team, model, environment, device, slow)
        flat = FlatBuffers(list(model.named_parameters()), comm.world_size)
        _check_parameters(optimizers, flat)
        _start_alike(model, comm)
        model.train()
        schedule = Schedule(optimizers, scheduler)
        engine = _engine(team, members, model, flat, list(optimizers), schedule, config)
    except BaseException:
        comm.close()
        raise
    assembly = Assembly(
        environment=environment,
        model=model,
        optimizers=optimizers,
        schedule=schedule,
        device=device,
        precision=resolved,
        comm=comm,
        backend_reason=reason,
        team=team,
        members=members,
        flat=flat,
        buffers=engine.buffers,
        engine=engine,
        autocast=AutocastForward(model, device) if resolved == "bf16" else None,
    )
    if not config.quiet and comm.rank == 0:
        sys.stderr.write("\n".join(team_lines(assembly)) + "\n")
    return assembly


def _engine(
    team: Team,
    members: Sequence[Member],
    model: nn.Module,
    flat: FlatBuffers,
    optimizers: Sequence[Optimizer],
    schedule: Schedule,
    config: "DdpConfig",
) -> WindowEngine:
    def bring_up_to_date(counters: dict[str, Any], receives: bool) -> dict[str, Any]:
        return transfer_state(
            team.comm, model, flat, optimizers, schedule, counters, receives=receives
        )

    alike = len({(m.device.partition(":")[0], m.device_name) for m in members}) == 1
    return WindowEngine(
        team=team,
        flat=flat,
        averager=GradientAverager(flat, team.comm),
        buffers=BufferAverager(model, team.comm),
        optimizers=optimizers,
        policy=_planner([m.member for m in members], config),
        options=EngineOptions(
            max_grad_norm=config.max_grad_norm,
            non_finite=config.non_finite,
            unlike_devices=not alike,
            slowdown=Slowdown(
                config.emulate_slow.get(team.rank, 1.0),
                clock=compute_clock(members[team.rank].device),
            ),
            stop_requested=config.stop_when or _never,
            before_update=schedule.before_update,
            after_update=schedule.after_update,
            transfer_state=bring_up_to_date,
            notice=_never_mind if config.quiet or team.rank else _warn,
        ),
    )


def choose_device(devices: str, environment: DistributedTrainConfig) -> torch.device:
    """This rank's device.

    Raises:
        ConfigError: The name is unknown, or asks for a device that is not there.
    """
    wanted = devices if devices != "auto" else environment.backend.value
    if wanted in ("auto", "cuda"):
        count = torch.cuda.device_count()
        if environment.local_rank < count:
            device = torch.device("cuda", environment.local_rank)
            torch.cuda.set_device(device)
            return device
        if wanted == "cuda":
            raise ConfigError(
                f"devices is 'cuda', but local rank {environment.local_rank} finds {count} CUDA "
                "devices; start at most one rank per device, or use devices='auto'"
            )
        return torch.device("cpu")
    if wanted == "cpu":
        return torch.device("cpu")
    raise ConfigError(f"devices is {wanted!r}; choose one of auto, cpu, cuda")


def choose_backend(backend: str, device: torch.device, world_size: int) -> tuple[str, str]:
    """Resolves the averaging backend and says why, for people."""
    if world_size == 1:
        return "none", "one rank, nothing to exchange"
    if backend in ("gloo", "cpu"):
        return "gloo", "asked for"
    if backend == "nccl":
        if device.type != "cuda":
            raise ConfigError(
                "backend is 'nccl', but this rank computes on the CPU; NCCL joins CUDA devices "
                "only: use backend='gloo' or 'auto'"
            )
        return "nccl", "asked for"
    if backend == "auto":
        if device.type == "cuda" and torch.cuda.device_count() >= world_size:
            return "nccl", "every rank has a CUDA device"
        return "gloo", "works between any devices; NCCL needs a CUDA device for every rank"
    raise ConfigError(f"backend is {backend!r}; choose one of auto, gloo, nccl, cpu")


def join(environment: DistributedTrainConfig, backend: str, timeout_s: float) -> Communicator:
    """Connects to the other ranks; with one rank there is nothing to connect to."""
    if environment.world_size == 1:
        return SingleCommunicator()
    # The launcher's socket serves one store; a later team of this process opens the port anew.
    listen_fd = None if environment.store_fd in _spent_sockets else environment.store_fd
    if listen_fd is not None:
        _spent_sockets.add(listen_fd)
    return connect(
        environment.rank,
        environment.world_size,
        environment.coordinator_addr,
        environment.coordinator_port,
        hosts_store=environment.hosts_store,
        listen_fd=listen_fd,
        backend=backend,
        timeout_s=timeout_s,
    )


def team_lines(assembly: Assembly) -> list[str]:
    """The team in words, one line a rank, then the backend and why."""
    lines = [f"team of {len(assembly.members)}:"]
    for m in assembly.members:
        slow = f", emulated {m.emulated:g}x slower" if m.emulated != 1 else ""
        threads = f", {m.threads} threads" if m.device == "cpu" else ""
        gib = m.memory_bytes / 2**30
        lines.append(
            f"  rank {m.rank}  {m.device:7} {m.device_name} | {gib:.1f} GiB{threads}{slow} | "
            f"{m.host} pid {m.pid}"
        )
    lines.append(f"  backend {assembly.comm.backend}: {assembly.backend_reason}")
    return lines


def _introduce(
    team: Team,
    model: nn.Module,
    environment: DistributedTrainConfig,
    device: torch.device,
    slow: float,
) -> tuple[Member, ...]:
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__.partition("+")[0],
        "evener": __version__,
    }
    own = describe_self(team.rank, environment.local_rank, device, emulated=slow, versions=versions)
    shapes = [[n, list(p.shape), str(p.dtype)] for n, p in model.named_parameters()]
    greetings = team.introduce({**member_document(own), "parameters": shapes})
    check_alike(greetings)
    taken: set[str] = set()
    for greeting in greetings:
        greeting.pop("parameters")
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


def _planner(members: Sequence[str], config: "DdpConfig") -> Policy:
    if config.partition_ratios is not None:
        return FixedShares(members, config.partition_ratios)
    planner = SyncPolicy(members, [None] * len(members))
    if config.speed_hint is not None:
        planner.hint(list(config.speed_hint))
    return planner


def _check_optimizers(optimizers: Sequence[Optimizer]) -> None:
    if not optimizers:
        raise ConfigError("no optimizer was given; pass at least one torch.optim optimizer")
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ConfigError(
                "LBFGS evaluates the loss several times in one step, which a window of unequal "
                "shares cannot repeat; use an optimizer that steps on gradients, such as AdamW"
            )


def _check_parameters(optimizers: Sequence[Optimizer], flat: FlatBuffers) -> None:
    """An optimizer must not step what is not averaged: replicas would drift apart."""
    averaged = {id(p) for p in flat.parameters}
    for number, optimizer in enumerate(optimizers):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and id(parameter) not in averaged:
                    raise ConfigError(
                        f"optimizer {number} holds a trainable parameter of shape "
                        f"{tuple(parameter.shape)} that is not the model's, so its gradient would "
                        "not be averaged; make it a parameter of the model"
                    )


def _check_policy(policy: str | ApplyPolicy) -> None:
    try:
        chosen = ApplyPolicy(policy)
    except ValueError:
        names = ", ".join(p.value for p in ApplyPolicy)
        raise ConfigError(f"policy is {policy!r}; choose one of {names}") from None
    if chosen is not ApplyPolicy.SYNC:
        raise ConfigError(f"policy {chosen.value!r} is not supported yet; use 'sync'")


def _never() -> bool:
    return False


def _never_mind(text: str) -> None:
    pass


def _warn(text: str) -> None:
    sys.stderr.write(f"warning: {text}\n")
