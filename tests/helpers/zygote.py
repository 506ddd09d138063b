"""The process that ranks of a test are forked from: torch is imported once, not once per rank.

``helpers.forking`` starts it as ``python zygote.py FD MODULE...``. FD is a Unix socket of packets:
a request is two descriptors (the rank's channel, the file for its output), or names of further
modules to import; the answers are
``{"pid": p}`` and, when that rank has ended, ``{"pid": p, "status": s}`` with s as ``os.waitpid``
gives it; p is this process when modules have been imported. Its end is the end of the socket, and
takes all ranks along. It has one thread and installs no signal handler, so that a rank
begins as clean as a new interpreter.
"""

import atexit
import ctypes
import faulthandler
import gc
import importlib
import importlib.util
import json
import os
import pickle
import random
import select
import signal
import socket
import sys
import threading
import traceback
import types
import warnings
from array import array
from multiprocessing.connection import Connection
from typing import Any

PR_SET_PDEATHSIG = 1
MAX_DESCRIPTORS = 2


def main() -> None:
    requests = socket.socket(fileno=int(sys.argv[1]))
    for name in sys.argv[2:]:
        importlib.import_module(name)
    warm_up_torch()
    warm_up_evener()
    libc = ctypes.CDLL(None, use_errno=True)
    gc.collect()
    gc.freeze()  # ranks collect what they make themselves, not torch's modules over and over
    requests.send(json.dumps({"pid": os.getpid()}).encode())
    ranks: dict[int, int] = {}  # pidfd -> pid
    poll = select.poll()
    poll.register(requests, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor in ranks:
                poll.unregister(descriptor)
                os.close(descriptor)
                pid = ranks.pop(descriptor)
                answer(requests, pid=pid, status=os.waitpid(pid, 0)[1])
                continue
            message, received = receive(requests)
            if not message:
                return  # the tests have ended
            if not received:
                for name in message.decode().split():
                    importlib.import_module(name)
                gc.collect()
                gc.freeze()
                answer(requests, pid=os.getpid())
                continue
            pid = os.fork()
            if pid == 0:
                libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                requests.close()
                for pidfd in ranks:
                    os.close(pidfd)
                be_rank(*received)
            for inherited in received:
                os.close(inherited)
            pidfd = os.pidfd_open(pid)
            ranks[pidfd] = pid
            poll.register(pidfd, select.POLLIN)
            answer(requests, pid=pid)


def warm_up_torch() -> None:
    """The first optimizer of a process imports half of torch's compiler, which takes a second."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1).zero_grad()


def warm_up_evener() -> None:
    """Public names import their modules when they are first used, for half a second together."""
    evener = sys.modules.get("evener")
    for name in evener.__all__ if evener is not None else ():
        getattr(evener, name)


def answer(requests: socket.socket, **message: int) -> None:
    requests.send(json.dumps(message).encode())


def receive(requests: socket.socket) -> tuple[bytes, list[int]]:
    descriptors = array("i")
    space = socket.CMSG_SPACE(MAX_DESCRIPTORS * descriptors.itemsize)
    message, ancillary, _, _ = requests.recvmsg(4096, space)
    for _, _, data in ancillary:
        descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    return message, descriptors.tolist()


# ── in the rank ──────────────────────────────────────────────────────────────────────────────────


def be_rank(channel_fd: int, output_fd: int) -> None:
    """Runs one job and ends the process; never returns."""
    status = 1
    try:
        redirect(output_fd)
        channel = Connection(channel_fd)
        status = run_job(channel)
        sys.stdout.flush()
        # What a process does at its end, without the second that freeing all of torch would take.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def redirect(output_fd: int) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(output_fd, 1)
    os.dup2(output_fd, 2)
    os.close(nothing)
    os.close(output_fd)
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)
    sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr
    faulthandler.enable(2)
    # Not SIGUSR1: launchers use that one.
    faulthandler.register(signal.SIGUSR2, file=2, all_threads=True, chain=False)


def run_job(channel: Connection) -> int:
    """Receives the job, runs it, sends what came of it; returns the exit status."""
    prepare(pickle.loads(channel.recv_bytes()))
    # Only now can the function be unpickled: the first part has said where its module is.
    function, rank, arguments = pickle.loads(channel.recv_bytes())
    rank._channel = channel
    try:
        value = function(rank, *arguments)
    except SystemExit as error:
        traceback.print_exc()
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:
        channel.send_bytes(b"E" + describe(error))
        return 0
    import cloudpickle

    channel.send_bytes(b"V" + cloudpickle.dumps(value))
    return 0


def prepare(job: dict[str, Any]) -> None:
    os.environ.clear()
    os.environ.update(job["environment"])
    os.chdir(job["folder"])
    sys.path[:] = job["path"]
    if job["module_file"]:
        load_module(job["module"], job["module_file"])
    # torch and numpy are imported by now; the same numbers on every rank.
    random.seed(0)
    sys.modules["numpy"].random.seed(0)
    sys.modules["torch"].manual_seed(0)
    warnings.filters[:] = job["warning_filters"]
    warnings._filters_mutated()  # type: ignore[attr-defined]


def load_module(name: str, file: str) -> None:
    """Imports a test module by its file, under the name that it has in pytest."""
    parent = ""
    for part in name.split(".")[:-1]:
        parent = f"{parent}.{part}" if parent else part
        sys.modules.setdefault(parent, types.ModuleType(parent))
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


def describe(error: BaseException) -> bytes:
    """The exception in parts: many classes cannot be unpickled whole, as __init__ wants more."""
    import cloudpickle

    text = "".join(traceback.format_exception(error))
    try:
        return cloudpickle.dumps((type(error), error.args, error.__dict__, text))
    except Exception:
        return cloudpickle.dumps((RuntimeError, (repr(error),), {}, text))


if __name__ == "__main__":
    main()
