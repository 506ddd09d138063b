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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
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

# pytest-timeout sets and clears the handler of SIGALRM around the fixtures.
SIGNALS = tuple(sorted({*signal.Signals} - {signal.SIGALRM}))

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
    """What the process has at one moment: things that may be new later, and settings."""

    things: Mapping[str, Mapping[Any, str]]
    settings: Mapping[str, Mapping[Any, Any]]

    @classmethod
    def take(cls) -> Self:
        """Looks around."""
        return cls(
            {kind: look() for kind, look in THINGS.items()},
            {kind: read() for kind, (read, _) in SETTINGS.items()},
        )


def find_leaks(before: Snapshot) -> list[str]:
    """Names what has changed since, in words, and puts it back as far as possible.

    Processes are killed and settings restored, so that the tests that follow are not disturbed.
    """
    leaks = end_process_group()  # it holds threads and sockets: end it first
    for kind, look in THINGS.items():
        new = gone_in_time(partial(find_new, look, before.things[kind]))
        if kind == "shared memory":
            new = {name: text for name, text in new.items() if not is_used_elsewhere(name)}
        where = sys._current_frames() if kind == "thread" else {}
        for key, text in new.items():
            frame = where.get(key)
            at = f": in {frame.f_code.co_filename}:{frame.f_lineno}" if frame else ""
            leaks.append(f"{kind} {text}{at}")
        if kind == "process":
            kill([psutil.Process(pid) for pid in find_new(look, before.things[kind])])
    for kind, (read, restore) in SETTINGS.items():
        was, now = before.settings[kind], read()
        for name in sorted(was.keys() | now.keys(), key=str):
            # Where the test was the first to import torch, what it found then is no change.
            if was.get(name) != now.get(name) and not (kind == "torch," and not was):
                told = name.decode() if isinstance(name, bytes) else name
                leaks.append(f"{kind} {told}: {was.get(name)} became {now.get(name)}")
                restore(name, was.get(name))
    return leaks


def find_new(look: "Look", before: Mapping[Any, str]) -> dict[Any, str]:
    """What is there now and was not before."""
    return {key: text for key, text in look().items() if before.get(key) != text}


def gone_in_time(look: Callable[[], Any]) -> Any:
    """What ``look`` still sees after patience and garbage collection; nothing if it goes away."""
    found = look()
    if found:
        gc.collect()
        deadline_s = time.monotonic() + PATIENCE_S
        while (found := look()) and time.monotonic() < deadline_s:
            time.sleep(0.02)
    return found


# ── things ───────────────────────────────────────────────────────────────────────────────────────


def children() -> dict[int, str]:
    """Children of this process that are no belongings."""
    pids: list[int] = []
    # Cheaper than reading all of /proc; every thread has a list of its own.
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            pids += map(int, read_bytes(f"/proc/self/task/{task}/children").split())
    own = belongings()[0]
    return {pid: describe(pid) for pid in pids if pid not in own and not reaped(pid)}


def describe(pid: int) -> str:
    """A process in words, the same for as long as it lives."""
    with contextlib.suppress(OSError):
        command = read_bytes(f"/proc/{pid}/cmdline").replace(b"\0", b" ").decode(errors="replace")
        return f"{pid}: {command[:200]}"
    return str(pid)


def reaped(pid: int) -> bool:
    """Takes leave of a child that has ended and that nobody waited for."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def kill(processes: list[psutil.Process]) -> None:
    """Kills processes and all that they have started."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            family = [process, *process.children(recursive=True)]
            for member in family:
                with contextlib.suppress(psutil.Error):
                    member.kill()
            psutil.wait_procs(family, timeout=PATIENCE_S)


def threads() -> dict[int, str]:
    """Threads of this process."""
    return {
        thread.ident or 0: f"{thread.name!r}{' (daemon)' if thread.daemon else ''}"
        for thread in threading.enumerate()
        if not thread.name.startswith(IGNORED_THREADS)
    }


def open_files() -> dict[int, str]:
    """What each descriptor of this process leads to."""
    files, own = {}, belongings()[1]
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that listdir itself used
            target = os.readlink(f"/proc/self/fd/{name}")
            if int(name) not in own and not target.startswith(IGNORED_FILES):
                files[int(name)] = f"{name}: {target}"
    return files


