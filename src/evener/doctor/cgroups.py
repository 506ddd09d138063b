"""Limits of the control group of this process, in either version of Linux's interface."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from evener.files import read_file

_MOST_BYTES = 1 << 16
_NO_LIMIT = 1 << 60  # version 1 writes the largest multiple of a page


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLimits:
    """The tightest limits of a process's control group and those around it.

    Attributes:
        cpus: CPUs' worth of time; ``None`` without a limit, as for the others.
        memory_bytes: Memory.
        free_bytes: What is left of it.
        processes: Processes and threads.
    """

    cpus: float | None = None
    memory_bytes: int | None = None
    free_bytes: int | None = None
    processes: int | None = None


def read_group_limits(root: Path = Path("/")) -> GroupLimits:
    """Return the limits; without any where there are no control groups.

    Args:
        root: Where ``proc`` and ``sys`` are.
    """
    groups = list(_groups(root))
    memory = [(most, most - used) for group in groups for most, used in _memory(group)]
    cpus = [n for group in groups if (n := _cpus(group)) is not None]
    processes = [n for group in groups if (n := _number(group / "pids.max")) is not None]
    return GroupLimits(
        cpus=min(cpus, default=None),
        memory_bytes=min((most for most, _ in memory), default=None),
        free_bytes=min((max(0, free) for _, free in memory), default=None),
        processes=min(processes, default=None),
    )


def _groups(root: Path) -> Iterator[Path]:
    """Return the folders that may limit this process, from its own group up to the top."""
    top = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        # Version 2 has one tree, version 1 one for each controller; hybrids have it in a folder.
        trees = [top / name for name in controllers.split(",")] if controllers else [top]
        own = PurePosixPath(path.lstrip("/"))
        for tree in trees:
            # A container may see its own group as the top, though its path is that of the host.
            for group in dict.fromkeys((own, *own.parents, PurePosixPath())):
                yield tree / group


def _cpus(group: Path) -> float | None:
    quota, _, period = _read(group / "cpu.max").strip().partition(" ")
    if not quota:
        quota = _read(group / "cpu.cfs_quota_us").strip()
        period = _read(group / "cpu.cfs_period_us").strip()
    with suppress(ValueError, ZeroDivisionError):
        cpus = int(quota) / int(period)
        return cpus if cpus > 0 else None  # -1 is no limit
    return None


def _memory(group: Path) -> Iterator[tuple[int, int]]:
    for limit, usage in (
        ("memory.max", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        most = _number(group / limit)
        if most is not None and most < _NO_LIMIT:
            # Files that were read count as usage, and make room when a process needs memory.
            stat = dict(line.split()[:2] for line in _read(group / "memory.stat").splitlines())
            cached = int(stat.get("total_inactive_file") or stat.get("inactive_file") or 0)
            yield most, (_number(group / usage) or 0) - cached


def _number(path: Path) -> int | None:
    with suppress(ValueError):
        return int(_read(path))  # "max" is no limit
    return None


def _read(path: Path) -> str:
    with suppress(OSError, ValueError):
        return read_file(path, most_bytes=_MOST_BYTES).decode()
    return ""
