"""How long a sum over ranks takes, for every way in which ranks of one host exchange.

    python benchmarks/allreduce.py --json allreduce.json
    python benchmarks/allreduce.py --quick

Ways: ``shared``, evener's exchange through shared memory (left out, with the reason, where it
cannot be formed); ``gloo``, evener's over Gloo's sockets; ``torch.gloo``, plain
``dist.all_reduce``; ``threads``, evener's between threads of one process. ``memcpy`` is not an
exchange: each rank copies as many bytes once, all at the same time. All ways take turns in each
round. Data are float32; each rank computes on one thread and is pinned to no core.

Three conditions:

- ``tight``: one call after another. ``seconds`` is the slowest rank's time over its calls.
- ``skewed``: ranks arrive 0.5 to 2 ms apart, as they do after computing. ``seconds`` is from the
  last arrival to the last exit of a call.
- ``busy``: as ``tight``, while another program keeps one core busy.

``seconds`` is the median over rounds (over calls where they are skewed) and ``speedup`` that of
``gloo`` over this, from the same round; ``_90`` is the 5th and 95th percentile.
"""

import argparse
import os
import random
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from machine import load_before, write_report
from options import make_parser, numbers, some_of
from rounds import TIMEOUT_S, Team, is_rank, run_ranks, shuffled
from tables import ratios, spread, text_of
from torch import Tensor

from evener.comm.base import Communicator
from evener.comm.threads import ThreadTeam
from evener.team.backends import connect_team

KIB = 1024
SIZES = tuple(4**n * KIB for n in (1, 3, 5, 6, 7, 8, 9))  # 4 KiB to 256 MiB
SKEWED_SIZES = (64 * KIB, 1024 * KIB)
BUSY_SIZES = (64 * KIB, 1024 * KIB, 16384 * KIB)
QUICK_SIZES = (64 * KIB, 1024 * KIB, 65536 * KIB)
SKEW_S = (0.5e-3, 2e-3)
CONDITIONS = ("tight", "skewed", "busy")
#: Most calls of one turn, where a call takes next to no time.
MAX_CALLS = 2000


def main() -> int:
    """Starts teams of each number of ranks; prints and writes what they measured."""
    arguments = parse_arguments()
    if is_rank():
        measure(Team(), arguments)
        return 0
    before = load_before()
    rows = [row for count in arguments.ranks for row in run_ranks(count, threads=1)]
    print(text_of(rows))
    write_report(arguments, before, rows)
    return 0


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--ranks", type=numbers, default=[2, 4], metavar="N,...")
    parser.add_argument(
        "--bytes",
        type=numbers,
        metavar="N,...",
        help="sizes for all conditions, in place of each's",
    )
    parser.add_argument("--conditions", type=some_of(CONDITIONS), default=list(CONDITIONS))
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--turn-s", type=float, default=0.05, help="length of a tight turn, about")
    parser.add_argument("--quick", action="store_true", help="7 rounds, 3 sizes")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds = 7
    return arguments


class Way(ABC):
    """A way to sum, on this rank; made for one size."""

    #: Whether it takes part where ranks arrive one after another, and is checked.
    is_exchange = True

    @abstractmethod
    def turn(self, calls: int) -> float:
        """Makes so many calls; returns this rank's seconds for each."""

    @abstractmethod
    def call(self) -> None:
        """Makes one call."""

    @abstractmethod
    def check(self) -> None:
        """Sums ones over the ranks and raises where the sum is wrong."""


class Summing(Way):
    """One tensor of this rank, summed with those of the other processes."""

    def __init__(self, team: Team, tensor: Tensor) -> None:
        self.team, self.tensor = team, tensor

    def turn(self, calls: int) -> float:
        """See ``Way``."""
        return timed(self.call, calls)

    def check(self) -> None:
        """See ``Way``; afterwards the tensor is zero, and stays so."""
        check_sum(self.tensor, self.team.rank, self.team.world_size, self.call)


