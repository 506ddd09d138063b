"""Collect facts about a host, by reading and by trying; no judgement."""

import os
import platform
import shutil
import socket
import sys
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Final

import psutil
import torch

from evener.cgroups import read_group_limits
from evener.comm.c10d import nccl_version
from evener.comm.messages import first_line
from evener.devices import count_accelerators, kind_of
from evener.doctor.host_facts import DeviceFacts, ExchangeTrials, HostFacts
from evener.doctor.trials import try_exchange
from evener.team.host import available_cores, local_devices
from evener.team.members import own_versions

if sys.platform != "win32":
    import resource

_TRIALS_S: Final = 120.0
_SHM: Final = Path("/dev/shm")


def examine_host() -> HostFacts:
    """Return the facts of this host; it takes seconds, or a minute if NCCL is tried."""
    group = read_group_limits()
    accelerators = [
        torch.device(name, number)
        for name, count in count_accelerators().items()
        for number in range(count)
    ]
    devices = tuple(_examine_device(device) for device in [torch.device("cpu"), *accelerators])
    has_cuda = any(device.type == "cuda" for device in accelerators)
    memory, limits = psutil.virtual_memory(), [group.processes, _soft_limit("RLIMIT_NPROC")]
    return HostFacts(
        host=socket.gethostname(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        versions=own_versions(),
        devices=devices,
        devices_shown=local_devices(ask_torch=lambda: len(accelerators)),
        runtime=_runtime(),
        architectures=tuple(torch.cuda.get_arch_list()) if has_cuda else (),
        nccl=nccl_version() if has_cuda else "",
        exchange=_try_exchange([d for d in accelerators if d.type == "cuda"], devices),
        addresses=_addresses(),
        open_files=_soft_limit("RLIMIT_NOFILE"),
        processes=min((limit for limit in limits if limit is not None), default=None),
        cpus=group.cpus,
        shm_bytes=shutil.disk_usage(_SHM).total if _SHM.is_dir() else None,
        cores=os.cpu_count() or 1,
        usable_cores=available_cores(),
        memory_bytes=memory.total,
        free_bytes=kind_of(torch.device("cpu")).free_bytes(torch.device("cpu")),
    )


def _examine_device(device: torch.device) -> DeviceFacts:
    kind = kind_of(device)
    model, memory_bytes, architecture, failure = device.type, 0, "", ""
    try:
        model, memory_bytes = kind.describe(device)
        architecture = kind.architecture(device)
        total = float(torch.ones(64, device=device).sum())
        failure = "" if total == 64 else f"the sum of 64 ones is {total:g}"
    except RuntimeError as error:  # no kernels for it, no free memory, or no matching driver
        failure = first_line(error)
    return DeviceFacts(
        name=str(device),
        model=model,
        memory_bytes=memory_bytes,
        architecture=architecture,
        failure=failure,
    )


def _runtime() -> str:
    if torch.version.hip:
        return f"ROCm {torch.version.hip}"
    return f"CUDA {torch.version.cuda}" if torch.version.cuda else ""


def _try_exchange(gpus: list[torch.device], devices: tuple[DeviceFacts, ...]) -> ExchangeTrials:
    # If a card does not compute by itself, report that problem, and not NCCL.
    tries_nccl = len(gpus) > 1 and not any(d.failure for d in devices) and bool(nccl_version())
    return try_exchange(gpus if tries_nccl else [torch.device("cpu")] * 2, timeout_s=_TRIALS_S)


def _addresses() -> tuple[str, ...]:
    addresses = []
    for each in [one.address for found in psutil.net_if_addrs().values() for one in found]:
        with suppress(ValueError):  # an address of a network card, not of a host
            number = ip_address(each.partition("%")[0])
            if not (number.is_loopback or number.is_link_local):
                addresses.append(str(number))
    return tuple(dict.fromkeys(addresses))


def _soft_limit(name: str) -> int | None:
    if sys.platform == "win32":
        return None
    soft, _ = resource.getrlimit(getattr(resource, name))
    return None if soft == resource.RLIM_INFINITY else soft
