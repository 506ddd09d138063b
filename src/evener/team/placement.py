"""Choose the device of a rank."""

from collections.abc import Mapping, Sequence
from itertools import chain

import torch

from evener.devices import count_accelerators, kind_of
from evener.errors import ConfigError
from evener.team.environment import DistributedBackend, DistributedTrainConfig

#: What ``Ddp.setup`` takes for ``devices``.
Devices = str | int | torch.device | Sequence[str | int | torch.device]


def devices_of_host(devices: Devices, counts: Mapping[str, int]) -> tuple[str, ...]:
    """Return the requested devices of this host, one for each rank.

    Args:
        devices: ``"auto"`` (every device of the host's accelerator, else one CPU rank), ``"cpu"``,
            ``"accelerator"`` or a kind of it such as ``"cuda"``, ``"xpu"`` and ``"mps"`` (every
            device of that kind), one device by name, a number of ranks (on accelerators if there
            are any), or a list of devices, in which a number is one of the host's accelerator.
        counts: Devices of this host by kind of accelerator, such as ``{"cuda": 2}``; the kind of
            ``"auto"`` comes first.

    Raises:
        ConfigError: A name is unknown, or its device does not exist.
    """
    kinds = {kind: [f"{kind}:{i}" for i in range(n)] for kind, n in counts.items()}
    first = next(iter(kinds), "")
    every = [*chain.from_iterable(kinds.values()), "cpu"]
    words = {"auto": kinds.get(first, ["cpu"]), "cpu": ["cpu"], **kinds}
    words |= {"accelerator": kinds[first]} if first else {}
    wanted: Sequence[object] = ()
    if isinstance(devices, str | torch.device):
        wanted = words.get(str(devices), [devices])
    elif isinstance(devices, Sequence):
        wanted = devices
    elif type(devices) is int:  # True is an int, too
        wanted = range(devices) if first else ["cpu"] * devices
    names = [f"{first}:{one}" if type(one) is int else str(one) for one in wanted]
    if not names or not set(names).issubset(every):
        raise ConfigError(
            f"devices is {devices!r}, but torch finds {_found_here(counts)} here; devices are "
            f"numbered from 0: choose one of {', '.join(map(repr, words))}, a number of ranks from "
            f"1, or a list such as {every}"
        )
    return tuple(names)


def check_devices(devices: Devices) -> None:
    """Refuse devices that this host does not have; see ``devices_of_host``."""
    devices_of_host(devices, count_accelerators())


def _found_here(counts: Mapping[str, int]) -> str:
    """Return the devices by kind as text, such as ``2 cuda devices``."""
    texts = [f"{n} {kind} device{'' if n == 1 else 's'}" for kind, n in counts.items()]
    return " and ".join(texts) or "no accelerator"


def choose_device(devices: Devices, environment: DistributedTrainConfig) -> torch.device:
    """Return this rank's device.

    Raises:
        ConfigError: The name is unknown, or the device does not exist.
    """
    names = deal_devices(devices, environment)
    if not names:
        names = devices_of_host(devices, count_accelerators())
        if environment.launched_by != "alone" and len(names) != environment.local_world_size:
            raise ConfigError(
                f"devices is {devices!r}, which is for {len(names)} ranks, but "
                f"{environment.launched_by} has started {environment.local_world_size} on this "
                "host; leave devices out, or start as many ranks as it names"
            )
        names = names[environment.local_rank :]
    device = torch.device(names[0])
    kind_of(device).select(device)
    return device


def deal_devices(
    devices: Devices, environment: DistributedTrainConfig, number: int = 1
) -> tuple[str, ...]:
    """Distribute a host's devices of a kind over its processes, in the order of local ranks.

    Args:
        devices: See ``devices_of_host``.
        environment: The place of this process.
        number: How many this process needs.

    Returns:
        Those of this process; empty if ``devices`` is not a kind.

    Raises:
        ConfigError: There are too few.
    """
    counts = count_accelerators()
    wanted = environment.backend.value if devices == "auto" else str(devices)
    if isinstance(devices, Sequence) and not isinstance(devices, str):
        return ()
    if wanted not in (*DistributedBackend, *counts):
        return ()
    kind = next(iter(counts), "cpu") if wanted in ("auto", "accelerator") else wanted
    count = counts.get(kind, 0)
    needed = range(environment.local_rank * number, (environment.local_rank + 1) * number)
    if environment.launched_by == "slurm" and count:
        # If SLURM has bound a task to devices, it finds only those, numbered from 0.
        return tuple(f"{kind}:{n % count}" for n in needed)
    if wanted not in ("auto", "cpu") and needed[-1] >= count:
        source = "backend" if wanted == environment.backend else "devices"
        raise ConfigError(
            f"{source} is {wanted!r}, but local rank {environment.local_rank} finds "
            f"{_found_here(counts)} where it needs {wanted}:{needed[-1]}; start at most one rank "
            f"per device, or let {source} be 'auto'"
        )
    return tuple(f"{kind}:{n}" if n < count else "cpu" for n in needed)
