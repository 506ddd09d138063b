"""Devices, process states and limits of this host. It does not import torch."""

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
    import resource  # here, because later no descriptor may be left to open it

_OTHER_FILES: Final = ("dri/renderD*", "accel/accel*", "davinci[0-9]*")
"""Device files of AMD's and Intel's GPUs, of the kernel's accelerators, and of Ascend's."""

_PATIENCE_S: Final = 120.0
_ASK_TORCH: Final = "import torch; print(torch.accelerator.device_count())"


def threads_per_rank(local_world_size: int) -> int:
    """Return the threads for each of a host's ranks, by the cores on which it may run."""
    return max(1, available_cores() // local_world_size)


def local_devices(
    environ: Mapping[str, str] | None = None,
    root: Path = Path("/dev"),
    ask_torch: Callable[[], int] | None = None,
) -> int:
    """Return the number of this host's accelerators, without importing torch into this process.

    NVIDIA's are counted by their files. A file of another vendor may belong to a graphics unit that
    torch cannot use, so with several of them, torch is asked. A single one makes no difference, as
    a host has at least one rank.

    Args:
        environ: Instead of the process's environment; ``CUDA_VISIBLE_DEVICES`` may hide some.
        root: The folder of device files.
        ask_torch: Called instead of asking torch in another process.

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
    """Return the cores on which this process may run, with ``taskset`` or SLURM fewer than all."""
    if sys.platform != "linux":
        return os.cpu_count() or 1
    return len(os.sched_getaffinity(0))


def _count_by_torch(timeout_s: float = _PATIENCE_S) -> int:
    """Ask torch in another process, as importing it takes seconds and may start drivers."""
    try:
        asked = subprocess.run(  # if torch cannot be imported, ranks report it better
            [sys.executable, "-c", _ASK_TORCH],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise LaunchError(
            f"torch did not report within {timeout_s:g} s how many accelerators this host has: "
            "give the number of ranks (--nproc), or find why `import torch` hangs"
        ) from None
    # Libraries that torch imports may print lines, too.
    return int(asked.stdout.split()[-1]) if asked.returncode == 0 else 0


# ── processes ─────────────────────────────────────────────────────────────────────────────────────


class KernelState(StrEnum):
    """The state of a process, as far as its team has to know it."""

    RUNNING = "running"
    """It runs or sleeps, or its state is unknown."""
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
        # The program's name comes before it, in parentheses, and may contain any character.
        rest = (_PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return KernelState.GONE if (_PROC / "self").exists() else KernelState.RUNNING
    except OSError:  # such as no descriptor left
        return KernelState.RUNNING
    return _LETTERS.get(rest[0], KernelState.RUNNING)


def program_of(pid: int) -> str:
    """Return a text that identifies the program of a process, and changes with ``exec``.

    The kernel chooses new addresses of the auxiliary vector for each program, so it changes even if
    the same command is executed again.

    Returns:
        Empty if the process is ending, if it may not be read, or without ``/proc``.
    """
    try:
        return (_PROC / str(pid) / "auxv").read_bytes().hex()
    except OSError:
        return ""


def clock_time(unix_s: float) -> str:
    """Return the local time of this host as text, such as ``14:03:22``."""
    return time.strftime("%H:%M:%S", time.localtime(unix_s))


# ── shortage ──────────────────────────────────────────────────────────────────────────────────────


_NO_THREAD: Final = "can't start new thread"
"""Python's message for EAGAIN."""


def remedy_of_shortage(error: BaseException) -> str:
    """Return what to do about an error if a resource of the system is exhausted.

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
    """Return how many processes of our control group the kernel has killed for lack of memory.

    Without a control group, of the machine. In a container, its own group is the top.
    """
    own = ""
    with suppress(OSError):
        own = (_PROC / "self/cgroup").read_text().rpartition("0::/")[2].strip()
    groups = (f"{own}/memory.events", "memory.events", "memory/memory.oom_control")
    for path in (*(_GROUPS / name for name in groups), _PROC / "vmstat"):
        with suppress(OSError, ValueError, KeyError):
            return int(dict(line.split() for line in path.read_text().splitlines())["oom_kill"])
    return 0
