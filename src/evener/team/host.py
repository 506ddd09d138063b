"""What this host has, what its kernel says of processes, and what to do where it refuses more.

It loads no torch.
"""

import errno
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Final

from evener.errors import LaunchError

if sys.platform != "win32":
    import resource  # at once: later there may be no descriptor left to open it

_OTHER_FILES: Final = ("dri/renderD*", "accel/accel*", "davinci[0-9]*")
"""Device files of AMD's and Intel's GPUs, of the kernel's accelerators, and of Ascend's."""

_PATIENCE_S: Final = 120.0
_ASK_TORCH: Final = "import torch; print(torch.accelerator.device_count())"


def threads_per_rank(local_world_size: int) -> int:
    """Return the threads that each of a host's ranks should use, of the cores it may run on."""
    return max(1, available_cores() // local_world_size)


def local_devices(
    environ: Mapping[str, str] | None = None,
    root: Path = Path("/dev"),
    ask_torch: Callable[[], int] | None = None,
) -> int:
    """Accelerators that this host shows, found without loading torch into this process.

    NVIDIA's are counted by their files. A file of another vendor may belong to a graphics unit that
    torch cannot use, so where there are several, torch is asked; a single one makes no difference,
    as a host has one rank at least.

    Args:
        environ: Instead of the process's environment; ``CUDA_VISIBLE_DEVICES`` may hide some.
        root: Where device files are.
        ask_torch: Instead of asking torch in a process of its own.

    Returns:
        Their number; 0 also for a single one that is not NVIDIA's.

    Raises:
        LaunchError: Torch did not answer.
    """
    environ = os.environ if environ is None else environ
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([d for d in visible.split(",") if d.strip() not in ("", "-1")])
    if found := len(list(root.glob("nvidia[0-9]*"))):
        return found
    if max(len(list(root.glob(pattern))) for pattern in _OTHER_FILES) < 2:
        return 0
    return (ask_torch or _count_by_torch)()


def available_cores() -> int:
    """Cores that this process may run on: fewer than the machine's under ``taskset`` or SLURM."""
    if sys.platform != "linux":
        return os.cpu_count() or 1
    return len(os.sched_getaffinity(0))


def _count_by_torch(timeout_s: float = _PATIENCE_S) -> int:
    """Ask torch in a process of its own, as it takes seconds to load and may start drivers."""
    try:
        asked = subprocess.run(  # a torch that does not load fails where it is used, and better
            [sys.executable, "-c", _ASK_TORCH],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise LaunchError(
            f"torch has not said within {timeout_s:g} s how many accelerators this host has: give "
            "the number of ranks (--nproc), or look what keeps `import torch` waiting"
        ) from None
    # What loads with torch may print lines of its own.
    return int(asked.stdout.split()[-1]) if asked.returncode == 0 else 0


# ── processes ─────────────────────────────────────────────────────────────────────────────────────


class KernelState(StrEnum):
    """What the kernel says of a process, as far as others have to know it."""

    RUNNING = "running"
    """It runs or sleeps, or nobody can tell."""
    STOPPED = "stopped"
    """By a signal, or held by a debugger."""
    GONE = "gone"


_LETTERS: Final = {
    b"T": KernelState.STOPPED,
    b"t": KernelState.STOPPED,
    b"Z": KernelState.GONE,
    b"X": KernelState.GONE,
}
_PROC = Path("/proc")
_GROUPS = Path("/sys/fs/cgroup")


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


def clock_time(unix_s: float) -> str:
    """Return a moment as people of this host read it, such as ``14:03:22``."""
    return time.strftime("%H:%M:%S", time.localtime(unix_s))


# ── shortage ──────────────────────────────────────────────────────────────────────────────────────


_NO_THREAD: Final = "can't start new thread"
"""Python's words for EAGAIN."""


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


def count_kills() -> int:
    """Return how many processes the kernel has killed to get memory back: of our control group.

    Without such a group, of the machine. A container sees its own group as the top.
    """
    own = ""
    with suppress(OSError):
        own = (_PROC / "self/cgroup").read_text().rpartition("0::/")[2].strip()
    groups = (f"{own}/memory.events", "memory.events", "memory/memory.oom_control")
    for path in (*(_GROUPS / name for name in groups), _PROC / "vmstat"):
        with suppress(OSError, ValueError, KeyError):
            return int(dict(line.split() for line in path.read_text().splitlines())["oom_kill"])
    return 0