def shared_segments() -> dict[str, str]:
    """Names in /dev/shm."""
    with contextlib.suppress(FileNotFoundError):
        return {name: f"/dev/shm/{name}" for name in os.listdir("/dev/shm")}
    return {}


def is_used_elsewhere(segment: str) -> bool:
    """Whether a process that is not ours maps a segment: other programs make some, too."""
    ours = {child.pid for child in psutil.Process().children(recursive=True)} | {os.getpid()}
    # By its inode: a semaphore is made under another name, and that is the one which is listed.
    with contextlib.suppress(OSError):
        number = str(Path(f"/dev/shm/{segment}").stat().st_ino).encode()
        for pid in set(psutil.pids()) - ours:
            with contextlib.suppress(OSError), Path(f"/proc/{pid}/maps").open("rb") as maps:
                fields = (line.split(maxsplit=5) for line in maps if b"/dev/shm/" in line)
                if any(number == inode for *_, inode, _ in fields):
                    return True
    return False


def read_bytes(path: str) -> bytes:
    """A small file of /proc, without the layers of pathlib."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.read(descriptor, 1 << 20)
    finally:
        os.close(descriptor)


Look = Callable[[], Mapping[Any, str]]
THINGS: dict[str, Look] = {
    "process": children,
    "thread": threads,
    "descriptor": open_files,
    "shared memory": shared_segments,
}


# ── settings of the process ──────────────────────────────────────────────────────────────────────


def environment() -> dict[bytes, bytes]:
    """The environment, as bytes."""
    variables: dict[bytes, bytes] = os.environ._data  # type: ignore[attr-defined]
    return {name: value for name, value in variables.items() if name not in IGNORED_VARIABLES}


def restore_variable(name: bytes, value: bytes | None) -> None:
    if value is None:
        del os.environ[os.fsdecode(name)]
    else:
        os.environ[os.fsdecode(name)] = os.fsdecode(value)


def current_folder() -> dict[str, str]:
    """The current directory, also where it has been removed."""
    return {"directory": os.readlink("/proc/self/cwd")}


def signal_handlers() -> dict[str, Any]:
    """The Python handler of every signal."""
    return {f"of signal {n.name}": signal.getsignal(n) for n in SIGNALS}


def restore_handler(name: str, handler: Any) -> None:
    if handler is not None:
        signal.signal(signal.Signals[name.split()[-1]], handler)


def torch_settings() -> dict[str, Any]:
    """Settings of torch that hold for the whole process; nothing while torch is not imported."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "get_default_dtype"):
        return {}
    return {
        "default dtype": torch.get_default_dtype(),
        "number of threads": torch.get_num_threads(),
        "gradients enabled": torch.is_grad_enabled(),
    }


def restore_torch(name: str, value: Any) -> None:
    torch = sys.modules["torch"]
    {
        "default dtype": torch.set_default_dtype,
        "number of threads": torch.set_num_threads,
        "gradients enabled": torch._C._set_grad_enabled,
    }[name](value)


def end_process_group() -> list[str]:
    """Ends the default process group of torch, if there is one, and names it."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not (distributed.is_available() and distributed.is_initialized()):
        return []
    distributed.destroy_process_group()
    return ["the default process group of torch.distributed"]


SETTINGS: dict[str, tuple[Callable[[], Mapping[Any, Any]], Callable[[Any, Any], object]]] = {
    "environment variable": (environment, restore_variable),
    "current": (current_folder, lambda _, folder: os.chdir(folder)),
    "handler": (signal_handlers, restore_handler),
    "torch,": (torch_settings, restore_torch),
}


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


# ── around all tests ─────────────────────────────────────────────────────────────────────────────


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
    found = gone_in_time(orphans)
    leaks = [f"orphaned process {describe(process.pid)}" for process in found]
    kill(found)
    return leaks


def seed_everything(seed: int) -> None:
    """The same random numbers in every test, however tests are ordered."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "manual_seed"):
        torch.manual_seed(seed)
