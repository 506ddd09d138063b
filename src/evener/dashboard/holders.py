"""Which process writes to a run folder, and how it is asked to stop."""

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

import psutil

from evener.config.folders import EVENTS
from evener.errors import UsageError
from evener.team.child import PARENT_PID

_LOCKS: Final = Path("/proc/locks")


def find_holder(folder: Path) -> int | None:
    """Return the number of the process that has a run folder in use; ``None`` if none is seen.

    A run locks its event file (``config.folders.FolderLock``), and the kernel tells who holds
    the lock. So this is never the number of another process that came later. Processes on other
    machines, and those in other containers, are not seen.
    """
    if sys.platform != "linux":
        return None
    path = folder / EVENTS
    try:
        inode = path.stat().st_ino
        locks = _LOCKS.read_text()
    except OSError:
        return None
    for line in locks.splitlines():
        words = line.split()
        is_exclusive = words[1:2] == ["FLOCK"] and words[3:4] == ["WRITE"] and len(words) >= 6
        if is_exclusive and words[5].endswith(f":{inode}"):
            pid = int(words[4])
            if pid > 0 and _has_open(pid, path):
                return pid
    return None


def ask_to_stop(folder: Path) -> str:
    """Ask the run of a folder to stop with a checkpoint, as Ctrl-C in its terminal does.

    Returns:
        What has been done, for people.

    Raises:
        UsageError: No process of this user on this machine has the folder in use.
    """
    pid = find_holder(folder)
    try:
        if pid is None:
            raise ProcessLookupError
        # The launcher passes it on to all ranks, and its exit code tells of it.
        asked = int(psutil.Process(pid).environ().get(PARENT_PID, pid))
        os.kill(asked, signal.SIGTERM)
    except (ProcessLookupError, PermissionError, ValueError, psutil.Error):
        raise UsageError(
            f"no process of this user on this machine is at work in {folder}: press Ctrl-C where "
            "the run was started"
        ) from None
    return f"asked process {asked} to stop; it saves a checkpoint first"


def _has_open(pid: int, path: Path) -> bool:
    """Return whether a process has a file open: inodes alone are not unique over file systems."""
    with suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                if link.samefile(path):
                    return True
    return False
