"""A worker process of a managed run: ``python -P -m evener.managed.worker``.

Started by ``ProcessRun`` alone. It never runs the user's script: what it
needs comes pickled by value in a file without a name. It speaks to the process that started it, and
ends with it.
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

#: After a failure, wait this long for a word from the process that started this one.
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
        """Do this rank's part; return the exit code."""
        try:
            self._train()
        except RunEndedError:
            pass  # the others have done all of it
        except (Exception, SystemExit) as error:
            # The top of a process: whatever it is, the user has to be told.
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
        if not is_elastic:  # it says itself when it is in the team
            self._channel.send({"place": READY})
        for metrics in self._rank.train():
            if is_elastic or ddp.is_main_process:  # the main process may be lost before it tells
                self._channel.send({"metrics": metrics.document()})
        ddp.assembly.engine.collectives.ask_main(
            "sending its state", self._send_state, timeout_s=EVAL_TIMEOUT_S
        )
        self._rank.close()

    def _is_stopped(self) -> bool:
        """Return whether the process that started this one has asked to stop, its only message."""
        self._stopped = self._stopped or bool(self._channel.receive())
        if self._channel.has_ended:
            os._exit(1)  # whoever would have used the result has gone
        return self._stopped

    def _send_state(self) -> bool:
        """Send the model, if there is one; return that it is done."""
        if self._rank is not None:
            with os.fdopen(self._state_fd, "wb", closefd=False) as file:
                self._channel.send({"state": write_trained(self._rank.state(), file)})
        return True

    def _fail(self, error: Exception | SystemExit) -> int:
        steps = -1 if self._rank is None else self._rank.ddp.progress.steps
        report = describe(error, steps=steps)
        if self._rank is not None:
            self._rank.close(error)  # first of all: the others learn of it by this
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
    """Hands events to the process that started this one."""

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
    # A Ctrl-C is for the process that started this one, which then tells its workers to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # see start_in_silence
    # On its way out Python would look through all of torch for garbage: up to three seconds.
    atexit.register(gc.freeze)
    assert channel is not None  # ProcessRun hands it over
    return ManagedProcess(channel, *files).run()


if __name__ == "__main__":
    sys.exit(main())
