"""Which device a rank computes on, how the team exchanges, and how it meets."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from evener.comm.base import Communicator
from evener.comm.existing import close_in_children, find_place
from evener.comm.groups import connect
from evener.devices import count_accelerators, kind_of
from evener.errors import ConfigError
from evener.team.channel import JOINED, JOINING
from evener.team.child import tell
from evener.team.environment import DistributedBackend, DistributedTrainConfig

#: What ``Ddp.setup`` takes for ``devices``.
Devices = str | int | torch.device | Sequence[str | int | torch.device]

_spent_sockets: set[int] = set()

#: Kinds of accelerators that torch itself knows.
_ACCELERATORS = tuple(
    kind.value for kind in (DistributedBackend.CUDA, DistributedBackend.XPU, DistributedBackend.MPS)
)


def devices_of_host(devices: Devices, counts: Mapping[str, int]) -> tuple[str, ...]:
    """Return the devices that are asked for on this host, one for each rank.

    Args:
        devices: ``"auto"`` (every device of the host's accelerator, else one CPU rank), ``"cpu"``,
            ``"accelerator"`` or a kind of it such as ``"cuda"``, ``"xpu"`` and ``"mps"`` (every
            device of that kind), one device by name, a number of ranks (on accelerators where
            there are any), or a list of devices, of which a number is one of the host's
            accelerator.
        counts: Devices of this host by kind of accelerator, such as ``{"cuda": 2}``; the kind that
            ``"auto"`` takes comes first.

    Raises:
        ConfigError: A name is unknown or asks for what is not there.
    """
    first = next(iter(counts), "")
    of_kind = {kind: tuple(f"{kind}:{i}" for i in range(n)) for kind, n in counts.items()}
    of_kind |= {"auto": of_kind.get(first, ("cpu",)), "cpu": ("cpu",)}
    if first:
        of_kind["accelerator"] = of_kind[first]
    if isinstance(devices, bool) or not isinstance(devices, int | torch.device | Sequence):
        raise ConfigError(f"devices is {devices!r}; give 'auto', a number of ranks or a list")
    if isinstance(devices, int):
        if devices < 1:
            raise ConfigError(f"devices is {devices}; give 1 or more ranks")
        if first and devices > counts[first]:
            raise ConfigError(
                f"devices is {devices}, but this host has {_found_here(counts)}; for further "
                f"ranks on the CPU name each: devices={[*of_kind[first], 'cpu']}"
            )
        return of_kind["auto"][:devices] if first else ("cpu",) * devices
    if isinstance(devices, str | torch.device):
        return of_kind.get(str(devices)) or (_checked(str(devices), counts, devices),)
    if not devices:
        raise ConfigError("devices is an empty list; name a device for each rank")
    return tuple(_checked(device, counts, devices) for device in devices)


def check_devices(devices: Devices) -> None:
    """Refuse what this host does not have; see ``devices_of_host``."""
    devices_of_host(devices, count_accelerators())


def _found_here(counts: Mapping[str, int]) -> str:
    """Devices by kind, such as ``2 cuda devices``."""
    texts = [f"{n} {kind} device{'' if n == 1 else 's'}" for kind, n in counts.items()]
    return " and ".join(texts) or "no accelerator"


def _checked(device: object, counts: Mapping[str, int], devices: object) -> str:
    """Return a device's name, if it is here; in a list it may be a number: 1 is ``"cuda:1"``."""
    if isinstance(device, int):
        return _by_number(device, counts, devices)
    name = str(device)
    kind, _, index = name.partition(":")
    if name == "cpu":
        return name
    known = kind in (*counts, *_ACCELERATORS, "accelerator")
    if not known or (index and not index.isdecimal()) or (not index and kind in counts):
        raise ConfigError(
            f"devices is {devices!r}; choose 'auto', 'cpu', 'accelerator', a kind of accelerator "
            f"({', '.join(_ACCELERATORS)}), a number of ranks, or a list of devices such as "
            "['cuda:0', 'cpu']"
        )
    if kind not in counts or int(index) >= counts[kind]:
        raise ConfigError(
            f"devices is {devices!r}, but torch finds {_found_here(counts)} here; devices are "
            "numbered from 0, and 'auto' takes what is there"
        )
    return name


def _by_number(number: int, counts: Mapping[str, int], devices: object) -> str:
    if isinstance(number, bool):
        raise ConfigError(
            f"devices is {devices!r}, which holds {number}; give names such as 'cuda:0' or 'cpu', "
            "or numbers of the host's accelerator"
        )
    kind = next(iter(counts), "")
    if not 0 <= number < counts.get(kind, 0):
        remedy = "numbers count from 0" if kind else "name devices, such as ['cpu', 'cpu']"
        raise ConfigError(
            f"devices is {devices!r}, where {number} is a device of the host's accelerator by its "
            f"number, but torch finds {_found_here(counts)} here; {remedy}"
        )
    return f"{kind}:{number}"


def choose_device(devices: Devices, environment: DistributedTrainConfig) -> torch.device:
    """Return this rank's device.

    Raises:
        ConfigError: The name is unknown, or asks for a device that is not there.
    """
    wanted = environment.backend.value if devices == "auto" else devices
    counts = count_accelerators()
    if isinstance(wanted, str) and wanted in (*DistributedBackend, *counts):
        name = device_by_number(wanted, environment.local_rank, environment, counts)
    else:
        asked = devices_of_host(wanted, counts)
        if environment.launched_by != "alone" and len(asked) != environment.local_world_size:
            raise ConfigError(
                f"devices is {devices!r}, which is for {len(asked)} ranks, but "
                f"{environment.launched_by} has started {environment.local_world_size} on this "
                "host; leave devices out, or start as many ranks as it names"
            )
        name = asked[environment.local_rank]
    device = torch.device(name)
    kind_of(device).select(device)
    return device


def device_by_number(
    wanted: str, number: int, environment: DistributedTrainConfig, counts: Mapping[str, int]
) -> str:
    """Return the device for one of those that compute on a host.

    Args:
        wanted: ``DistributedBackend`` by name, or the name of another kind of accelerator.
        number: From 0, over the host.
        environment: The place of this process.
        counts: See ``devices_of_host``.

    Raises:
        ConfigError: There are not as many.
    """
    kind = next(iter(counts), "cpu") if wanted in ("auto", "accelerator") else wanted
    count = counts.get(kind, 0)
    if environment.launched_by == "slurm" and count:
        # A task that SLURM has bound to devices of its own sees those alone, numbered from 0.
        return f"{kind}:{number % count}"
    if number < count:
        return f"{kind}:{number}"
    if wanted in ("auto", "cpu"):
        return "cpu"
    source = "backend" if wanted == environment.backend else "devices"
    raise ConfigError(
        f"{source} is {wanted!r}, but local rank {environment.local_rank} finds "
        f"{_found_here(counts)} where it needs {wanted}:{number}; start at most one rank per "
        f"device, or let {source} be 'auto'"
    )


def place_in(group: Any) -> DistributedTrainConfig:
    """Return this rank's place in a group of ``torch.distributed``; all its ranks call it together.

    Raises:
        ConfigError: This process is not in it.
        LaunchError: Its ranks cannot meet.
    """
    found = find_place(group)
    close_in_children(group)
    if found.store_fd is not None:
        _spent_sockets.discard(found.store_fd)  # a new socket may get the number of an old one
    return DistributedTrainConfig.of_rank(**found._asdict(), launched_by="torch.distributed")


def join(environment: DistributedTrainConfig, backend: str, timeout_s: float) -> Communicator:
    """Connect to the other ranks; with one rank there is nothing to connect to."""
    if environment.world_size == 1:
        return Communicator()
    # The launcher's socket serves one store; a later team of this process opens the port anew.
    listen_fd = None if environment.store_fd in _spent_sockets else environment.store_fd
    if listen_fd is not None:
        _spent_sockets.add(listen_fd)
    # Another team than the launcher's does not need all of its ranks.
    is_launchers = environment.launched_by == "evener"
    if is_launchers:
        tell(place=JOINING)
    comm = connect(
        environment.rank,
        environment.world_size,
        environment.coordinator_addr,
        environment.coordinator_port,
        hosts_store=environment.hosts_store,
        listen_fd=listen_fd,
        backend=backend,
        timeout_s=timeout_s,
    )
    if is_launchers:
        tell(place=JOINED)
    return comm
