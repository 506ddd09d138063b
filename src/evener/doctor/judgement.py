"""Judge facts: problems of a host, a link or two hosts, with remedies. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from evener.doctor.host_facts import DeviceFacts, HostFacts, MeasuredLink

_FEWEST_FILES: Final = 1024
_FEWEST_PROCESSES: Final = 512
_LEAST_SHM: Final = 256 << 20  # containers have 64 MiB by default
_LEAST_MEMORY: Final = 1 << 30
_LONGEST_ROW_S: Final = 0.005
_LEAST_BYTES_PER_S: Final = 50e6  # below half of a gigabit link


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that prevents a run from starting, or slows it down.

    Attributes:
        where: ``here``, ``there`` or ``between`` the two.
        what: What is wrong, with the value.
        remedy: What to do.
    """

    where: Literal["here", "there", "between"]
    what: str
    remedy: str


_Finding = tuple[str, str]


def judge_host(facts: HostFacts, where: Literal["here", "there"] = "here") -> list[Problem]:
    """Return the problems of a host.

    Args:
        facts: The facts of the host.
        where: Which host it is.
    """
    return [Problem(where, what, remedy) for what, remedy in _judge_host(facts)]


def judge_pair(here: HostFacts, there: HostFacts, link: MeasuredLink) -> list[Problem]:
    """Return problems that prevent two hosts from training together, or slow it down."""
    findings = _judge_pair(here, there, link)
    return [Problem("between", what, remedy) for what, remedy in findings]


