"""How long a sum over ranks takes, for every way in which ranks of one host exchange.

    python benchmarks/allreduce.py --json allreduce.json
    python benchmarks/allreduce.py --quick

Ways: ``shared``, evener's exchange through shared memory (left out, with the reason, if it cannot
be formed); ``gloo``, evener's over Gloo's sockets; ``torch.gloo``, plain ``dist.all_reduce``.
``memcpy`` is not an exchange: each rank copies as many bytes once, all at the same time. Data are
float32; each rank computes on one thread and is pinned to no core.

Two conditions:

- ``tight``: one call after another. ``seconds`` is the slowest rank's time over its calls.
- ``skewed``: ranks arrive 0.5 to 2 ms apart, as they do after computing. ``seconds`` is from the
  last arrival to the last exit of a call.

``seconds`` is the median over rounds (over calls where they are skewed) and ``speedup`` that of
``gloo`` over this, from the same round; ``_90`` is the 5th and 95th percentile.
"""

import argparse
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing

import torch
import torch.distributed as dist
from report import (
    load_before,
    make_parser,
    numbers,
    ratios,
    some_of,
    spread,
    text_of,
    write_report,
)
from rounds import TIMEOUT_S, Team, is_rank, run_ranks, shuffled
from torch import Tensor

from evener.comm.base import Communicator
from evener.team.backends import connect_team

KIB = 1024
SIZES = {
    "tight": tuple(4**n * KIB for n in (1, 3, 5, 6, 7, 8, 9)),  # 4 KiB to 256 MiB
    "skewed": (64 * KIB, 1024 * KIB),
}
QUICK_SIZES = (64 * KIB, 1024 * KIB, 65536 * KIB)
SKEW_S = (0.5e-3, 2e-3)
#: Most calls of one turn, if a call takes next to no time.
MAX_CALLS = 2000

#: Makes one call.
Call = Callable[[], object]


