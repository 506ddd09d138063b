"""Try a backend before training relies on it, in throw-away processes, one per rank.

NCCL on new machines may hang, end the process or add up wrong numbers. Causes are peer-to-peer
copies behind an IOMMU, a firewall, or mixed drivers. None of that can be undone in the process that
trains. So each rank starts a child that loads nothing of the user's, forms the group and exchanges
tensors whose result is known. The ranks agree on the outcome over the connection that they have.

``python -m evener.comm.preflight`` is the child. It ends when its standard input closes, which
always happens when the parent dies.
"""

import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from enum import IntEnum
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Final, NamedTuple

import torch

from evener.comm.base import Communicator
from evener.comm.messages import first_line, name_ranks
from evener.devices import kind_of
from evener.errors import CollectiveTimeoutError, LaunchError, PeerLostError

#: Bytes of the tensors that are exchanged.
SIZES: Final = (1 << 10, 1 << 20, 32 << 20)

_LONGEST_S = 120.0  # a process that loads torch and forms an NCCL group takes a tenth of it
_ROUND_S = 0.2  # how often ranks exchange the progress of their children
_FOLLOW_UP_S = 2.0  # a child that lost its peer may say so before the peer's end is noticed
_SHORTEST_PART_BYTES = 1 << 10  # less travels with the announcement, over Gloo


class _ChildState(IntEnum):
    """The progress of a child; the number travels in a row."""

    RUNNING = 0
    PASSED = 1
    FAILED = 2
    LOST_PEER = 3
    TIMED_OUT = 4


class PreflightJob(NamedTuple):
    """The job of a child.

    Attributes:
        rank: Its rank, that of its parent.
        world_size: Number of ranks.
        place: Where the children find one another, in terms of ``connect``.
        device: Where tensors lie, such as ``cuda:0``.
        connect: See ``run_preflight``.
        timeout_s: Longest wait in one exchange.
    """

    rank: int
    world_size: int
    place: str
    device: str
    connect: str
    timeout_s: float


class PreflightResult(NamedTuple):
    """What the ranks agreed on.

    Attributes:
        seconds: Its duration.
        failure: Which ranks failed and how, for people; empty if all passed.
    """

    seconds: float
    failure: str


def run_preflight(
    comm: Communicator,
    place: str,
    device: torch.device,
    *,
    connect: str,
    timeout_s: float,
) -> PreflightResult:
    """Try to exchange over NCCL in child processes; all ranks call it together.

    When it returns or raises, the children and their memory on the device are gone.

    Args:
        comm: Over which the ranks agree.
        place: Where the children find one another, in terms of ``connect``; it may be secret.
        device: Where this rank computes.
        connect: What connects the children, as ``MODULE:FUNCTION``: it takes their rank, their
            number, ``place``, the backend and the longest wait.
        timeout_s: Longest that the children may take; at most two minutes of it are used.

    Raises:
        LaunchError: A child did not end in time; on every rank, and names whose.
    """
    limit_s = min(timeout_s, _LONGEST_S)
    job = PreflightJob(
        rank=comm.rank,
        world_size=comm.world_size,
        place=place,
        device=str(device),
        connect=connect,
        timeout_s=limit_s / 2,  # a child that waits can say for whom, before its own time is up
    )
    started = time.monotonic()
    child = _TrialChild(job)
    try:
        rows = _watch(comm, child, started, limit_s)
        stories = comm.all_gather_bytes(child.story.encode(), what="outcome of the NCCL preflight")
    finally:
        child.end()
    told = [story.decode(errors="replace") for story in stories]
    return PreflightResult(max(row[2] for row in rows), _judge(rows, told, limit_s))


