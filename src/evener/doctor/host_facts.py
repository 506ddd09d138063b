"""Facts about a host, and about the link to another: plain values, as in the JSON.

``None`` means unknown, or a limit that is not set. A field whose name ends in ``failure`` holds the
reason why something does not work, and is empty if it works.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """A device that torch finds.

    Attributes:
        name: Torch's name for it, such as ``cuda:0``.
        model: Its model, as text.
        memory_bytes: Its memory, or that of the host for the CPU; 0 if unknown.
        architecture: What kernels are compiled for, such as ``sm_61`` or ``gfx1030``; empty if
            unknown.
        failure: Why a small computation does not work there.
    """

    name: str
    model: str
    memory_bytes: int
    architecture: str = ""
    failure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeTrials:
    """Ways to exchange on this host, as two or more ranks tried them.

    Attributes:
        gloo_failure: Over Gloo and loopback.
        memory_failure: Through shared memory that has no name.
        nccl_failure: Over NCCL, with a rank for each GPU; empty, too, if that was not tried.
        nccl_tried: Whether there were two GPUs or more, all of which work.
    """

    gloo_failure: str = ""
    memory_failure: str = ""
    nccl_failure: str = ""
    nccl_tried: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """A host, as ``evener doctor`` finds it.

    Attributes:
        host: Its name.
        system: Operating system and processor architecture.
        versions: Of Python, torch and evener.
        devices: The CPU, then accelerators.
        devices_shown: Accelerators that device files and ``CUDA_VISIBLE_DEVICES`` show.
        runtime: Runtime that torch was built for, ``CUDA 12.8`` or ``ROCm 6.4``; empty for none.
        architectures: Architectures of GPUs for which torch holds kernels.
        nccl: Version of NCCL or RCCL, such as ``2.29``; empty without one.
        exchange: Ways to exchange.
        addresses: IP addresses of its interfaces, without loopback.
        open_files: Most descriptors of a process.
        processes: Most processes and threads of the user, or of its control group.
        cpus: CPUs' worth of time of its control group.
        shm_bytes: Size of ``/dev/shm``, through which workers of a ``DataLoader`` pass samples.
        cores: Cores of the machine, as the system counts them.
        usable_cores: Cores on which this process may run.
        memory_bytes: Memory of the machine.
        free_bytes: Memory that a new process can use, within the limit of its control group.
    """

    host: str
    system: str
    versions: Mapping[str, str]
    devices: tuple[DeviceFacts, ...]
    devices_shown: int
    runtime: str = ""
    architectures: tuple[str, ...] = ()
    nccl: str = ""
    exchange: ExchangeTrials
    addresses: tuple[str, ...]
    open_files: int | None = None
    processes: int | None = None
    cpus: float | None = None
    shm_bytes: int | None = None
    cores: int
    usable_cores: int
    memory_bytes: int
    free_bytes: int

    @property
    def accelerators(self) -> tuple[DeviceFacts, ...]:
        """Return the devices other than the CPU."""
        return tuple(device for device in self.devices if device.name != "cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLink:
    """The link to another host, as a team of two ranks exchanges over it.

    Attributes:
        backend: How they exchange: ``"gloo"``, ``"nccl"``, or ``"shared"`` on one host.
        reason: Why this backend was chosen.
        row_s: Median seconds until both have the other's row.
        bytes_per_s_there: Bytes per second of a broadcast from here to there.
        bytes_per_s_here: The same in the other direction.
    """

    backend: str
    reason: str
    row_s: float
    bytes_per_s_there: float
    bytes_per_s_here: float
