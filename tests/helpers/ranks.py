"""Runs a function of a test on several ranks, each a real process.

    def add(rank: Rank, a: int) -> int:
        return rank.rank + a

    assert run_ranks(add, 3, 10) == [10, 11, 12]

``run_ranks`` wants every rank to return; ``run_ranks_to_end`` tells what became of each, for ranks
that are meant to raise, die or hang; ``RankTeam`` lets the test act while they run. Ranks are
forked from one process that has imported torch (milliseconds per rank, not seconds). Whatever
happens, no rank outlives the call. A time-out first prints the stacks of all threads of all ranks.
"""

import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import cloudpickle

from evener.comm.addresses import bind
from helpers.forking import Zygote, is_stopped, signal_is_caught
from helpers.limits import PATIENCE_S

TESTS = Path(__file__).resolve().parent.parent
END_TIMEOUT_S = 30.0
MAX_OUTPUT_BYTES = 100_000


class RanksFailedError(AssertionError):
    """Some rank did not do what the test wants; the message holds every rank's story."""


@dataclass
class Rank:
    """What a rank is told: its place, and a line to the test.

    The environment says the same as that of `evener launch` (RANK, WORLD_SIZE, LOCAL_RANK,
    MASTER_PORT, …). Nobody listens on ``port``, which is kept for rank 0's coordinator.
    """

    rank: int
    world_size: int
    address: str
    port: int
    _channel: Connection | None = field(default=None, repr=False)

    def send(self, value: object) -> None:
        """Tells the test something: ``team.receive(rank)`` returns it."""
        assert self._channel is not None
        self._channel.send_bytes(b"M" + cloudpickle.dumps(value))

    def receive(self, timeout_s: float = PATIENCE_S) -> Any:
        """Waits for what the test sends with ``team.send(rank, value)``."""
        assert self._channel is not None
        if not self._channel.poll(timeout_s):
            raise TimeoutError(f"rank {self.rank} heard nothing from the test for {timeout_s} s")
        return pickle.loads(self._channel.recv_bytes())

    def connect(self, *, backend: str = "gloo", timeout_s: float = PATIENCE_S) -> Any:
        """The evener communicator of this team; "shared" is what "auto" takes on one host.

        "hosts 2+1" is what it takes if the third rank is on another host than the first two.
        """
        from evener.comm import host_leaders, shared
        from evener.team.environment import DistributedTrainConfig
        from evener.team.fixed import meet

        place = DistributedTrainConfig.of_rank(
            self.rank,
            self.world_size,
            coordinator_addr=self.address,
            coordinator_port=self.port,
        )
        comm, _ = meet(place, timeout_s)
        failure = ""
        if backend == "nccl":
            failure = comm.add_nccl()
        elif backend == "shared":
            comm, failure = shared.share_memory(comm)
        elif backend.startswith("hosts"):
            sizes = map(int, backend.removeprefix("hosts ").split("+"))
            places = [f"host {number}" for number, size in enumerate(sizes) for _ in range(size)]
            comm, _ = host_leaders.connect_hosts(comm, places[self.rank])
        assert not failure, failure
        return comm


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a rank; exactly one of returned, raised, died, exited, stopped is true."""

    rank: int
    returned: bool = False
    value: Any = None
    exception: BaseException | None = None
    traceback: str = ""
    died_of: signal.Signals | None = None
    exit_code: int | None = None  # it ended by itself without returning or raising
    stopped: bool = False  # it was stopped (SIGSTOP) when all others had ended
    output: str = field(default="", repr=False)

    def story(self) -> str:
        """For people: what became of it, and what it printed."""
        if self.returned:
            end = "returned"
        elif self.exception is not None:
            end = f"raised\n{self.traceback.rstrip()}"
        elif self.died_of is not None:
            end = f"died of {self.died_of.name}"
        elif self.stopped:
            end = "was stopped"
        else:
            end = f"exited with status {self.exit_code}"
        said = f"\nit printed:\n{self.output.rstrip()}" if self.output.strip() else ""
        return f"── rank {self.rank} {end}{said}"


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = PATIENCE_S,
    env: dict[str, str] | None = None,
) -> list[Any]:
    """Returns what ``function(rank: Rank, *args)`` returned, by rank; raises if any did not.

    Args:
        function: A function of the test module, or a closure; it and ``args`` are pickled.
        world_size: Number of processes.
        *args: The same for every rank.
        timeout_s: For all of them together, from the start.
        env: Added to the environment of the ranks. OMP_NUM_THREADS is 1 and cannot be changed.

    Raises:
        RanksFailedError: With each rank's traceback or signal, and its output.
    """
    outcomes = run_ranks_to_end(function, world_size, *args, timeout_s=timeout_s, env=env)
    if not all(outcome.returned for outcome in outcomes):
        failed = RanksFailedError(
            "\n".join(["not every rank returned", *map(Outcome.story, outcomes)])
        )
        raise failed from next((o.exception for o in outcomes if o.exception is not None), None)
    return [outcome.value for outcome in outcomes]


def run_ranks_to_end(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = PATIENCE_S,
    env: dict[str, str] | None = None,
) -> list[Outcome]:
    """As ``run_ranks``, but tells how each rank ended. Only a time-out raises.

    A rank that has stopped itself (SIGSTOP) is killed when all others have ended.
    """
    with RankTeam(function, world_size, *args, env=env) as team:
        return team.wait(timeout_s)


class RankTeam:
    """Ranks that run while the test goes on; a context manager, at whose end they are gone."""

    def __init__(
        self,
        function: Callable[..., Any],
        world_size: int,
        *args: Any,
        env: dict[str, str] | None = None,
    ) -> None:
        self.world_size = world_size
        self._zygote = Zygote.get()  # before the files: it must not inherit them
        self._outcomes: dict[int, Outcome] = {}
        self._messages: list[list[Any]] = [[] for _ in range(world_size)]
        self._replies: dict[int, tuple[bytes, Any]] = {}
        self._silent: set[int] = set()  # these will send no more
        self._pids: list[int] = []
        self._channels: list[Connection] = []
        self._reserved = bind("127.0.0.1", 0)
        self._outputs = [tempfile.TemporaryFile() for _ in range(world_size)]
        try:
            self._start(function, args, env or {})
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # pytest's own time-out, Ctrl-C, a failed assertion: where are the ranks?
        if kind is not None and not issubclass(kind, RanksFailedError):
            print(self._stacks(), file=sys.stderr)
        elif kind is None:
            for _, outcome in sorted(self._outcomes.items()):
                if outcome.output.strip():
                    print(outcome.story())  # pytest shows it if the test fails after all
        self.close()

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids, by rank."""
        return tuple(self._pids)

    def send_signal(self, rank: int, number: int) -> None:
        """Sends a signal, such as SIGKILL, SIGSTOP or SIGCONT."""
        if rank not in self._outcomes:
            with suppress(ProcessLookupError):  # it may be reaped at any moment
                os.kill(self._pids[rank], number)

    def send(self, rank: int, value: object) -> None:
        """Answers ``rank.receive()``."""
        self._channels[rank].send_bytes(cloudpickle.dumps(value))

    def receive(self, rank: int, timeout_s: float = PATIENCE_S) -> Any:
        """Waits for what the rank sends with ``rank.send(value)``."""
        deadline_s = time.monotonic() + timeout_s
        while not self._messages[rank]:
            if rank in self._outcomes:
                raise RanksFailedError(
                    f"it ended instead of sending\n{self._outcomes[rank].story()}"
                )
            if time.monotonic() > deadline_s:
                raise RanksFailedError(
                    f"rank {rank} sent nothing in {timeout_s} s\n{self._stacks()}"
                )
            self._pump(deadline_s - time.monotonic())
        return self._messages[rank].pop(0)

    def wait(
        self, timeout_s: float = PATIENCE_S, ranks: Sequence[int] | None = None
    ) -> list[Outcome]:
        """Waits until these ranks (all of them) have ended.

        Raises:
            RanksFailedError: Some went on longer; the message holds the stacks of all.
        """
        wanted = list(range(self.world_size)) if ranks is None else list(ranks)
        deadline_s = time.monotonic() + timeout_s
        while missing := [r for r in wanted if r not in self._outcomes]:
            remaining_s = deadline_s - time.monotonic()
            if ranks is None and all(is_stopped(self._pids[r]) for r in missing):
                self._end_stopped(missing)
            elif remaining_s <= 0:
                raise RanksFailedError(
                    f"ranks {missing} had not ended after {timeout_s} s\n{self._stacks()}"
                )
            else:
                # Nothing tells of a process that stops: look again now and then.
                self._pump(min(remaining_s, 0.25))
        return [self._outcomes[r] for r in wanted]

    def close(self) -> None:
        """Kills what is left and waits for its end."""
        deadline_s = time.monotonic() + END_TIMEOUT_S
        for rank in range(len(self._pids)):
            self.send_signal(rank, signal.SIGKILL)
        while len(self._outcomes) < len(self._pids) and time.monotonic() < deadline_s:
            self._pump(deadline_s - time.monotonic())
        for thing in [*self._channels, *self._outputs, self._reserved]:
            thing.close()
        if len(self._outcomes) < len(self._pids):
            Zygote.shut_down()  # takes all of its ranks along
            raise RanksFailedError(f"ranks {self._pids} could not be killed")

    def _start(
        self, function: Callable[..., Any], args: Sequence[Any], env: dict[str, str]
    ) -> None:
        module = sys.modules[function.__module__]
        port = self._reserved.getsockname()[1]
        for r in range(self.world_size):
            here, there = socket.socketpair()
            self._channels.append(Connection(here.detach()))
            with there:
                self._pids.append(self._zygote.fork([there.fileno(), self._outputs[r].fileno()]))
        for r, channel in enumerate(self._channels):
            rank = Rank(r, self.world_size, "127.0.0.1", port)
            job = {
                "environment": os.environ | launch_variables(rank) | env,
                "folder": str(Path.cwd()),
                "path": sys.path,
                "module": module.__name__,
                "module_file": file_to_load(getattr(module, "__file__", None)),
                "warning_filters": warnings.filters,
            }
            channel.send_bytes(cloudpickle.dumps(job))
            channel.send_bytes(cloudpickle.dumps((function, rank, args)))

    def _pump(self, timeout_s: float) -> bool:
        """Takes in what ranks have sent and which have ended; false if nothing came in time."""
        talking = {c: r for r, c in enumerate(self._channels) if r not in self._silent}
        ready = wait([*talking, self._zygote.requests], max(timeout_s, 0.0))
        for thing in ready:
            if isinstance(thing, Connection):
                self._read(talking[thing])
        if self._zygote.requests in ready:
            self._zygote.read()
        for rank, pid in enumerate(self._pids):
            if (
                rank not in self._outcomes
                and (status := self._zygote.statuses.pop(pid, None)) is not None
            ):
                while rank not in self._silent and self._channels[rank].poll():
                    self._read(rank)
                self._outcomes[rank] = self._outcome(rank, status)
        return bool(ready)

    def _read(self, rank: int) -> None:
        try:
            message = self._channels[rank].recv_bytes()
        except (EOFError, OSError):
            self._silent.add(rank)
            return
        content = pickle.loads(message[1:])
        if message[:1] == b"M":
            self._messages[rank].append(content)
        else:
            self._replies[rank] = (message[:1], content)

    def _outcome(self, rank: int, status: int) -> Outcome:
        output = self._output(rank)
        kind, content = self._replies.get(rank, (b"", None))
        if os.WIFSIGNALED(status):
            number = signal.Signals(os.WTERMSIG(status))
            return Outcome(rank=rank, died_of=number, output=output)
        if os.WEXITSTATUS(status) or not kind:
            return Outcome(rank=rank, exit_code=os.WEXITSTATUS(status), output=output)
        if kind == b"V":
            return Outcome(rank=rank, returned=True, value=content, output=output)
        error_type, error_args, attributes, text = content
        error = error_type.__new__(error_type, *error_args)
        error.args = error_args
        error.__dict__.update(attributes)
        return Outcome(rank=rank, exception=error, traceback=text, output=output)

    def _end_stopped(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            self.send_signal(rank, signal.SIGKILL)
        while any(rank not in self._outcomes for rank in ranks):
            self._pump(END_TIMEOUT_S)
        for rank in ranks:
            self._outcomes[rank] = Outcome(rank=rank, stopped=True, output=self._output(rank))

    def _output(self, rank: int) -> str:
        # pread: the rank writes through the same file description, whose position must stay.
        descriptor = self._outputs[rank].fileno()
        size = os.fstat(descriptor).st_size
        start = max(0, size - MAX_OUTPUT_BYTES)
        return os.pread(descriptor, size - start, start).decode(errors="replace")

    def _stacks(self) -> str:
        """What each rank is doing now: the stack of every thread, after what it has printed."""
        running = [r for r in range(len(self._pids)) if r not in self._outcomes]
        said = {r: self._output(r) for r in running}
        asked = [r for r in running if signal_is_caught(self._pids[r], signal.SIGUSR2)]
        for r in asked:
            os.kill(self._pids[r], signal.SIGUSR2)
            os.kill(self._pids[r], signal.SIGCONT)  # a stopped one writes nothing
        # They write in many small pieces: until all have begun, and no more comes.
        deadline_s, before, now = time.monotonic() + END_TIMEOUT_S, None, said
        while time.monotonic() < deadline_s and (
            before != now or any(now[r] == said[r] for r in asked if r not in self._outcomes)
        ):
            self._pump(0.5)
            before, now = now, {r: self._output(r) for r in running}
        lines = []
        for r in range(len(self._pids)):
            if r in self._outcomes:
                lines.append(self._outcomes[r].story())
            else:
                lines.append(f"── rank {r} (pid {self._pids[r]}) is here:\n{self._output(r)}")
        return "\n".join(lines)


def be_script(_: Rank, script: str, *arguments: str) -> int:
    """What a rank's process does when evener's launcher has started a script in it.

    Returns:
        The exit code. A failure is printed, as there is no launcher that listens.
    """
    from evener.team.child import run_child
    from evener.team.script import run_program

    os.environ["EVENER_PARENT_PID"] = str(os.getppid())
    return run_child(lambda: run_program([script, *arguments]))


def launch_variables(rank: Rank) -> dict[str, str]:
    """What evener's launcher would tell this rank."""
    return {
        "EVENER_LAUNCHED": "1",
        "LOCAL_RANK": str(rank.rank),
        "LOCAL_WORLD_SIZE": str(rank.world_size),
        "MASTER_ADDR": rank.address,
        "MASTER_PORT": str(rank.port),
        "OMP_NUM_THREADS": "1",
        "RANK": str(rank.rank),
        "WORLD_SIZE": str(rank.world_size),
    }


def file_to_load(module_file: str | None) -> str | None:
    """The file of a test module, which no rank could import by name; None for all others."""
    if module_file is None:
        return None
    file = Path(module_file).resolve()
    importable = any(file.is_relative_to(Path(p).resolve()) for p in sys.path if p)
    return None if importable and TESTS / "helpers" in file.parents else str(file)