def _watch(
    comm: Communicator, child: "_TrialChild", started: float, limit_s: float
) -> list[list[float]]:
    """Exchange rows of state, step and seconds until they decide; all ranks see the same rows."""
    lost_at: float | None = None
    while True:
        child.look(_ROUND_S)
        row = [float(child.state), float(child.step), time.monotonic() - started]
        rows = comm.all_gather_rows(row, what="the NCCL preflight")
        states = {_ChildState(int(row[0])) for row in rows}
        waited_s = max(row[2] for row in rows)
        if states == {_ChildState.PASSED} or _ChildState.FAILED in states or waited_s >= limit_s:
            return rows
        if _ChildState.TIMED_OUT in states or _ChildState.LOST_PEER in states:
            # Another rank may know the cause.
            lost_at = waited_s if lost_at is None else lost_at
            if waited_s - lost_at >= _FOLLOW_UP_S:
                return rows


def _judge(rows: list[list[float]], told: list[str], limit_s: float) -> str:
    """Return what failed, for people; empty if all passed.

    Args:
        rows: State, step and seconds of each rank's child.
        told: What each child said last.
        limit_s: Longest that a child may take.

    Raises:
        LaunchError: A child hangs.
    """
    ranks = {state: [r for r, row in enumerate(rows) if row[0] == state] for state in _ChildState}
    if failed := ranks[_ChildState.FAILED]:
        return f"on {name_ranks(failed)}: {told[failed[0]]}"
    if waiting := ranks[_ChildState.TIMED_OUT]:
        raise LaunchError(_hang_message(told[waiting[0]]))
    if alone := ranks[_ChildState.LOST_PEER]:
        return f"on {name_ranks(alone)}: {told[alone[0]]}"
    if running := ranks[_ChildState.RUNNING]:
        least = min(rows[rank][1] for rank in running)
        behind = [rank for rank in running if rows[rank][1] == least]
        raise LaunchError(
            _hang_message(f"{name_ranks(behind)} after {limit_s:.0f} s in {told[behind[0]]!r}")
        )
    return ""


def _hang_message(where: str) -> str:
    return (
        f"the preflight of NCCL hangs ({where}); a firewall between the machines, a driver or the "
        "wrong NCCL_SOCKET_IFNAME may hold it up (NCCL_DEBUG=INFO tells more). Use backend='gloo' "
        "to exchange on the hosts, or backend='nccl' to skip the preflight (in a "
        "DistributedTrainConfig that is its comm_backend)"
    )


class _TrialChild:
    """The process that tries for this rank, as seen by its parent.

    Attributes:
        state: How far it is.
        step: Number of the exchange that it is in.
        story: Which that is, or how it ended, for people.
    """

    def __init__(self, job: PreflightJob) -> None:
        self.state = _ChildState.RUNNING
        self.step = 0
        self.story = "starting a process"
        self._process: subprocess.Popen[bytes] | None = None
        self._said, says = Pipe(duplex=False)
        try:
            # Output of libraries (NCCL_DEBUG) goes to standard error.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "evener.comm.preflight", str(says.fileno())],
                stdin=subprocess.PIPE,
                stdout=2,
                pass_fds=[says.fileno()],
            )
            # Everybody on this host can read the arguments of a process.
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(job).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            self.state, self.story = (
                _ChildState.FAILED,
                f"no process could be started ({error})",
            )
        finally:
            says.close()

    def look(self, patience_s: float) -> None:
        """Read the child's reports, and wait up to so many seconds for them."""
        if self._process is None or self.state is not _ChildState.RUNNING:
            time.sleep(patience_s)
        elif self._said.poll(patience_s):
            try:
                state, self.step, self.story = json.loads(self._said.recv_bytes())
                self.state = _ChildState(state)
            except (EOFError, OSError):
                code = self._process.wait()
                how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
                self.state = _ChildState.FAILED
                self.story = f"the process ended ({how}) in {self.story}"

    def end(self) -> None:
        """End the child, and release all of its resources."""
        self._said.close()
        if self._process is not None:
            self._process.kill()
            self._process.communicate()  # closes its standard input, and waits for its end


# ── in the child ─────────────────────────────────────────────────────────────────────────────────


class _WrongNumbersError(Exception):
    """An exchange gave other numbers than it should."""


