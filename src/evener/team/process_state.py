"""What the kernel says of a process: whether it runs, was stopped, or has gone."""

import time
from enum import StrEnum
from pathlib import Path
from typing import Final


class KernelState(StrEnum):
    """What the kernel says of a process, as far as others have to know it."""

    RUNNING = "running"
    """It runs or sleeps, or nobody can tell."""
    STOPPED = "stopped"
    TRACED = "held by a debugger"
    GONE = "gone"

    @property
    def is_halted(self) -> bool:
        """Whether it does nothing until it is continued."""
        return self in (KernelState.STOPPED, KernelState.TRACED)


_LETTERS: Final = {
    b"T": KernelState.STOPPED,
    b"t": KernelState.TRACED,
    b"Z": KernelState.GONE,
    b"X": KernelState.GONE,
}
_PROC = Path("/proc")


def state_of(pid: int) -> KernelState:
    """Return the state of a process of this host, by the letter in ``/proc/PID/stat``."""
    try:
        # The name of the program comes before, in parentheses, and may hold any character.
        rest = (_PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return KernelState.GONE if (_PROC / "self").exists() else KernelState.RUNNING
    except OSError:  # such as no descriptor left
        return KernelState.RUNNING
    return _LETTERS.get(rest[0], KernelState.RUNNING)


def program_of(pid: int) -> str:
    """Return what tells the program that a process runs from any that it becomes by ``exec``.

    The kernel draws new addresses of the auxiliary vector for each program, so even the same
    command differs from the one before.

    Returns:
        Empty if the process is ending, if it may not be read, or without ``/proc``.
    """
    try:
        return (_PROC / str(pid) / "auxv").read_bytes().hex()
    except OSError:
        return ""


def describe_halt(who: str, pid: int, state: KernelState, since: float, waiting: str) -> str:
    """Say that a process is halted, who waits for it, and what continues it.

    Args:
        who: The rank, in words.
        pid: Its process.
        state: ``STOPPED`` or ``TRACED``.
        since: Unix seconds at which this was seen first.
        waiting: Who waits for it, such as ``"rank 0 waits for it"``.
    """
    remedy = f"`kill -CONT {pid}` continues it"
    if state is KernelState.TRACED:
        remedy = "let the debugger continue it, or detach it"
    return f"evener: {who} is {state} since {clock_time(since)}, and {waiting}; {remedy}"


def clock_time(unix_s: float) -> str:
    """Return a moment as people of this host read it, such as ``14:03:22``."""
    return time.strftime("%H:%M:%S", time.localtime(unix_s))
