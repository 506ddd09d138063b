"""Makes processes slow by a quota of processor time, as a cgroup of Linux gives it; needs root.

The whole process is throttled, threads that exchange gradients too: nearer to a slow device than
sleeping in proportion to what was computed. Version 1 and version 2 of cgroups are known.
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

MOUNT = Path("/sys/fs/cgroup")
#: A rank may run for its part of each such period. Short, so that a step has many of them.
PERIOD_US = 30_000
#: The least that the kernel takes as a quota.
LEAST_US = 1_000
#: Processes that have just ended may still be in their group.
PATIENCE_S = 5.0

_GROUPS = "EVENER_BENCHMARK_CGROUPS"


def why_not() -> str:
    """Why this process cannot set quotas; empty where it can."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "only root may set quotas of processor time"
    if _version() == 0:
        return f"no cgroup with a quota of processor time is mounted below {MOUNT}"
    try:
        with Quotas([0.5]):
            return ""
    except OSError as error:
        return f"a cgroup with a quota cannot be made here ({error})"


class Quotas:
    """A group for each rank that is slower than 1, while the ``with`` block lasts.

    Ranks that are started inside find their group by ``join``.

    Args:
        speeds: Of each rank: the part of one core that it may use.
    """

    def __init__(self, speeds: Sequence[float]) -> None:
        self._speeds = list(speeds)
        self._groups: list[Path | None] = []

    def __enter__(self) -> Self:
        try:
            for rank, speed in enumerate(self._speeds):
                self._groups.append(_make(rank, speed) if speed < 1 else None)
        except OSError:
            self._remove()
            raise
        os.environ[_GROUPS] = os.pathsep.join(str(group or "") for group in self._groups)
        return self

    def __exit__(self, *_: object) -> None:
        del os.environ[_GROUPS]
        self._remove()

    def _remove(self) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        for group in self._groups:
            while group is not None and group.exists():
                try:
                    group.rmdir()
                except OSError:
                    if time.monotonic() > deadline_s:
                        raise
                    time.sleep(0.05)


def join(rank: int) -> None:
    """Puts this process under the quota of its rank, if there is one."""
    groups = os.environ.get(_GROUPS, "").split(os.pathsep)
    if rank < len(groups) and groups[rank]:
        (Path(groups[rank]) / "cgroup.procs").write_text(str(os.getpid()))


def _version() -> int:
    if (MOUNT / "cpu" / "cpu.cfs_quota_us").exists() or (MOUNT / "cpu" / "cgroup.procs").exists():
        return 1
    controllers = MOUNT / "cgroup.controllers"
    return 2 if controllers.exists() and "cpu" in controllers.read_text().split() else 0


def _make(rank: int, speed: float) -> Path:
    period_us = max(PERIOD_US, round(LEAST_US / speed))
    quota_us = round(period_us * speed)
    name = f"evener-benchmark-{os.getpid()}-{rank}"
    if _version() == 1:
        group = MOUNT / "cpu" / name
        group.mkdir()
        (group / "cpu.cfs_period_us").write_text(str(period_us))
        (group / "cpu.cfs_quota_us").write_text(str(quota_us))
        return group
    handed_down = MOUNT / "cgroup.subtree_control"
    if "cpu" not in handed_down.read_text().split():
        handed_down.write_text("+cpu")
    group = MOUNT / name
    group.mkdir()
    (group / "cpu.max").write_text(f"{quota_us} {period_us}")
    return group
