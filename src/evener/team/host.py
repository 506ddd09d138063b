"""What this host has, found without loading torch."""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from evener.errors import LaunchError

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
