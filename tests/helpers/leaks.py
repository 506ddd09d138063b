"""What a test may not leave behind: found by comparing the process before and after.

``Snapshot.take()`` before, ``find_leaks(before)`` after. Looking costs well under a millisecond.
Only where something is found is there patience (things that are just ending) and a closer look.
"""

# ruff: noqa: PTH115, PTH208  (pathlib takes several times as long, and this runs around every test)

import contextlib
import gc
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import psutil

from helpers.forking import Zygote

# How long something that is on its way out may take. It costs time only where a test leaks.
PATIENCE_S = 10.0

# Set in pytest's environment, and so in that of everything that tests start.
MARK = "EVENER_TESTS_PID"

IGNORED_VARIABLES = frozenset(
    {
        b"PYTEST_CURRENT_TEST",  # pytest changes it itself, between the phases of a test
        # torch sets these for its own children and compiled code, when it first compiles
        b"TORCHINDUCTOR_CACHE_DIR",
        b"_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR",
    }
)

# pytest-timeout sets and clears it around the fixtures.
IGNORED_SIGNALS = frozenset({signal.SIGALRM})

IGNORED_FILES = (
    "/dev/urandom",  # opened once per process by libraries that draw keys, and kept
    "/dev/nvidia",  # the CUDA driver keeps its devices open once it is used
    "/proc/",  # psutil and the CUDA driver keep some open
)

IGNORED_THREADS = (
    "tqdm_monitor",  # one per process, started by the first progress bar of any library
    "pytest_timeout",  # with timeout_method = thread
)


@dataclass(frozen=True)
class Snapshot:
    """What the process has at one moment."""

    variables: dict[bytes, bytes]
    children: frozenset[int]
    threads: frozenset[int]
    files: dict[int, str]
    segments: frozenset[str]
    folder: str
    handlers: dict[int, Any]
    torch: dict[str, Any]

    @classmethod
    def take(cls) -> Self:
        """Looks around."""
        return cls(
            variables=environment(),
            children=frozenset(children()),
            threads=frozenset(thread.ident or 0 for thread in threading.enumerate()),
            files=open_files(),
            segments=frozenset(shared_segments()),
            folder=current_folder(),
            handlers=signal_handlers(),
            torch=torch_settings(),
        )


def find_leaks(before: Snapshot) -> list[str]:
    """Names what has changed since, in words, and puts it back as far as possible.

    Processes are killed and settings restored, so that the tests that follow are not disturbed.
    """
    leaks: list[str] = []
    leaks += leaked_processes(before)
    leaks += leaked_threads(before)
    leaks += leaked_torch(before)  # a process group holds threads and sockets: end it first
    leaks += leaked_files(before)
    leaks += leaked_segments(before)
    leaks += changed_variables(before)
    leaks += changed_folder(before)
    leaks += changed_handlers(before)
    return leaks


def gone_in_time(look: Callable[[], Any]) -> Any:
    """What ``look`` still sees after patience and garbage collection; nothing if it goes away."""
    found = look()
    if found:
        gc.collect()
        deadline_s = time.monotonic() + PATIENCE_S
        while (found := look()) and time.monotonic() < deadline_s:
            time.sleep(0.02)
    return found


# ── processes ────────────────────────────────────────────────────────────────────────────────────


def children() -> list[int]:
    """Children of this process."""
    try:
        # Cheaper than reading all of /proc; every thread has a list of its own.
        tasks = os.listdir("/proc/self/task")
        pids: list[int] = []
        for task in tasks:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                pids += map(int, read_bytes(f"/proc/self/task/{task}/children").split())
        return pids
    except FileNotFoundError:
        return [child.pid for child in psutil.Process().children()]


