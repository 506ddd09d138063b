"""What to do where the system refuses a process, a thread, an open file or memory."""

import errno
import sys
from pathlib import Path
from typing import Final

from evener.files import read_file

if sys.platform != "win32":
    import resource  # at once: later there may be no descriptor left to open it

_NO_THREAD: Final = "can't start new thread"
"""Python's words for EAGAIN."""
_MOST_BYTES: Final = 1 << 16
# Part of the memory below which the kernel, or a service that guards it, may end processes.
_LOW: Final = 0.05


def remedy_of_shortage(error: BaseException) -> str:
    """Return what to do about an error if the system raised it because it had none left.

    Args:
        error: A ``BlockingIOError`` counts as the refusal of a process.

    Returns:
        Limit and remedy; empty for other errors.
    """
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, RuntimeError) and str(error) == _NO_THREAD:
        number = errno.EAGAIN
    if number == errno.EMFILE:
        return (
            f"a process may have {_limit('RLIMIT_NOFILE')} files and connections open (`ulimit "
            "-n`): raise that limit, or close what is no longer needed"
        )
    if number == errno.EAGAIN:
        return (
            f"this user may have {_limit('RLIMIT_NPROC')} processes and threads (`ulimit -u`), and "
            "a container or a SLURM job perhaps fewer: end some, or raise that limit"
        )
    if number == errno.ENFILE:
        return "the machine has no open files left (fs.file-max): end other programs"
    if number == errno.ENOMEM:
        return "no memory is left: end other programs, or start fewer ranks"
    return ""


def _limit(name: str) -> str:
    if sys.platform == "win32":
        return "a limited number of"
    most = resource.getrlimit(getattr(resource, name))[0]
    return "an unlimited number of" if most == resource.RLIM_INFINITY else str(most)


class MemoryWatch:
    """Tells whether memory was short when a process was killed.

    Args:
        root: Where ``proc`` is.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._kills = self._count_kills()
        self._is_low = False  # at the last look

    def look(self) -> bool:
        """Return whether little memory is left now, or was at the look before.

        A process that was killed gives its memory back before anybody can look.
        """
        memory = _numbers(self._root / "proc/meminfo")
        before = self._is_low
        self._is_low = memory.get("MemAvailable:", 1) < _LOW * memory.get("MemTotal:", 0)
        return before or self._is_low

    def was_short(self) -> bool:
        """Return whether little memory is left, or the kernel has killed a process to get some."""
        return self.look() or self._count_kills() > self._kills

    def _count_kills(self) -> int:
        """Return the kernel's counter, of all control groups."""
        return _numbers(self._root / "proc/vmstat").get("oom_kill", 0)


def _numbers(path: Path) -> dict[str, int]:
    try:
        text = read_file(path, most_bytes=_MOST_BYTES).decode()
    except OSError:
        return {}
    return {name: int(number) for name, number, *_ in map(str.split, text.splitlines())}
