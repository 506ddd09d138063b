"""Launches a team: the ranks of this host, together with those of other machines.

The launcher never imports torch. ``python -P -m evener.team.launch NPROC COMMAND`` is the program
that a plainly started script turns into; see ``starting.py``.
"""

import os
import signal
import sys
import time
from collections.abc import Sequence

from evener.comm.messages import name_ranks
from evener.team.channel import JOINED, JOINING, Message
from evener.team.child import run_child
from evener.team.failures import judge
from evener.team.launcher import TerminalSupervisor
from evener.team.meeting import Node, Peers, meet
from evener.team.process_state import clock_time
from evener.team.signals import STOPPING, SignalQueue, end_in_silence
from evener.team.supervisor import (
    ANOTHER_PROGRAM,
    Child,
    LocalRanks,
    bind_store,
    check_nproc,
)
from evener.team.terminal import say

#: Seconds that ranks get to end by themselves after they were asked to.
GRACE_S = 5.0


def launch(
    command: Sequence[str],
    *,
    nproc: int,
    port: int | None = None,
    grace_s: float = GRACE_S,
    store_waits: bool = False,
    node: Node | None = None,
) -> int:
    """Run ``nproc`` copies of a command as the ranks of a team on this host.

    Where several hosts take part, each runs this, and ranks start once all are here. The first rank
    of a host writes straight to the terminal; each line of the others is marked with its rank. The
    first rank that fails ends the run, and what it raised is printed. SIGINT, SIGTERM, SIGHUP and
    SIGUSR1 are passed on once; ranks that then take longer than ``grace_s``, or that a second
    Ctrl-C finds still running, are killed. Nothing that the ranks have started outlives this call,
    nor this process. Call it on the main thread.

    Args:
        command: Program and arguments, the same for every rank.
        nproc: Number of ranks.
        port: Port for the store of a team on this host alone; ``None`` takes a free one.
        grace_s: Seconds that ranks get to end by themselves.
        store_waits: Connections to the store may wait for rank 0 to open it, which is quicker. Only
            for commands that open it on the socket handed over: a plain torch script opens the port
            itself, and can do so only while nobody listens there.
        node: This host among several; ``None`` for a team on this host alone.

    Returns:
        The first failing rank's exit code (1 if it was killed); 128 + the signal's number after a
        stop by signal; else 0.

    Raises:
        ConfigError: ``nproc`` or ``port`` is impossible.
        LaunchError: The port is in use, another host did not come, or a rank could not be started.
    """
    check_nproc(nproc)
    if node is not None:
        ranks, store, peers = meet(node, nproc, store_waits=store_waits)
    else:
        store, peers = bind_store(port, listen=store_waits), Peers()
        ranks = LocalRanks(count=nproc, world_size=nproc, port=store.getsockname()[1])
    with peers, SignalQueue() as signals:
        launcher = _Launcher(signals, peers, grace_s)
        launcher.run(command, ranks, store, os.environ, {})
        return launcher.conclude()


class _Launcher(TerminalSupervisor):
    """Passes signals on, and what the launchers of other machines say."""

    def __init__(self, signals: SignalQueue, peers: Peers, grace_s: float) -> None:
        super().__init__(signals, grace_s)
        self._peers = peers
        self._failure_elsewhere = ""
        self._ended_elsewhere: set[int] = set()
        self._unreached: list[str] = []

    def conclude(self) -> int:
        """Say why the run failed, if it has; returns the launcher's exit code."""
        code, words = judge(self.children, self._stop_signal, "\n".join(self._unreached))
        if not words:
            words = self._failure_elsewhere
            code = code or int(bool(words))
        if words:
            say(words, end="")
        return code

    @property
    def _requests(self) -> Sequence[int]:
        return [self._signals.fileno(), *self._peers.filenos()]

    def _before_stop(self, signum: signal.Signals) -> None:
        self._peers.tell({"stop": int(signum)})

    def _heed(self) -> None:
        self._heed_signals()
        for message in self._peers.hear():
            self._on_message(message)
        for name in self._peers.take_lost():
            words = (
                f"the connection to {name} broke off at {clock_time(time.time())}: the link to "
                "that machine is cut, or the machine or its launcher has gone"
            )
            self._unreached.append(f"{words}; check both, and start every machine's part again")
            if self._deadline is None:
                say(f"evener: {words}; ranks wait for one another until their timeout_s")

    def _on_message(self, message: Message) -> None:
        """What the launcher of another machine says."""
        stop, failed, ended = (message.get(name) for name in ("stop", "failed", "ended"))
        if isinstance(ended, int):
            self._ended_elsewhere.add(ended)
        if self._deadline is not None:
            return
        if stop in {int(signum) for signum in (*STOPPING, signal.SIGHUP)}:
            self._stop(signal.Signals(stop), f"{signal.Signals(stop).name} on another machine")
        elif isinstance(failed, list) and failed and all(type(rank) is int for rank in failed):
            self._fail_elsewhere(
                f"the run failed on another machine, which has {name_ranks(failed)}; its output "
                "says why"
            )

    def _fail_elsewhere(self, words: str) -> None:
        self._failure_elsewhere = f"error: {words}\n"
        self._ask_to_stop(signal.SIGTERM)

    def _look_after(self, child: Child) -> None:
        super()._look_after(child)
        if child.has_ended and child.code == 0:
            self._peers.tell({"ended": child.rank})

    def _decide(self) -> None:
        self._heed()
        self._heed_stopped_ranks()
        waiting = [c.rank for c in self._alive if c.place == JOINING]
        self._find_deserters(waiting)
        if self._deadline is not None:
            return
        if waiting and self._ended_elsewhere:
            gone = name_ranks([*self._ended_elsewhere])
            self._fail_elsewhere(
                f"{gone} on another machine ended with exit code 0{_waited(waiting)}"
            )
        elif self._failed_for_sure():
            self._peers.tell({"failed": [child.rank for child in self.children]})
            self._ask_to_stop(signal.SIGTERM)

    def _heed_stopped_ranks(self) -> None:
        """Stop the run if a rank ends by a signal that this launcher did not send."""
        for child in self.children:
            signum = child.stop_signal
            if signum is None or child.signals:
                continue
            if self._deadline is None:
                self._before_stop(signum)
                self._stop(signum, f"{child.who} has stopped ({signum.name})")
            if self._stop_signal is not None:  # else another rank has failed before
                child.signals.add(signum)

    def _find_deserters(self, waiting: Sequence[int]) -> None:
        """Find ranks that others wait for, and that cannot come any more."""
        for child in self.children:
            if child.desertion or child.signals:
                continue
            if child.is_another_program and (waiting or child.place in (JOINING, JOINED)):
                child.desert(f"{ANOTHER_PROGRAM}, or after ddp.close()")
            elif waiting and child.has_ended and not child.failed:
                child.desert(f"ended with exit code 0{_waited(waiting)}")


def _waited(waiting: Sequence[int]) -> str:
    return (
        f" while {name_ranks(waiting)} waited for it in Ddp.setup; let every rank go through the "
        "whole script, and call Ddp.setup as often as the others"
    )


if __name__ == "__main__":
    code = run_child(lambda: launch(sys.argv[2:], nproc=int(sys.argv[1])))
    end_in_silence()
    sys.exit(code)