def read_bytes(path: str) -> bytes:
    """A small file of /proc, without the layers of pathlib."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.read(descriptor, 1 << 20)
    finally:
        os.close(descriptor)


def mark_descendants() -> None:
    """Puts a mark into the environment, by which orphans are known later on."""
    os.environ[MARK] = str(os.getpid())


def orphans() -> list[psutil.Process]:
    """Processes that tests of this process began and whose parent has died."""
    mark = f"{MARK}={os.getpid()}".encode()
    family = {child.pid for child in psutil.Process().children(recursive=True)} | {os.getpid()}
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(OSError, psutil.Error):
            if pid not in family and mark in read_bytes(f"/proc/{pid}/environ").split(b"\0"):
                found.append(psutil.Process(pid))
    return found


def find_orphans() -> list[str]:
    """Names the orphans, and kills them. Reads all of /proc: once per test file is enough."""
    leaks = []
    for process in gone_in_time(orphans):
        with contextlib.suppress(psutil.Error):
            leaks.append(f"orphaned process {process.pid}: {' '.join(process.cmdline())[:200]}")
            process.kill()
    return leaks


def leaked_processes(before: Snapshot) -> list[str]:
    def look() -> list[int]:
        known = before.children | belongings()[0]
        return [pid for pid in children() if pid not in known and not reaped(pid)]

    leaks = []
    for pid in gone_in_time(look):
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            family = [process, *process.children(recursive=True)]
            command = " ".join(process.cmdline()) or process.name()
            leaks.append(f"process {pid} ({process.status()}): {command[:200]}")
            for member in family:
                with contextlib.suppress(psutil.Error):
                    member.kill()
            psutil.wait_procs(family, timeout=PATIENCE_S)
    return leaks


def reaped(pid: int) -> bool:
    """Takes leave of a child that has ended and that nobody waited for."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


# ── threads ──────────────────────────────────────────────────────────────────────────────────────


def leaked_threads(before: Snapshot) -> list[str]:
    def look() -> list[threading.Thread]:
        return [
            thread
            for thread in threading.enumerate()
            if thread.ident not in before.threads and not thread.name.startswith(IGNORED_THREADS)
        ]

    return [
        f"thread {thread.name!r}{' (daemon)' if thread.daemon else ''}: {whereabouts(thread)}"
        for thread in gone_in_time(look)
    ]


def whereabouts(thread: threading.Thread) -> str:
    """The innermost line that a thread is in."""
    frame = sys._current_frames().get(thread.ident or 0)
    return f"in {frame.f_code.co_filename}:{frame.f_lineno}" if frame else "ended just now"


# ── files and shared memory ──────────────────────────────────────────────────────────────────────


