"""Choose how a team exchanges, from facts of all ranks, so that all make the same choice."""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch

from evener.comm.base import Communicator
from evener.comm.c10d import nccl_version
from evener.comm.host_leaders import connect_hosts
from evener.comm.messages import name_ranks
from evener.devices import count_accelerators
from evener.errors import ConfigError, LaunchError
from evener.planning.policies import ApplyPolicy
from evener.team.environment import AverageBackend, DistributedTrainConfig, choose
from evener.team.fixed import meet
from evener.team.membership import Membership
from evener.team.terminal import warn

#: NCCL connects in a few seconds, or hangs.
_NCCL_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeFacts:
    """The facts of a rank by which the team chooses how to exchange.

    Attributes:
        backend: The requested averaging backend.
        policy: When its script averages; ``"by hand"`` for ``Ddp.wrap``.
        host: Name of its host.
        local_world_size: Ranks on that host.
        num_gpus: GPUs and other accelerators that torch finds there.
        device: Its device, such as ``cuda:0``.
        vendor: ``"NVIDIA"`` or ``"AMD"``; empty but on CUDA devices.
        gpu: Identifies its GPU; empty but on CUDA devices.
        nccl: Version of its collective library, such as ``"2.29"``; empty if it has none.
    """

    backend: str
    policy: str
    host: str
    local_world_size: int
    num_gpus: int
    device: str
    vendor: str
    gpu: str
    nccl: str


def check_backend(backend: str) -> AverageBackend:
    """Return the backend of that name; raises ConfigError if there is none."""
    return choose("backend", backend, AverageBackend)


def check_policy(policy: str) -> ApplyPolicy:
    """Return the policy of that name; raises ConfigError if there is none."""
    return choose("policy", policy, ApplyPolicy)


def decide_backend(team: Sequence[ExchangeFacts]) -> tuple[str, str]:
    """Choose how the team exchanges tensors on devices.

    Args:
        team: The facts of each rank, in rank order.

    Returns:
        ``"nccl"``, ``"shared"``, ``"hosts"``, ``"gloo"`` or ``"none"``, and the reason as text.

    Raises:
        ConfigError: Ranks request different backends, or NCCL if it cannot work.
    """
    first = team[0]
    for rank, facts in enumerate(team):
        for name in ("backend", "policy"):
            mine, theirs = getattr(first, name), getattr(facts, name)
            if mine != theirs:
                where = " (comm_backend of a DistributedTrainConfig)" if name == "backend" else ""
                raise ConfigError(
                    f"{name} is {mine!r} on rank 0 and {theirs!r} on rank {rank}; give the same on "
                    f"every rank{where}"
                )
    if len(team) == 1:
        unused = "" if first.backend == AverageBackend.AUTO else f", so {first.backend!r} is unused"
        return "none", f"one rank, nothing to exchange{unused}"
    backend = AverageBackend(first.backend)
    obstacle = _obstacle_to_nccl(dict(enumerate(team)))
    if backend is AverageBackend.NCCL:
        if obstacle:
            raise ConfigError(
                f"backend is 'nccl', but {obstacle}: use backend='gloo' or 'auto' (in a "
                "DistributedTrainConfig that is its comm_backend)"
            )
        return "nccl", "asked for"
    if backend is AverageBackend.AUTO and not obstacle:
        return "nccl", "chosen because every rank has its own GPU, all of one vendor"
    why = "asked for ('cpu')"
    if backend is AverageBackend.AUTO:
        why = f"chosen because {obstacle}"
    elif backend is AverageBackend.GLOO:
        return "gloo", "asked for ('gloo'); ranks exchange through sockets of their hosts"
    num_hosts = len({facts.host for facts in team})
    return ("shared" if num_hosts == 1 else "hosts" if num_hosts < len(team) else "gloo"), why


def connect_team(
    environment: DistributedTrainConfig,
    backend: str,
    policy: str,
    device: torch.device,
    timeout_s: float,
    communicator: Communicator | None = None,
) -> tuple[Communicator, Membership]:
    """Connect to the other ranks and choose the backend; all ranks call it together.

    Args:
        environment: This rank's place.
        backend: ``AverageBackend`` by name.
        policy: See ``ExchangeFacts``.
        device: This rank's device.
        timeout_s: Longest wait for another rank.
        communicator: Used instead of a new connection.

    Returns:
        The communicator, whose ``reason`` explains the choice, and the place in the team.

    Raises:
        ConfigError: See ``decide_backend``; on every rank.
        LaunchError: The ranks did not find one another, or NCCL was requested and failed.
    """
    check_backend(backend)
    if communicator is not None:
        if backend == AverageBackend.NCCL:
            _require_nccl(communicator)
        return communicator, Membership(communicator.rank, communicator.world_size)
    if backend == AverageBackend.AUTO:
        backend = environment.comm_backend.value
    facts = describe_exchange(environment, check_backend(backend), policy, device)
    comm, membership = meet(environment, timeout_s)
    try:
        answers = comm.all_gather_json(asdict(facts), what="how ranks exchange")
        chosen, comm.reason = decide_backend([ExchangeFacts(**answer) for answer in answers])
        if backend != AverageBackend.GLOO and comm.world_size > 1:
            comm, how = connect_hosts(comm)
            # With NCCL, only rows travel there.
            comm.reason += "" if chosen == "nccl" else f"; {how}"
        if chosen == "nccl" and backend == AverageBackend.AUTO:
            _use_nccl(comm, comm.reason, "", comm.timeout_s)
        elif chosen == "nccl":
            _require_nccl(comm)
    except BaseException:
        comm.close()
        raise
    return comm, membership


