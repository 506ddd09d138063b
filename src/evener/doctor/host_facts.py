"""Facts about a host, and about the link to another: plain values, as in the JSON.

``None`` means unknown, or a limit that is not set. A field whose name ends in ``failure`` holds the
reason why something does not work, and is empty where it works.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """A device that torch finds.

    Attributes:
        name: Torch's name for it, such as ``cuda:0``.
        model: What it is, for people.
        memory_bytes: Its memory, or that of the host for the CPU; 0 where torch cannot tell.
        architecture: What kernels are compiled for, such as ``sm_61`` or ``gfx1030``; empty where
            torch does not tell.
        failure: Why a small computation does not work there.
    """

    name: str
    model: str
    memory_bytes: int
    architecture: str = ""
    failure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchBuild:
    """What the installed torch was built for.

    Attributes:
        runtime: ``CUDA 12.8`` or ``ROCm 6.4``; empty for a build without either.
        architectures: Architectures of GPUs for which it holds kernels.
        nccl: Version of NCCL or RCCL, such as ``2.29``; empty where there is none to be used.
    """

    runtime: str = ""
    architectures: tuple[str, ...] = ()
    nccl: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeTrials:
    """Ways to exchange, as they were tried.

    Attributes:
        gloo_failure: Two ranks of this process exchanged over loopback.
        nccl_failure: A rank for each GPU exchanged, in processes of their own; empty, too, where
            there are fewer than two GPUs.
        nccl_tried: Whether there were GPUs to try it on.
        memory_failure: Processes of one user can share memory that has no name.
        shm_bytes: Size of ``/dev/shm``, through which workers of a ``DataLoader`` hand over
            samples.
    """

    gloo_failure: str = ""
    nccl_failure: str = ""
    nccl_tried: bool = False
    memory_failure: str = ""
    shm_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkFacts:
    """How this host is reached.

    Attributes:
        loopback_failure: A connection to 127.0.0.1.
        addresses: IP addresses of its interfaces, without loopback.
        port: Where machines meet unless told otherwise.
        port_failure: Listening on that port.
        infiniband: Its InfiniBand devices.
    """

    loopback_failure: str = ""
    addresses: tuple[str, ...] = ()
    port: int
    port_failure: str = ""
    infiniband: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitFacts:
    """What a process of this user may use.

    Attributes:
        open_files: Descriptors of a process.
        processes: Processes and threads of the user, or of its control group.
        locked_bytes: Memory that cannot be swapped.
        memory_bytes: Memory of its control group.
        cpus: CPUs' worth of time of its control group.
    """

    open_files: int | None = None
    processes: int | None = None
    locked_bytes: int | None = None
    memory_bytes: int | None = None
    cpus: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorFacts:
    """Cores and memory of the host.

    Attributes:
        cores: Cores of the machine, as the system counts them.
        usable_cores: Those on which this process may run.
        threads: Threads with which torch computes in one process.
        memory_bytes: Memory of the machine.
        free_bytes: What a new process can have of it, the limit of its control group included.
        swapped_bytes: What the system has moved to disk.
    """

    cores: int
    usable_cores: int
    threads: int
    memory_bytes: int
    free_bytes: int
    swapped_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """A host, as ``evener doctor`` finds it.

    Attributes:
        host: Its name.
        system: Operating system and processor architecture.
        versions: Of Python, torch and evener.
        extras: By extra of evener: the packages it asks for, and their versions; an empty version
            for one that is not installed.
        devices: The CPU, then accelerators.
        devices_shown: Accelerators that device files and ``CUDA_VISIBLE_DEVICES`` show.
        build: What torch was built for.
        exchange: Ways to exchange.
        network: How it is reached.
        limits: What processes may use.
        processor: Cores and memory.
        clock_is_set: Whether the system keeps its clock right over the network.
    """

    host: str
    system: str
    versions: Mapping[str, str]
    extras: Mapping[str, Mapping[str, str]]
    devices: tuple[DeviceFacts, ...]
    devices_shown: int
    build: TorchBuild
    exchange: ExchangeTrials
    network: NetworkFacts
    limits: LimitFacts
    processor: ProcessorFacts
    clock_is_set: bool | None = None

    @property
    def accelerators(self) -> tuple[DeviceFacts, ...]:
        """Return the devices other than the CPU."""
        return tuple(device for device in self.devices if device.name != "cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLink:
    """The link to another host, as a short transfer showed it.

    Attributes:
        round_trip_s: Median seconds of a small message there and back.
        bytes_per_s_there: What arrived there, per second.
        bytes_per_s_here: What arrived here, per second.
        clock_ahead_s: Seconds by which the clock there is ahead of the one here.
        clock_error_s: How wrong that may be: half of the shortest round trip.
        return_failure: Why a connection from there to here did not succeed.
    """

    round_trip_s: float
    bytes_per_s_there: float
    bytes_per_s_here: float
    clock_ahead_s: float
    clock_error_s: float
    return_failure: str = ""