def main() -> None:
    """Start teams of each number of ranks; print and write what they measured."""
    arguments = parse_arguments()
    if is_rank():
        measure(Team(), arguments)
        return
    before = load_before()
    rows = [row for count in arguments.ranks for row in run_ranks(count)]
    print(text_of(rows))
    write_report(arguments, before, rows)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--ranks", type=numbers, default=[2, 4], metavar="N,...")
    parser.add_argument("--bytes", type=numbers, metavar="N,...", help="for all conditions")
    parser.add_argument("--conditions", type=some_of(SIZES), default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--turn-s", type=float, default=0.05, help="length of a tight turn, about")
    parser.add_argument("--quick", action="store_true", help="7 rounds, 3 sizes")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds = 7
    return arguments


def measure(team: Team, arguments: argparse.Namespace) -> None:
    """Measure every condition and size, all ways in turns: one rank's part."""
    with closing(connect(team, "gloo")) as gloo, closing(connect(team, "cpu")) as shared:
        comms = {"gloo": gloo}
        if shared.backend == "shared":
            comms["shared"] = shared
        else:
            team.tell(f"{team.world_size} ranks: shared is left out ({shared.reason})")
        rows = []
        for condition in arguments.conditions:
            sizes = arguments.bytes or SIZES[condition]
            if arguments.quick and not arguments.bytes:
                sizes = [size for size in sizes if size in QUICK_SIZES]
            for num_bytes in sizes:
                ways = make_ways(team, comms, num_bytes)
                seconds = take_turns(team, ways, condition, arguments)
                facts = {"ranks": team.world_size, "bytes": num_bytes, "condition": condition}
                for name, values in seconds.items():
                    row = {"name": name, **facts, **spread("seconds", values)}
                    rows.append(row | spread("speedup", ratios(seconds["gloo"], values)))
                team.tell(f"{team.world_size} ranks, {num_bytes:,} bytes, {condition}: done")
        team.finish(rows)


def connect(team: Team, backend: str) -> Communicator:
    """Return a communicator of evener between the ranks, as ``Ddp.setup`` forms it."""
    comm, _ = connect_team(team.environment(), backend, "sync", torch.device("cpu"), TIMEOUT_S)
    return comm


def make_ways(team: Team, comms: Mapping[str, Communicator], num_bytes: int) -> dict[str, Call]:
    """Return all ways, ready for one size; the sums of exchanges are checked."""
    count, ways = num_bytes // 4, dict[str, Call]()

    def add(name: str, tensor: Tensor, call: Call) -> None:
        team.barrier()
        check_sum(tensor, team, call)
        ways[name] = call

    for name, comm in comms.items():
        tensor = comm.allocate(count, torch.float32, torch.device("cpu"))
        add(name, tensor, lambda t=tensor, c=comm: c.all_reduce(t, what="benchmark"))
    own = torch.zeros(count)
    add("torch.gloo", own, lambda: dist.all_reduce(own))
    source, target = torch.ones(count), torch.ones(count)
    ways["memcpy"] = lambda: target.copy_(source)
    return ways


def check_sum(tensor: Tensor, team: Team, call: Call) -> None:
    """Sum ``rank + 1`` over the ranks, raise if the sum is wrong, and leave zeros."""
    tensor.fill_(team.rank + 1.0)
    call()
    wanted = team.world_size * (team.world_size + 1) / 2
    if not bool((tensor == wanted).all()):
        raise SystemExit(f"rank {team.rank}: a sum of {tensor.numel()} floats is not {wanted}")
    # Repeated sums of anything else would overflow.
    tensor.zero_()
    call()


def take_turns(
    team: Team, ways: Mapping[str, Call], condition: str, arguments: argparse.Namespace
) -> dict[str, list[float]]:
    """Return the seconds of a call by way and round."""
    names = [name for name in ways if condition != "skewed" or name != "memcpy"]
    calls = {name: calls_in_turn(team, ways[name], arguments.turn_s) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number, order in enumerate(shuffled(names, arguments.rounds)):
        for name in order:
            if condition == "skewed":
                seconds[name] += skewed_turn(team, ways[name], number)
            else:
                seconds[name].append(tight_turn(team, ways[name], calls[name]))
    return seconds


def tight_turn(team: Team, call: Call, calls: int) -> float:
    """Return the slowest rank's seconds of a call, over so many."""
    team.barrier()
    started_s = time.perf_counter()
    for _ in range(calls):
        call()
    mine = (time.perf_counter() - started_s) / calls
    return max(row[0] for row in team.gather([mine]))


def calls_in_turn(team: Team, call: Call, turn_s: float) -> int:
    """Return how many calls last as long as a turn shall, by a trial."""
    tight_turn(team, call, 1)  # pays for connections and pages
    seconds = tight_turn(team, call, 4)
    return team.first(max(1, min(MAX_CALLS, round(turn_s / max(seconds, 1e-9)))))


def skewed_turn(team: Team, call: Call, number: int) -> list[float]:
    """Make calls to which ranks come one after another: from last arrival to last exit."""
    generator = random.Random(number)  # the same delays on every rank
    times = []
    for _ in range(5):
        delays = [generator.uniform(*SKEW_S) for _ in range(team.world_size)]
        delays[generator.randrange(team.world_size)] = 0.0
        team.barrier()
        end_s = time.monotonic() + delays[team.rank]
        if team.world_size > len(os.sched_getaffinity(0)):  # cores do not suffice to compute
            time.sleep(delays[team.rank])
        while time.monotonic() < end_s:
            pass
        # The clock is that of the whole machine, so that of all ranks.
        times.append(time.monotonic())
        call()
        times.append(time.monotonic())
    columns: Sequence[Sequence[float]] = [*zip(*team.gather(times), strict=True)]
    return [max(columns[i + 1]) - max(columns[i]) for i in range(0, len(columns), 2)]


if __name__ == "__main__":
    main()