def has_kernels(architecture: str, built_for: tuple[str, ...]) -> bool:
    """Return whether a build of torch can compute on GPUs of an architecture.

    A kernel for CUDA's ``sm_80`` runs on every 8.x from 8.0 on. ``compute_80`` is translated by the
    driver for anything newer. Names with a letter at their end (``sm_90a``) are for that
    architecture only. ROCm's kernels run only on the architecture that they were compiled for.

    Args:
        architecture: Such as ``sm_61`` or ``gfx1030``.
        built_for: The architectures of the build.
    """
    if architecture in built_for:
        return True
    number = architecture.removeprefix("sm_")
    if number == architecture or not number.isdecimal():
        return False
    own = int(number)
    for name in built_for:
        kind, _, other = name.partition("_")
        if not other.isdecimal() or int(other) > own:
            continue
        if kind == "compute" or (kind == "sm" and int(other) // 10 == own // 10):
            return True
    return False


# ── one host ─────────────────────────────────────────────────────────────────────────────────────


def _judge_host(facts: HostFacts) -> Iterator[_Finding]:
    shown, found = facts.devices_shown, len(facts.accelerators)
    if shown > found and not facts.runtime:
        yield (
            f"the system shows {shown} GPUs, but torch was built without CUDA and ROCm",
            "install the build for your GPUs (https://pytorch.org/get-started/locally)",
        )
    elif shown > found:
        yield (
            f"the system or CUDA_VISIBLE_DEVICES shows {shown} GPUs, but torch finds {found}",
            "see nvidia-smi or rocminfo: the driver may be too old, not loaded or not visible here",
        )
    for device in facts.devices:
        yield from _judge_device(device, facts)
    trials = facts.exchange
    if trials.gloo_failure:
        yield (
            f"two ranks cannot exchange over Gloo: {trials.gloo_failure}",
            "allow connections to 127.0.0.1; GLOO_SOCKET_IFNAME may name an interface of this host",
        )
    num_cuda = sum(device.name.startswith("cuda") for device in facts.devices)
    if num_cuda > 1 and not facts.nccl:
        yield (
            f"{num_cuda} GPUs, but torch was built without NCCL: they exchange through host memory",
            "install another build of torch",
        )
    if trials.nccl_failure:
        yield (
            f"the GPUs cannot exchange over NCCL: {trials.nccl_failure}",
            "NCCL_DEBUG=INFO shows details; if copies between cards are blocked, "
            "NCCL_P2P_DISABLE=1 helps",
        )
    if trials.memory_failure:
        yield (
            f"ranks cannot share memory, and exchange through sockets: {trials.memory_failure}",
            "let the sandbox allow memfd_create, abstract Unix sockets and passing descriptors",
        )
    if facts.open_files is not None and facts.open_files < _FEWEST_FILES:
        yield (
            f"a process may have {facts.open_files} open files; a rank needs several for each peer",
            "ulimit -n 4096 (or LimitNOFILE=, docker run --ulimit nofile=4096)",
        )
    if facts.processes is not None and facts.processes < _FEWEST_PROCESSES:
        yield (
            f"{facts.processes} processes and threads are allowed; a rank may start a hundred",
            "ulimit -u 4096 (or TasksMax=, docker run --pids-limit=4096)",
        )
    if facts.shm_bytes is not None and facts.shm_bytes < _LEAST_SHM:
        yield (
            f"/dev/shm has {_mebibytes(facts.shm_bytes)}: workers of a DataLoader may fill it",
            "docker run --shm-size=8g (or --ipc=host), or num_workers=0",
        )
    if facts.cpus is not None and facts.cpus < facts.usable_cores - 0.5:
        most = max(1, int(facts.cpus))
        yield (
            f"the control group grants {facts.cpus:g} CPUs, but ranks see {facts.usable_cores} "
            "cores, and start a thread for each",
            f"OMP_NUM_THREADS={most} divided by the ranks of this host, or docker run "
            f"--cpuset-cpus=0-{most - 1}",
        )
    if facts.free_bytes < _LEAST_MEMORY:
        yield (
            f"{_mebibytes(facts.free_bytes)} of memory are free; a rank needs half a gigabyte",
            "end other programs, or give the container more memory",
        )


def _judge_device(device: DeviceFacts, facts: HostFacts) -> Iterator[_Finding]:
    built_for = facts.architectures
    if device.architecture and built_for and not has_kernels(device.architecture, built_for):
        yield (
            f"torch has no kernels for {device.name} ({device.model}, {device.architecture}); it "
            f"was built for {', '.join(built_for)}",
            f"install a build of torch whose list has {device.architecture}, or leave the device "
            "out with devices=... or CUDA_VISIBLE_DEVICES",
        )
    elif device.failure:
        yield (
            f"{device.name} ({device.model}) does not work: {device.failure}",
            "end other programs on the device, fix its driver, or leave it out with devices=...",
        )


# ── two hosts ────────────────────────────────────────────────────────────────────────────────────


def _judge_pair(here: HostFacts, there: HostFacts, link: MeasuredLink) -> Iterator[_Finding]:
    mine, theirs = here.versions["torch"], there.versions["torch"]
    if mine != theirs:
        yield (
            f"torch is {mine} here and {theirs} there; a team refuses such ranks",
            "install the same version of torch on both",
        )
    if here.nccl and there.nccl and link.backend == "gloo":
        yield (
            f"both have GPUs, but exchange through host memory, which is slower: {link.reason}",
            "install the same build of torch on both; NCCL_DEBUG=INFO shows details, and "
            "NCCL_SOCKET_IFNAME names the network that NCCL uses",
        )
    slowest = min(link.bytes_per_s_there, link.bytes_per_s_here)
    if slowest < _LEAST_BYTES_PER_S:
        yield (
            f"the link carries {8e-6 * slowest:,.0f} Mbit/s in its slower direction: the gradients "
            f"of 100M parameters take {4e8 / max(1.0, slowest):,.0f} s in each window of SYNC",
            "use a faster interface, or policy='cadence', which exchanges less often",
        )
    if link.row_s > _LONGEST_ROW_S:
        yield (
            f"a row takes {1e3 * link.row_s:.0f} ms, and each window of SYNC waits for several",
            "use policy='cadence' or 'async', or a larger batch_size",
        )


def _mebibytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"
