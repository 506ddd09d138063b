"""Collect facts about a host, by reading and by trying; no judgement."""

import ctypes
import importlib.metadata
import os
import platform
import re
import shutil
import socket
import sys
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Final

import psutil
import torch

from evener.comm.c10d import nccl_version
from evener.comm.messages import first_line
from evener.devices import count_accelerators, kind_of
from evener.doctor.cgroups import GroupLimits, read_group_limits
from evener.doctor.host_facts import (
    DeviceFacts,
    ExchangeTrials,
    HostFacts,
    LimitFacts,
    NetworkFacts,
    ProcessorFacts,
    TorchBuild,
)
from evener.doctor.trials import try_gloo, try_loopback, try_nccl, try_port, try_shared_memory
from evener.team.host import available_cores, local_devices
from evener.team.members import own_versions
from evener.team.nodes import DEFAULT_PORT

if sys.platform != "win32":
    import resource

_NCCL_S: Final = 120.0
_INFINIBAND: Final = Path("/sys/class/infiniband")
#: Extras that only those need who work on evener.
_OF_DEVELOPERS: Final = ("browser", "dev")
_REQUIREMENT: Final = re.compile(r"([\w.-]+).*extra == ['\"]([\w-]+)['\"]")


def examine_host() -> HostFacts:
    """Return what this host is like; it takes seconds, and a minute where NCCL is tried."""
    group = read_group_limits()
    accelerators = [
        torch.device(name, number)
        for name, count in count_accelerators().items()
        for number in range(count)
    ]
    devices = tuple(_examine_device(device) for device in [torch.device("cpu"), *accelerators])
    return HostFacts(
        host=socket.gethostname(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        versions=own_versions(),
        extras=_extras(),
        devices=devices,
        devices_shown=local_devices(ask_torch=lambda: len(accelerators)),
        build=_build(accelerators),
        exchange=_try_exchanges([d for d in accelerators if d.type == "cuda"], devices),
        network=_network(),
        limits=_limits(group),
        processor=_processor(group),
        clock_is_set=_clock_is_set(),
    )


def _examine_device(device: torch.device) -> DeviceFacts:
    kind = kind_of(device)
    model, memory_bytes, architecture, failure = device.type, 0, "", ""
    try:
        model, memory_bytes = kind.describe(device)
        architecture = kind.architecture(device)
        total = float(torch.ones(64, device=device).sum())
        failure = "" if total == 64 else f"the sum of 64 ones is {total:g}"
    except RuntimeError as error:  # without kernels for it, free memory, or a driver that fits
        failure = first_line(error)
    return DeviceFacts(
        name=str(device),
        model=model,
        memory_bytes=memory_bytes,
        architecture=architecture,
        failure=failure,
    )


def _build(accelerators: list[torch.device]) -> TorchBuild:
    runtime = ""
    if torch.version.hip:
        runtime = f"ROCm {torch.version.hip}"
    elif torch.version.cuda:
        runtime = f"CUDA {torch.version.cuda}"
    has_cuda = any(device.type == "cuda" for device in accelerators)
    return TorchBuild(
        runtime=runtime,
        architectures=tuple(torch.cuda.get_arch_list()) if has_cuda else (),
        nccl=nccl_version() if has_cuda else "",
    )


def _try_exchanges(gpus: list[torch.device], devices: tuple[DeviceFacts, ...]) -> ExchangeTrials:
    # If a card does not compute alone, report that problem, and not NCCL.
    tries_nccl = len(gpus) > 1 and not any(d.failure for d in devices) and bool(nccl_version())
    shm = Path("/dev/shm")
    return ExchangeTrials(
        gloo_failure=try_gloo(),
        nccl_failure=_try_nccl(gpus) if tries_nccl else "",
        nccl_tried=tries_nccl,
        memory_failure=try_shared_memory(),
        shm_bytes=shutil.disk_usage(shm).total if shm.is_dir() else None,
    )


def _try_nccl(gpus: list[torch.device]) -> str:
    return try_nccl(gpus, timeout_s=_NCCL_S)


def _network() -> NetworkFacts:
    found = [one.address for each in psutil.net_if_addrs().values() for one in each]
    addresses = []
    for address in found:
        with suppress(ValueError):  # of a network card, not of a host
            number = ip_address(address.partition("%")[0])
            if not (number.is_loopback or number.is_link_local):
                addresses.append(str(number))
    infiniband = sorted(path.name for path in _INFINIBAND.iterdir()) if _INFINIBAND.is_dir() else []
    return NetworkFacts(
        loopback_failure=try_loopback(),
        addresses=tuple(dict.fromkeys(addresses)),
        port=DEFAULT_PORT,
        port_failure=try_port(DEFAULT_PORT),
        infiniband=tuple(infiniband),
    )


def _limits(group: GroupLimits) -> LimitFacts:
    files, processes, locked = None, None, None
    if sys.platform != "win32":
        files = _soft_limit(resource.RLIMIT_NOFILE)
        processes = _soft_limit(resource.RLIMIT_NPROC)
        locked = _soft_limit(resource.RLIMIT_MEMLOCK)
    counts = [limit for limit in (processes, group.processes) if limit is not None]
    return LimitFacts(
        open_files=files,
        processes=min(counts, default=None),
        locked_bytes=locked,
        memory_bytes=group.memory_bytes,
        cpus=group.cpus,
    )


def _soft_limit(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def _processor(group: GroupLimits) -> ProcessorFacts:
    memory = psutil.virtual_memory()
    free = memory.available
    return ProcessorFacts(
        cores=os.cpu_count() or 1,
        usable_cores=available_cores(),
        threads=torch.get_num_threads(),
        memory_bytes=memory.total,
        free_bytes=free if group.free_bytes is None else min(free, group.free_bytes),
        swapped_bytes=psutil.swap_memory().used,
    )


def _extras() -> dict[str, dict[str, str]]:
    """Return the versions of the packages that each extra of evener needs."""
    extras: dict[str, dict[str, str]] = {}
    try:
        requirements = importlib.metadata.requires("evener") or []
    except importlib.metadata.PackageNotFoundError:  # run from its sources
        return {}
    for requirement in requirements:
        found = _REQUIREMENT.match(requirement)
        if found is None or found[2] in _OF_DEVELOPERS:
            continue
        version = ""
        with suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(found[1])
        extras.setdefault(found[2], {})[found[1]] = version
    return extras


def _clock_is_set() -> bool | None:
    """Return what the kernel knows of its clock; ``None`` where it cannot be asked."""
    if sys.platform != "linux":
        return None
    request = ctypes.create_string_buffer(512)  # larger than struct timex; zeros ask, and set none
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(request)
    except AttributeError:
        return None
    return state != 5 if state >= 0 else None  # TIME_ERROR: not synchronised