def _require_nccl(comm: Communicator) -> None:
    if failure := comm.add_nccl():
        raise LaunchError(
            f"NCCL did not connect the ranks ({failure}); NCCL_DEBUG=INFO shows details, and "
            "backend='gloo' exchanges on the hosts"
        )


def prefer_nccl(comm: Communicator, own: ExchangeFacts, timeout_s: float) -> None:
    """Let the members of a generation exchange over NCCL, if that can join all of them.

    All of them call it together. If it cannot, all exchange through host memory until the next
    generation, and the first one prints why.

    Args:
        comm: Connects them.
        own: The facts of this member.
        timeout_s: Deadline for comparing GPUs, and for connecting.
    """
    answers = comm.all_gather_json(asdict(own), what="how ranks exchange", timeout_s=timeout_s)
    team = {n: ExchangeFacts(**answer) for n, answer in zip(comm.numbers, answers, strict=True)}
    _use_nccl(comm, "asked for", _obstacle_to_nccl(team), timeout_s)


def _use_nccl(comm: Communicator, reason: str, obstacle: str, timeout_s: float) -> None:
    """Exchange over NCCL if that works, and set the reason; all ranks call it together."""
    if not obstacle and (failure := comm.add_nccl(timeout_s=min(timeout_s, _NCCL_S))):
        obstacle = f"NCCL failed {failure}"
    comm.reason = f"chosen because {obstacle}" if obstacle else reason
    if obstacle and comm.rank == 0:
        warn(
            f"{obstacle}; so ranks exchange through host memory, which is slower. "
            "NCCL_DEBUG=INFO shows details, and backend='gloo' or 'cpu' does not use NCCL"
        )


def _obstacle_to_nccl(team: Mapping[int, ExchangeFacts]) -> str:
    """Return why NCCL cannot connect these ranks; empty if it can."""
    for rank, facts in team.items():
        if not facts.gpu and facts.device != "cpu":
            return f"rank {rank} computes on {facts.device}, and NCCL connects only CUDA devices"
    on_cpu = [rank for rank, facts in team.items() if not facts.gpu]
    if on_cpu:
        facts = team[on_cpu[0]]
        why = ""
        if 0 < facts.num_gpus < facts.local_world_size:
            why = f" (host {facts.host}: {facts.local_world_size} ranks, GPUs: {facts.num_gpus})"
        compute = "computes" if len(on_cpu) == 1 else "compute"
        return f"{name_ranks(on_cpu)}{why} {compute} on the CPU, and NCCL connects only GPUs"
    owners: dict[str, int] = {}
    for rank, facts in team.items():
        other = owners.setdefault(facts.gpu, rank)
        if other != rank:
            return (
                f"ranks {other} and {rank} share one GPU ({facts.device} of host {facts.host}), "
                "and NCCL needs one for each rank"
            )
    (lowest, first), *_ = team.items()
    for rank, facts in team.items():
        if not facts.nccl or _library(facts) != _library(first):
            return (
                f"rank {lowest} has {_library(first)} and rank {rank} has {_library(facts)}, which "
                "are incompatible"
            )
    return ""


def _library(facts: ExchangeFacts) -> str:
    return f"NCCL {facts.nccl} of {facts.vendor}" if facts.nccl else "a torch without NCCL"


def describe_exchange(
    environment: DistributedTrainConfig,
    backend: AverageBackend,
    policy: str,
    device: torch.device,
) -> ExchangeFacts:
    """Return the facts of this rank."""
    on_gpu = device.type == "cuda"
    return ExchangeFacts(
        backend=backend.value,
        policy=policy,
        host=platform.node(),
        local_world_size=environment.local_world_size,
        num_gpus=sum(count_accelerators().values()),
        device=str(device),
        vendor=("AMD" if torch.version.hip else "NVIDIA") if on_gpu else "",
        gpu=str(torch.cuda.get_device_properties(device).uuid) if on_gpu else "",
        nccl=nccl_version() if on_gpu else "",
    )