def open_files() -> dict[int, str]:
    """What each descriptor of this process leads to."""
    files = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that listdir itself used
            files[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return files


def leaked_files(before: Snapshot) -> list[str]:
    def look() -> dict[int, str]:
        own = belongings()[1]
        return {
            descriptor: target
            for descriptor, target in open_files().items()
            if before.files.get(descriptor) != target
            and descriptor not in own
            and not target.startswith(IGNORED_FILES)
        }

    return [f"descriptor {n}: {target}" for n, target in gone_in_time(look).items()]


def shared_segments() -> list[str]:
    """Names in /dev/shm."""
    try:
        return os.listdir("/dev/shm")
    except FileNotFoundError:
        return []


def leaked_segments(before: Snapshot) -> list[str]:
    def look() -> set[str]:
        return set(shared_segments()) - before.segments

    names = gone_in_time(look)
    # Other programs of this machine make segments, too; those hold them open.
    return [f"shared memory /dev/shm/{name}" for name in names if not used_elsewhere(name)]


def used_elsewhere(segment: str) -> bool:
    """Whether a process that is not ours maps a segment."""
    ours = {process.pid for process in psutil.Process().children(recursive=True)} | {os.getpid()}
    return any(is_mapped(pid, segment) for pid in psutil.pids() if pid not in ours)


def is_mapped(pid: int, segment: str) -> bool:
    """Whether a process maps a segment.

    By its inode: a semaphore is made under another name, and that is the one which is listed.
    """
    try:
        number = str(Path(f"/dev/shm/{segment}").stat().st_ino)
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return False
    mapped = (line.split(maxsplit=5) for line in lines if "/dev/shm/" in line)
    return any(fields[4] == number for fields in mapped)


# ── settings of the process ──────────────────────────────────────────────────────────────────────


def environment() -> dict[bytes, bytes]:
    """The environment, as bytes."""
    variables: dict[bytes, bytes] = os.environ._data  # type: ignore[attr-defined]
    return {name: value for name, value in variables.items() if name not in IGNORED_VARIABLES}


def changed_variables(before: Snapshot) -> list[str]:
    after = environment()
    if after == before.variables:
        return []
    leaks = []
    for name in sorted(after.keys() | before.variables.keys()):
        was, now = before.variables.get(name), after.get(name)
        if was == now:
            continue
        leaks.append(f"environment variable {name.decode()}: {was!r} became {now!r}")
        if was is None:
            os.unsetenv(name)
            del os.environ[os.fsdecode(name)]
        else:
            os.environ[os.fsdecode(name)] = os.fsdecode(was)
    return leaks


def current_folder() -> str:
    """The current directory, also where it has been removed."""
    return os.readlink("/proc/self/cwd")


def changed_folder(before: Snapshot) -> list[str]:
    after = current_folder()
    if after == before.folder:
        return []
    os.chdir(before.folder)
    return [f"current directory: {before.folder} became {after}"]


def signal_handlers() -> dict[int, Any]:
    """The Python handler of every signal."""
    return {n: signal.getsignal(n) for n in ALL_SIGNALS}


ALL_SIGNALS = tuple(sorted(signal.valid_signals() - IGNORED_SIGNALS))


def changed_handlers(before: Snapshot) -> list[str]:
    leaks = []
    for number, after in signal_handlers().items():
        was = before.handlers[number]
        if after != was:
            leaks.append(f"handler of signal {signal.Signals(number).name}: {was} became {after}")
            if was is not None:
                signal.signal(number, was)
    return leaks


# ── torch ────────────────────────────────────────────────────────────────────────────────────────


def torch_settings() -> dict[str, Any]:
    """Settings of torch that hold for the whole process; nothing while torch is not imported."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "get_default_dtype"):
        return {}
    return {
        "default dtype": torch.get_default_dtype(),
        "number of threads": torch.get_num_threads(),
        "gradients enabled": torch.is_grad_enabled(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "anomaly detection": torch.is_anomaly_enabled(),
        "autocast on the CPU": torch.is_autocast_enabled("cpu"),
    }


def leaked_torch(before: Snapshot) -> list[str]:
    leaks = []
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        leaks.append("the default process group of torch.distributed")
        distributed.destroy_process_group()
    after = torch_settings()
    # Where the test was the first to import torch, what it found then is taken for granted.
    for name, was in before.torch.items():
        if after[name] != was:
            leaks.append(f"torch, {name}: {was} became {after[name]}")
            restore_torch(name, was)
    return leaks


def restore_torch(name: str, value: Any) -> None:
    torch = sys.modules["torch"]
    {
        "default dtype": torch.set_default_dtype,
        "number of threads": torch.set_num_threads,
        "gradients enabled": torch._C._set_grad_enabled,
        "deterministic algorithms": torch.use_deterministic_algorithms,
        "anomaly detection": torch.autograd.set_detect_anomaly,
        "autocast on the CPU": lambda enabled: torch.set_autocast_enabled("cpu", enabled),
    }[name](value)


# ── what stays for good ──────────────────────────────────────────────────────────────────────────


def belongings() -> tuple[set[int], set[int]]:
    """Processes and descriptors that are made once, when first needed, and stay to the end."""
    pids, descriptors = Zygote.belongings()
    # multiprocessing starts one tracker per process, with the first spawned child.
    module = sys.modules.get("multiprocessing.resource_tracker")
    if module is not None:
        tracker = module._resource_tracker
        pids |= {tracker._pid} - {None}
        descriptors |= {tracker._fd} - {None}
    return pids, descriptors


def seed_everything(seed: int) -> None:
    """The same random numbers in every test, however tests are ordered."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "manual_seed"):
        torch.manual_seed(seed)
