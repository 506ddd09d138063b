"""Find the process that has locked a run folder, and ask it to stop."""

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

import psutil

from evener.config.folders import EVENTS
from evener.errors import UsageError
from evener.team.child import PARENT_PID

_LOCKS: Final = Path("/proc/locks")


def find_lock_owner(folder: Path) -> int | None:
    """Return the id of the process that has locked a run folder; ``None`` if none is found.

    A run locks its event file (``config.folders.FolderLock``), and the kernel lists the owner of
    each lock. So this is never the id of another process that started later. Processes on other
    machines and in other containers are not found.
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
    """Ask the run of a folder to save a checkpoint and stop, as Ctrl-C in its terminal does.

    Returns:
        A message for the user: which process was asked.

    Raises:
        UsageError: No process of this user on this machine has locked the folder, or the launcher
            that it names did not start it.
    """
    pid = find_lock_owner(folder)
    try:
        if pid is None:
            raise ProcessLookupError
        asked = _starter_of(psutil.Process(pid), folder)
        asked.terminate()
    except (ProcessLookupError, psutil.Error):
        raise UsageError(
            f"no process of this user on this machine has locked {folder}: press Ctrl-C in the "
            "terminal in which the run was started"
        ) from None
    return f"asked process {asked.pid} to stop; it saves a checkpoint first"


def _starter_of(owner: psutil.Process, folder: Path) -> psutil.Process:
    """Return the launcher of a process, which passes signals on to all ranks.

    Without a launcher, return the process itself. Any program can lock a run folder and name any
    process as its launcher, so the name is checked.
    """
    named = owner.environ().get(PARENT_PID, str(owner.pid))
    family = [owner, *owner.parents()]
    found = next((one for one in family if str(one.pid) == named), None)
    if found is None or {one.uids().real for one in (owner, found)} != {os.getuid()}:
        raise UsageError(
            f"process {owner.pid}, which has {folder} in use, names process {named!r} as its "
            "launcher, which did not start it or belongs to another user: no signal was sent; "
            "press Ctrl-C in the terminal in which the run was started"
        )
    return found


def _has_open(pid: int, path: Path) -> bool:
    """Return whether a process has a file open: two file systems may have the same inode."""
    with suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                if link.samefile(path):
                    return True
    return False
