"""A worker process of a managed run, as seen by the process that started it."""

import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from evener.errors import LaunchError
from evener.managed.channel import Channel
from evener.team.environment import STORE_FD
from evener.team.failures import FailureReport
from evener.team.launch import kill_group
from evener.team.verdict import Outcome


@dataclass(slots=True)
class Worker:
    """One worker.

    Attributes:
        rank: Its rank.
        device: Device that it computes on.
        process: Leader of a session and a process group of its own.
        channel: To it.
        is_ready: It has joined the team.
        is_done: It has trained to the end.
        report: What it raised.
        steps: Optimizer steps that it had applied when it failed; -1 before it joined.
        signals: Those that it was sent.
        desertion: How it has left the others waiting for it, in words; empty if it has not.
        outcome: How it ended.
    """

    rank: int
    device: str
    process: subprocess.Popen[bytes]
    channel: Channel
    is_ready: bool = False
    is_done: bool = False
    report: FailureReport | None = None
    steps: int = -1
    signals: set[int] = field(default_factory=set)
    desertion: str = ""
    outcome: Outcome | None = None

    @property
    def has_ended_work(self) -> bool:
        """Whether nothing more is to come but what it is asked for."""
        return self.is_done or self.report is not None or self.outcome is not None

    def tell(self, order: str) -> None:
        """Sends an order; one that has gone needs none."""
        with suppress(OSError):
            self.channel.send(order)

    def kill(self) -> None:
        """Ends it, and what it has started, at once."""
        self.signals.add(signal.SIGKILL)
        kill_group(self.process.pid)


def start_worker(
    rank: int, device: str, environ: Mapping[str, str], job_fd: int, store_fd: int | None
) -> Worker:
    """Starts a worker; it dies with the thread that calls this.

    Args:
        rank: Its rank.
        device: Device that it computes on.
        environ: Its environment.
        job_fd: File with the pickled job.
        store_fd: Socket of the store, for rank 0.

    Raises:
        LaunchError: The process could not be started.
    """
    ours, theirs = socket.socketpair()
    inherited = [theirs.fileno(), job_fd]
    words = [sys.executable, "-P", "-m", "evener.managed.worker", *map(str, inherited)]
    first = store_fd is not None
    with theirs:
        try:
            process = subprocess.Popen(
                words,
                env={**environ, STORE_FD: str(store_fd)} if first else environ,
                stdin=subprocess.DEVNULL,
                stdout=None if first else subprocess.PIPE,
                stderr=None if first else subprocess.PIPE,
                pass_fds=inherited if store_fd is None else [*inherited, store_fd],
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            raise LaunchError(
                f"the worker of {device} could not be started ({sys.executable}: "
                f"{error.strerror}); check that the machine has memory and processes left"
            ) from error
    return Worker(rank, device, process, Channel(ours))
