"""A worker process of a managed run: ``python -P -m evener.managed.worker CONTROL_FD JOB_FD``.

Started by ``WorkerTeam`` alone. It never runs the user's script: what it needs comes pickled by
value in a file without a name. It speaks to the process that started it over a socket pair, and
ends with it.
"""

import atexit
import gc
import os
import queue
import signal
import socket
import sys
import threading
import time
from dataclasses import asdict

from evener.managed.channel import Channel
from evener.managed.job import Job
from evener.managed.rank import ManagedRank
from evener.managed.trained import pack_trained
from evener.managed.travel import unpack
from evener.observe.events import Event, Sink
from evener.team.child import prepare_rank
from evener.team.environment import DistributedTrainConfig
from evener.team.failures import describe, exit_code_of

#: After a failure, wait this long for a word from the process that started this one.
ORDERS_TIMEOUT_S = 300.0


class Orders:
    """Listens to the process that started this one, on a thread of its own."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._rest: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.stop = threading.Event()
        threading.Thread(target=self._listen, name="evener-orders", daemon=True).start()

    def next(self) -> str:
        """Waits for the next order that is not to stop."""
        try:
            return self._rest.get(timeout=ORDERS_TIMEOUT_S)
        except queue.Empty:
            return "exit"

    def _listen(self) -> None:
        while (messages := self._channel.receive()) is not None:
            for message in messages:
                if message.kind == "stop":
                    self.stop.set()
                else:
                    self._rest.put(message.kind)
        os._exit(1)  # whoever would have used the result has gone


class Worker:
    """One rank's process.

    Args:
        channel: To the process that started this one.
        job_fd: File with the pickled job.
    """

    def __init__(self, channel: Channel, job_fd: int) -> None:
        self._channel = channel
        self._job_fd = job_fd
        self._orders = Orders(channel)
        self._environment = DistributedTrainConfig.from_env()
        self._rank: ManagedRank | None = None

    def run(self) -> int:
        """Does this rank's part; returns the exit code."""
        try:
            self._train()
        except (Exception, SystemExit) as error:
            # The top of a process: whatever it is, the user has to be told.
            return self._fail(error)
        return 0

    def _train(self) -> None:
        job = Job(**unpack(self._job_fd))
        os.close(self._job_fd)
        self._rank = ManagedRank(
            job,
            environment=self._environment,
            stop_when=self._orders.stop.is_set,
            sinks=[_Forwarded(self._channel)] if job.sends_events else (),
        )
        self._channel.send("ready")
        first = self._rank.ddp.is_main_process
        for metrics in self._rank.train():
            if first:
                self._channel.send("metrics", metrics.document())
        if first:
            self._send_state()
        self._rank.close()
        self._channel.send("done")

    def _send_state(self) -> None:
        if self._rank is not None:
            self._channel.send("state", *pack_trained(self._rank.state()))

    def _fail(self, error: Exception | SystemExit) -> int:
        report = describe(error, rank=self._environment.rank, time=time.time())
        steps = -1
        if self._rank is not None:
            steps = self._rank.ddp.progress.steps
            self._rank.close(error)  # first of all: the others learn of it by this
        self._channel.send("failed", {"report": asdict(report), "steps": steps})
        while (order := self._orders.next()) != "exit":
            if order == "send_state":
                self._send_state()
        return exit_code_of(error)


class _Forwarded(Sink):
    """Hands events to the process that started this one."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def emit(self, event: Event) -> None:
        self._channel.send("event", event)

    def close(self) -> None:
        """Does nothing: the channel is still needed."""


def main() -> int:
    """Runs a worker; returns the exit code."""
    prepare_rank()
    control_fd, job_fd = (int(argument) for argument in sys.argv[1:3])
    for fd in (control_fd, job_fd):
        os.set_inheritable(fd, False)
    # A Ctrl-C is for the process that started this one, which then tells its workers to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # On its way out Python would look through all of torch for garbage: up to three seconds.
    atexit.register(gc.freeze)
    return Worker(Channel(socket.socket(fileno=control_fd)), job_fd).run()


if __name__ == "__main__":
    sys.exit(main())
