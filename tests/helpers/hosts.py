"""Facts about hosts that nobody has, for ``evener doctor``."""

from dataclasses import replace
from typing import Any

from evener.doctor.host_facts import DeviceFacts, ExchangeTrials, HostFacts, MeasuredLink

GIB = 1 << 30

HEALTHY = HostFacts(
    host="box",
    system="Linux 6.1 x86_64",
    versions={"python": "3.12.1", "torch": "2.9.0", "evener": "0.1.0"},
    devices=(
        DeviceFacts(name="cpu", model="Xeon", memory_bytes=64 * GIB),
        DeviceFacts(name="cuda:0", model="RTX 4090", memory_bytes=24 * GIB, architecture="sm_89"),
        DeviceFacts(name="cuda:1", model="GTX 1060", memory_bytes=6 * GIB, architecture="sm_61"),
    ),
    devices_shown=2,
    runtime="CUDA 12.6",
    architectures=("sm_50", "sm_60", "sm_80", "sm_90"),
    nccl="2.27",
    exchange=ExchangeTrials(nccl_tried=True),
    addresses=("10.0.0.1",),
    open_files=4096,
    processes=4096,
    shm_bytes=8 * GIB,
    cores=16,
    usable_cores=16,
    memory_bytes=64 * GIB,
    free_bytes=32 * GIB,
)

GOOD_LINK = MeasuredLink(
    backend="nccl",
    reason="chosen because every rank has its own GPU, all of one vendor",
    row_s=0.0002,
    bytes_per_s_there=1.1e8,
    bytes_per_s_here=1.1e8,
)


def host(**changes: Any) -> HostFacts:
    """The healthy host, with other facts."""
    return replace(HEALTHY, **changes)
