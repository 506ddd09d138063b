"""A worker process of a managed run: ``python -P -m evener.managed.worker``.

Only ``ProcessRun`` starts it. It never runs the user's script: what it needs comes pickled by value
in a file without a name. It exchanges messages with the process that started it, and ends with it.
"""

import atexit
import gc
import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import asdict

from evener.errors import RunEndedError
from evener.managed.description import ManagedRun
from evener.managed.rank import EVAL_TIMEOUT_S, ManagedRank
from evener.managed.trained import write_trained
from evener.managed.travel import unpack
from evener.managed.workers import JOB_FD, STATE_FD
from evener.observe.events import Event, Sink
from evener.team.child import prepare_rank
from evener.team.environment import DistributedTrainConfig
from evener.team.failures import describe
from evener.team.wire import DONE, READY, Channel

#: After a failure, wait this long for a message from the process that started this one.
ORDERS_TIMEOUT_S = 300.0


class ManagedProcess:
    """One rank's process.

    Args:
        channel: To the process that started this one.
        job_fd: File with the pickled job.
    """

    def __init__(self, channel: Channel, job_fd: int, state_fd: int) -> None:
        self._channel = channel
        self._job_fd, self._state_fd = job_fd, state_fd
        self._rank: ManagedRank | None = None
        self._stopped = False

    def run(self) -> int:
        """Run this rank's part; return the exit code."""
        try:
            self._train()
        except RunEndedError:
            pass  # the others have finished the run
        except (Exception, SystemExit) as error:
            # The top of a process: every error must reach the user.
            return self._fail(error)
        self._channel.send({"place": DONE})
        return 0

    def _train(self) -> None:
        parts = unpack(self._job_fd)
        sinks = [_Forwarded(self._channel)] if parts.pop("sends_events") else ()
        job = ManagedRun(**parts)
        os.close(self._job_fd)
        self._rank = ManagedRank(
            job,
            environment=DistributedTrainConfig.from_env(),
            stop_when=self._is_stopped,
            sinks=sinks,
        )
        ddp = self._rank.ddp
        is_elastic = ddp.assembly.team.is_elastic
        if not is_elastic:  # an elastic worker reports it when it has joined the team
            self._channel.send({"place": READY})
        for metrics in self._rank.train():
            if is_elastic or ddp.is_main_process:  # the main process may be lost before it sends
                self._channel.send({"metrics": metrics.document()})
        ddp.assembly.engine.collectives.ask_main(
            "sending its state", self._send_state, timeout_s=EVAL_TIMEOUT_S
        )
        self._rank.close()

    def _is_stopped(self) -> bool:
        """Return whether the process that started this one has asked to stop, its only message."""
        self._stopped = self._stopped or bool(self._channel.receive())
        if self._channel.has_ended:
            os._exit(1)  # the process that would use the result has ended
        return self._stopped

    def _send_state(self) -> bool:
        """Send the model, if there is one; return true."""
        if self._rank is not None:
            with os.fdopen(self._state_fd, "wb", closefd=False) as file:
                self._channel.send({"state": write_trained(self._rank.state(), file)})
        return True

    def _fail(self, error: Exception | SystemExit) -> int:
        steps = -1 if self._rank is None else self._rank.ddp.progress.steps
        report = describe(error, steps=steps)
        if self._rank is not None:
            self._rank.close(error)  # first, since it notifies the other ranks
        self._channel.send({"failure": asdict(report)})
        while (order := self._next_order()) != "exit":
            if order == "send_state":
                self._send_state()
        return report.exit_code

    def _next_order(self) -> str:
        with suppress(TimeoutError):
            if message := self._channel.next(time.monotonic() + ORDERS_TIMEOUT_S):
                return str(message["order"])
        return "exit"


class _Forwarded(Sink):
    """Sends events to the process that started this one."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def emit(self, event: Event) -> None:
        self._channel.send({"event": event})

    def close(self) -> None:
        """Do nothing: the channel is still needed."""


def main() -> int:
    """Run a worker; return the exit code."""
    channel = prepare_rank()
    files = [int(os.environ.pop(name)) for name in (JOB_FD, STATE_FD)]
    for descriptor in files:
        os.set_inheritable(descriptor, False)
    # Ctrl-C is handled by the process that started this one, which then stops its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # see start_in_silence
    # At exit Python's garbage collector would traverse all of torch: up to three seconds.
    atexit.register(gc.freeze)
    assert channel is not None  # ProcessRun passes it
    return ManagedProcess(channel, *files).run()


if __name__ == "__main__":
    sys.exit(main())