def _exchange(
    comm: Communicator, device: torch.device, kind: str, num_bytes: int, what: str, timeout_s: float
) -> None:
    """Run an exchange of which each rank knows the result.

    Values depend on the rank and on the place in the tensor, and are whole numbers that float32
    holds exactly in whatever order they are added.

    Raises:
        _WrongNumbersError: The result is another one.
    """
    size = comm.world_size
    if kind == "all_gather":  # together they have so many bytes, or a little more
        num_bytes = max(_SHORTEST_PART_BYTES, num_bytes // size)
    pattern = (torch.arange(num_bytes // 4) % 127 + 1).float()
    factors = torch.arange(size) % 7 + 1
    values = (pattern * factors[comm.rank]).to(device)
    if kind == "all_reduce":
        comm.all_reduce(values, what=what, timeout_s=timeout_s)
        expected = pattern * factors.sum()
    elif kind == "broadcast":
        comm.broadcast(values, size - 1, what=what, timeout_s=timeout_s)
        expected = pattern * factors[-1]
    else:
        values = values.repeat(size)
        comm.all_gather_parts(values, what=what, timeout_s=timeout_s)
        expected = torch.outer(factors, pattern).view(-1)
    wrong = int((values.cpu() != expected).sum())
    if wrong:
        raise _WrongNumbersError(f"{wrong} of {expected.numel()} numbers are wrong in {what}")


def _in_words(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MiB" if num_bytes >= 1 << 20 else f"{num_bytes >> 10} KiB"


def _try_all(job: PreflightJob, tell: Callable[[str], None]) -> Communicator:
    """Run every exchange; return the connection, to be kept until the outcome has been told."""
    module, _, function = job.connect.partition(":")
    connect = getattr(importlib.import_module(module), function)
    device = torch.device(job.device)
    tell("selecting its device")
    kind_of(device).select(device)
    tell("forming the group")
    # The parent gives up earlier: it can name the rank that is behind, and a child alone cannot.
    comm: Communicator = connect(
        job.rank, job.world_size, job.place, backend="nccl", timeout_s=4 * job.timeout_s
    )
    for size in SIZES:
        for kind in ("all_reduce", "broadcast", "all_gather"):
            what = f"{kind} of {_in_words(size)}"
            tell(what)
            _exchange(comm, device, kind, size, what, job.timeout_s)
    tell("waiting for the other ranks")
    comm.barrier(what="the end of the preflight", timeout_s=job.timeout_s)
    return comm


def _run_child(job: PreflightJob, parent: Connection) -> None:
    step, story = 0, ""

    def tell(words: str, state: _ChildState = _ChildState.RUNNING) -> None:
        nonlocal step, story
        step, story = step + 1, words
        parent.send_bytes(json.dumps([state, step, words]).encode())

    try:
        # Ending an NCCL group may hang, too; the process is killed, which needs no end of it.
        kept = _try_all(job, tell)
    except CollectiveTimeoutError as error:
        tell(str(error), _ChildState.TIMED_OUT)
    except PeerLostError as error:
        tell(str(error), _ChildState.LOST_PEER)
    except _WrongNumbersError as error:
        tell(str(error), _ChildState.FAILED)
    except Exception as error:  # whatever a driver's library raises is an outcome
        tell(f"{type(error).__name__} in {story}: {first_line(error)}", _ChildState.FAILED)
    else:
        tell("passed", _ChildState.PASSED)
        del kept


def main() -> None:
    """Run the child: exchange, report to the parent, and wait to be ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears Ctrl-C, and ends this process
    parent, job = Connection(int(sys.argv[1])), PreflightJob(*json.loads(sys.stdin.readline()))
    signal.alarm(round(2 * job.timeout_s) + 60)  # by the kernel, if a driver holds all threads
    watcher = threading.Thread(target=_end_with_parent, daemon=True)
    watcher.start()
    _run_child(job, parent)
    watcher.join()  # peers may still be reading what this process has sent


def _end_with_parent() -> None:
    while os.read(0, 1):
        pass
    os._exit(0)


if __name__ == "__main__":
    main()
