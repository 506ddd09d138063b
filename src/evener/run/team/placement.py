"""Which device a rank computes on, how the team exchanges, and how it meets."""

from collections.abc import Sequence
from typing import Any

import torch

from evener.comm.base import Communicator, SingleCommunicator
from evener.comm.existing import find_place
from evener.comm.groups import connect
from evener.errors import ConfigError
from evener.run.team.environment import DistributedRole, DistributedTrainConfig

#: What ``Ddp.setup`` takes for ``devices``.
Devices = str | int | torch.device | Sequence[str | torch.device]

_spent_sockets: set[int] = set()


def devices_of_host(devices: Devices, num_cuda: int) -> tuple[str, ...]:
    """The devices that are asked for on this host, one for each rank.

    Args:
        devices: ``"auto"`` (every CUDA device, else one CPU rank), ``"cpu"``, ``"cuda"`` (every
            CUDA device), one device by name, a number of ranks (on CUDA devices where there are
            any), or a list of devices.
        num_cuda: CUDA devices of this host.

    Raises:
        ConfigError: A name is unknown or asks for what is not there.
    """
    cuda = tuple(f"cuda:{index}" for index in range(num_cuda))
    if isinstance(devices, bool):
        raise ConfigError(f"devices is {devices}; give 'auto', a number of ranks or a list")
    if isinstance(devices, int):
        if devices < 1:
            raise ConfigError(f"devices is {devices}; give 1 or more ranks")
        if cuda and devices > len(cuda):
            raise ConfigError(
                f"devices is {devices}, but this host has {len(cuda)} CUDA devices; for further "
                f"ranks on the CPU name each: devices={[*cuda, 'cpu']}"
            )
        return cuda[:devices] or ("cpu",) * devices
    if isinstance(devices, str | torch.device):
        name = str(devices)
        if name == "auto":
            return cuda or ("cpu",)
        if name == "cuda":
            if not cuda:
                raise ConfigError("devices is 'cuda', but torch finds no CUDA device; use 'auto'")
            return cuda
        return (_checked(name, num_cuda, devices),)
    if not devices:
        raise ConfigError("devices is an empty list; name a device for each rank")
    return tuple(_checked(str(device), num_cuda, devices) for device in devices)


def _checked(name: str, num_cuda: int, devices: object) -> str:
    kind, _, index = name.partition(":")
    if name == "cpu":
        return name
    if kind != "cuda" or not index.isdecimal():
        raise ConfigError(
            f"devices is {devices!r}; choose 'auto', 'cpu', 'cuda', a number of ranks, or a list "
            "of devices such as ['cuda:0', 'cpu']"
        )
    if int(index) >= num_cuda:
        raise ConfigError(
            f"devices is {devices!r}, but torch finds {num_cuda} CUDA devices here, numbered from 0"
        )
    return name


def choose_device(devices: Devices, environment: DistributedTrainConfig) -> torch.device:
    """This rank's device.

    Raises:
        ConfigError: The name is unknown, or asks for a device that is not there.
    """
    wanted = environment.backend.value if devices == "auto" else devices
    count = torch.cuda.device_count()
    if wanted in ("auto", "cuda"):
        name = _by_local_rank(str(wanted), environment, count)
    elif wanted == "cpu":
        name = "cpu"
    else:
        asked = devices_of_host(wanted, count)
        if environment.launched_by != "alone" and len(asked) != environment.local_world_size:
            raise ConfigError(
                f"devices is {devices!r}, which is for {len(asked)} ranks, but "
                f"{environment.launched_by} has started {environment.local_world_size} on this "
                "host; leave devices out, or start as many ranks as it names"
            )
        name = asked[environment.local_rank]
    device = torch.device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def _by_local_rank(wanted: str, environment: DistributedTrainConfig, count: int) -> str:
    local_rank = environment.local_rank
    if environment.launched_by == "slurm" and count:
        # A task that SLURM has bound to devices of its own sees those alone, numbered from 0.
        return f"cuda:{local_rank % count}"
    if local_rank < count:
        return f"cuda:{local_rank}"
    if wanted == "cuda":
        raise ConfigError(
            f"devices is 'cuda', but local rank {local_rank} finds {count} CUDA devices; start at "
            "most one rank per device, or use devices='auto'"
        )
    return "cpu"


def place_in(group: Any) -> DistributedTrainConfig:
    """This rank's place in a group of ``torch.distributed``; all its ranks call it together.

    Raises:
        ConfigError: This process is not in it.
        LaunchError: Its ranks cannot meet.
    """
    found = find_place(group)
    if found.listen_fd is not None:
        _spent_sockets.discard(found.listen_fd)  # a new socket may get the number of an old one
    return DistributedTrainConfig(
        world_size=found.world_size,
        rank=found.rank,
        local_rank=found.local_rank,
        role=DistributedRole.WORKER if found.rank else DistributedRole.COORDINATOR,
        coordinator_addr=found.address,
        coordinator_port=found.port,
        local_world_size=found.local_world_size,
        store_fd=found.listen_fd,
        launched_by="torch.distributed",
    )


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