class EvenerSum(Summing):
    """By a communicator of evener's, in the memory that it wants."""

    def __init__(self, team: Team, comm: Communicator, num_bytes: int) -> None:
        super().__init__(team, comm.allocate(num_bytes // 4, torch.float32, torch.device("cpu")))
        self.comm = comm

    def call(self) -> None:
        """See ``Way``."""
        self.comm.all_reduce(self.tensor, what="benchmark")


class TorchSum(Summing):
    """By ``dist.all_reduce`` over Gloo."""

    def call(self) -> None:
        """See ``Way``."""
        dist.all_reduce(self.tensor)


class Copy(Summing):
    """No exchange: each rank copies its tensor."""

    is_exchange = False

    def __init__(self, team: Team, tensor: Tensor) -> None:
        super().__init__(team, tensor.fill_(1.0))
        self.source = torch.ones_like(tensor)

    def call(self) -> None:
        """See ``Way``."""
        self.tensor.copy_(self.source)

    def check(self) -> None:
        """Nothing is summed."""


class ThreadSum(Way):
    """Ranks that are threads of the first process; the other processes wait meanwhile."""

    is_exchange = False

    def __init__(self, team: Team, num_bytes: int) -> None:
        self.alone = team.rank == 0
        self.count = team.world_size
        if self.alone:
            threads = ThreadTeam(self.count, timeout_s=TIMEOUT_S)
            self.comms = [threads.communicator(rank) for rank in range(self.count)]
            self.tensors = [torch.zeros(num_bytes // 4) for _ in range(self.count)]

    def turn(self, calls: int) -> float:
        """See ``Way``."""
        together = threading.Barrier(self.count)

        def rank_turn(rank: int) -> float:
            together.wait(TIMEOUT_S)
            return timed(lambda: self._sum(rank), calls)

        return max(self._on_threads(rank_turn), default=0.0)

    def call(self) -> None:
        """See ``Way``."""
        self.turn(1)

    def check(self) -> None:
        """See ``Way``."""
        self._on_threads(
            lambda rank: check_sum(self.tensors[rank], rank, self.count, lambda: self._sum(rank))
        )

    def _sum(self, rank: int) -> None:
        self.comms[rank].all_reduce(self.tensors[rank], what="benchmark")

    def _on_threads(self, work: Callable[[int], Any]) -> list[Any]:
        if not self.alone:
            return []
        with ThreadPoolExecutor(self.count) as pool:
            return list(pool.map(work, range(self.count)))


def check_sum(tensor: Tensor, rank: int, world_size: int, call: Callable[[], None]) -> None:
    """Sums ``rank + 1`` over the ranks, raises where the sum is wrong, and leaves zeros."""
    tensor.fill_(rank + 1.0)
    call()
    wanted = world_size * (world_size + 1) / 2
    if not bool((tensor == wanted).all()):
        raise SystemExit(f"rank {rank}: a sum of {tensor.numel()} floats is not {wanted}")
    # Repeated sums of anything else would overflow.
    tensor.zero_()
    call()


def timed(call: Callable[[], None], calls: int) -> float:
    """Seconds of a call, over so many."""
    started_s = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - started_s) / calls


def measure(team: Team, arguments: argparse.Namespace) -> None:
    """One rank: every condition and size, all ways in turns."""
    with closing(connect(team, "gloo")) as gloo, closing(connect(team, "cpu")) as shared:
        comms = {"gloo": gloo}
        if shared.backend == "shared":
            comms["shared"] = shared
        else:
            team.tell(f"{team.world_size} ranks: shared is left out ({shared.reason})")
        rows = []
        for condition in arguments.conditions:
            with busy_core(team.rank == 0 and condition == "busy"):
                for num_bytes in sizes_of(condition, arguments):
                    ways = make_ways(team, comms, num_bytes)
                    seconds = take_turns(team, ways, condition, arguments)
                    rows += make_rows(seconds, team.world_size, num_bytes, condition)
                    team.tell(f"{team.world_size} ranks, {size_text(num_bytes)}, {condition}: done")
        team.finish(rows)


def sizes_of(condition: str, arguments: argparse.Namespace) -> Sequence[int]:
    """Bytes for which a condition is measured."""
    if arguments.bytes:
        return list(arguments.bytes)
    sizes = {"tight": SIZES, "skewed": SKEWED_SIZES, "busy": BUSY_SIZES}[condition]
    return [s for s in sizes if not arguments.quick or s in QUICK_SIZES]


def connect(team: Team, backend: str) -> Communicator:
    """A communicator of evener's between the ranks, as ``Ddp.setup`` forms it."""
    comm, _ = connect_team(team.environment(), backend, "sync", torch.device("cpu"), TIMEOUT_S)
    return comm


def make_ways(team: Team, comms: Mapping[str, Communicator], num_bytes: int) -> dict[str, Way]:
    """All ways, ready for one size."""
    ways: dict[str, Way] = {name: EvenerSum(team, comm, num_bytes) for name, comm in comms.items()}
    ways["torch.gloo"] = TorchSum(team, torch.zeros(num_bytes // 4))
    ways["threads"] = ThreadSum(team, num_bytes)
    ways["memcpy"] = Copy(team, torch.zeros(num_bytes // 4))
    for way in ways.values():
        team.barrier()
        way.check()
    return ways


def take_turns(
    team: Team, ways: Mapping[str, Way], condition: str, arguments: argparse.Namespace
) -> dict[str, list[float]]:
    """Seconds of a call by way and round."""
    if condition == "skewed":
        names = [name for name, way in ways.items() if way.is_exchange]
    else:
        names = list(ways)
    calls = {name: calls_in_turn(team, ways[name], arguments.turn_s) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number, order in enumerate(shuffled(names, arguments.rounds)):
        for name in order:
            team.barrier()
            if condition == "skewed":
                seconds[name] += skewed_turn(team, ways[name], number)
            else:
                mine = ways[name].turn(calls[name])
                seconds[name].append(max(row[0] for row in team.gather([mine])))
    return seconds


def calls_in_turn(team: Team, way: Way, turn_s: float) -> int:
    """How many calls last as long as a turn shall, by a trial."""
    seconds = 0.0
    for calls in (1, 4):  # the first pays for connections and pages
        team.barrier()
        seconds = max(row[0] for row in team.gather([way.turn(calls)]))
    return team.first(max(1, min(MAX_CALLS, round(turn_s / max(seconds, 1e-9)))))


def skewed_turn(team: Team, way: Way, number: int) -> list[float]:
    """Some calls to which ranks come one after another: from last arrival to last exit."""
    generator = random.Random(number)  # the same delays on every rank
    times = []
    for _ in range(5):
        delays = [generator.uniform(*SKEW_S) for _ in range(team.world_size)]
        delays[generator.randrange(team.world_size)] = 0.0
        team.barrier()
        pass_time(delays[team.rank], spin=team.world_size <= len(os.sched_getaffinity(0)))
        # The clock is that of the whole machine, so that of all ranks.
        times.append(time.monotonic())
        way.call()
        times.append(time.monotonic())
    rows = team.gather(times)
    return [
        max(row[i + 1] for row in rows) - max(row[i] for row in rows)
        for i in range(0, len(times), 2)
    ]


def pass_time(seconds: float, *, spin: bool) -> None:
    """Lets time pass: computing, as a rank does, or asleep where cores do not suffice for it."""
    end_s = time.monotonic() + seconds
    if not spin:
        time.sleep(seconds)
    while time.monotonic() < end_s:
        pass


@contextmanager
def busy_core(wanted: bool) -> Iterator[None]:
    """Keeps the last usable core busy with another program, where wanted."""
    if not wanted:
        yield
        return
    core = max(os.sched_getaffinity(0))
    text = (
        f"import os; os.sched_setaffinity(0, [{core}])\nwhile os.getppid() > 1: sum(range(100000))"
    )
    with subprocess.Popen([sys.executable, "-c", text]) as program:
        try:
            yield
        finally:
            program.kill()


def make_rows(
    seconds: Mapping[str, Sequence[float]], ranks: int, num_bytes: int, condition: str
) -> list[dict[str, Any]]:
    """A row for each way."""
    return [
        {
            "name": name,
            "ranks": ranks,
            "bytes": num_bytes,
            "condition": condition,
            "samples": len(values),
            **spread("seconds", values),
            **spread("speedup", ratios(seconds["gloo"], values)),
        }
        for name, values in seconds.items()
    ]


def size_text(num_bytes: int) -> str:
    """``64 KiB``."""
    kib = num_bytes / KIB
    return f"{kib:g} KiB" if kib < KIB else f"{kib / KIB:g} MiB"


if __name__ == "__main__":
    raise SystemExit(main())
