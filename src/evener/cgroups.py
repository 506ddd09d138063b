"""Limits of the control groups of this process, by version 2 of Linux's interface."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLimits:
    """The tightest limits of a process's control group and those around it.

    Attributes:
        cpus: CPUs' worth of time; ``None`` without a limit, as for the others.
        free_bytes: What is left of the memory.
        processes: Processes and threads.
    """

    cpus: float | None = None
    free_bytes: int | None = None
    processes: int | None = None


def read_group_limits(root: Path = Path("/")) -> GroupLimits:
    """Return the limits, which are empty on a system that has no control groups.

    Args:
        root: Where ``proc`` and ``sys`` are.
    """
    own = PurePosixPath(_read(root / "proc/self/cgroup").rpartition("0::/")[2].strip())
    # In a container the path may be that of the host, while its own group is seen as the top.
    groups = [root / "sys/fs/cgroup" / group for group in (own, *own.parents)]
    cpus, free, processes = [], [], []
    for group in groups:
        with suppress(ValueError, ZeroDivisionError):  # "max" means no limit
            quota, period = map(int, _read(group / "cpu.max").split())
            cpus.append(quota / period)
        with suppress(ValueError):
            stat = dict(line.split() for line in _read(group / "memory.stat").splitlines())
            # Files that were read count as usage, and make room when a process needs memory.
            used = int(_read(group / "memory.current")) - int(stat.get("inactive_file", 0))
            free.append(max(0, int(_read(group / "memory.max")) - used))
        with suppress(ValueError):
            processes.append(int(_read(group / "pids.max")))
    return GroupLimits(
        cpus=min(cpus, default=None),
        free_bytes=min(free, default=None),
        processes=min(processes, default=None),
    )


def _read(path: Path) -> str:
    with suppress(OSError, ValueError):
        return path.read_text()
    return ""
