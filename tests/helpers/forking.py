"""Starts and talks to the process that ranks are forked from (``zygote.py``)."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from array import array
from multiprocessing.connection import wait
from pathlib import Path
from typing import ClassVar

from helpers.limits import PATIENCE_S


class ZygoteError(AssertionError):
    """The process that forks ranks does not do its work."""


class Zygote:
    """The process that ranks are forked from; one for all tests of this pytest process."""

    PRELOADED = ("torch", "torch.distributed", "numpy", "cloudpickle", "pytest", "evener")
    _current: ClassVar["Zygote | None"] = None

    def __init__(self) -> None:
        self.requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.statuses: dict[int, int] = {}
        self._forked: list[int] = []
        self._imported: set[str] = set()
        self._errors = tempfile.TemporaryFile()
        with theirs:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    str(Path(__file__).with_name("zygote.py")),
                    str(theirs.fileno()),
                    *self.PRELOADED,
                ],
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=self._errors,
                stderr=self._errors,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for the tests to handle
            )
        self._expect_pid()

    @classmethod
    def get(cls) -> "Zygote":
        """The one that runs, or a new one."""
        if cls._current is None or cls._current.process.poll() is not None:
            cls.shut_down()
            cls._current = cls()
        return cls._current

    @classmethod
    def shut_down(cls) -> None:
        """Ends it and its ranks; the next ``get`` starts another."""
        zygote, cls._current = cls._current, None
        if zygote is not None:
            zygote.requests.close()
            try:
                zygote.process.wait(2.0)
            except subprocess.TimeoutExpired:
                zygote.process.kill()
                zygote.process.wait()
            zygote._errors.close()

    @classmethod
    def belongings(cls) -> tuple[set[int], set[int]]:
        """Process ids and descriptors that stay over many tests and are no leak."""
        if cls._current is None:
            return set(), set()
        zygote = cls._current
        return {zygote.process.pid}, {zygote.requests.fileno(), zygote._errors.fileno()}

    def fork(self, descriptors: list[int]) -> int:
        """Makes a rank that holds these descriptors; returns its process id."""
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))]
        self.requests.sendmsg([b"fork"], ancillary)
        return self._expect_pid()

    def preload(self, *modules: str) -> None:
        """Imports modules, once, so that no rank from now on has to."""
        missing = [name for name in modules if name not in self._imported]
        if missing:
            self.requests.send(" ".join(missing).encode())
            self._expect_pid()
            self._imported.update(missing)

    def read(self) -> None:
        """Takes in one message."""
        text = self.requests.recv(4096)
        if not text:
            size = os.fstat(self._errors.fileno()).st_size
            said = os.pread(self._errors.fileno(), size, 0).decode(errors="replace")
            raise ZygoteError(f"the process that forks ranks has ended; it said:\n{said}")
        message = json.loads(text)
        if "status" in message:
            self.statuses[message["pid"]] = message["status"]
        else:
            self._forked.append(message["pid"])

    def _expect_pid(self) -> int:
        deadline_s = time.monotonic() + PATIENCE_S
        while not self._forked:
            if not wait([self.requests], max(deadline_s - time.monotonic(), 0.0)):
                raise ZygoteError(f"the process that forks ranks gave no answer in {PATIENCE_S} s")
            self.read()
        return self._forked.pop()


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal."""
    return proc_status(pid).get("State", "")[:1] == "T"


def signal_is_caught(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal, so that it does not die of it."""
    return bool(int(proc_status(pid).get("SigCgt", "0"), 16) >> (number - 1) & 1)


def proc_status(pid: int) -> dict[str, str]:
    """/proc/PID/status, or nothing when the process is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}
