"""Steps of ranks on several machines over a slow link: evener beside torch's DDP.

    python benchmarks/link.py --json link.json      (as root)
    python benchmarks/link.py --quick

It needs root and iproute2: a machine is a network namespace, whose cable carries so many Mbit/s in
each direction. Teams: ``equal`` and ``unequal`` (the second rank has a third of the speed) are two
ranks on two machines, ``2+2`` are four ranks on two.

docs/benchmarks.md says what ways and columns are.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from report import (
    ROOT,
    load_before,
    make_parser,
    numbers,
    ratios,
    some_of,
    spread,
    text_of,
    write_report,
)
from rounds import ADDRESS, Team, is_rank, run_ranks, shuffled
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from unequal import pin
from ways import Evener, Setting, TunedDdp, Way

sys.path.append(str(ROOT / "tests"))
from helpers.machines import ADDRESSES, Machines

#: Of each round, by way.
Figures = dict[str, list[float]]

SEQ_LEN = 128
NUM_MACHINES = 2
_CABLE = "eth0"

#: Width and layers.
SIZES = {"2M": (192, 4), "10M": (384, 6), "40M": (640, 8)}
#: Speeds of the ranks, relative to the fastest.
TEAMS = {"equal": (1.0, 1.0), "unequal": (1.0, 1 / 3), "2+2": (1.0,) * 4}


class Compute(Way):
    """The ranks' shares and updates, side by side, without an exchange."""

    def __init__(self, team: Team, setting: Setting, name: str, shares: Sequence[int]) -> None:
        super().__init__(team, setting)
        self.name, self.shares = name, shares

    def step(self, number: int) -> int:
        """See ``Way``."""
        self.local_step(number, self.shares[self.rank])
        return self.setting.batch_size


class Exchange(Way):
    """A sum of as many numbers as the model has, and nothing else."""

    name = "exchange"

    def __init__(self, team: Team, setting: Setting) -> None:
        super().__init__(team, setting)
        self.gradients = torch.zeros(sum(p.numel() for p in self.model.parameters()))

    def step(self, number: int) -> int:
        """See ``Way``."""
        dist.all_reduce(self.gradients)
        return self.setting.batch_size


class BucketDdp(TunedDdp):
    """torch's DDP with buckets of some size."""

    def __init__(self, team: Team, setting: Setting, name: str, bucket_mb: int) -> None:
        self.name, self.bucket_mb = name, bucket_mb
        super().__init__(team, setting)

    def wrap(self) -> DistributedDataParallel:
        """See ``TorchDdp``."""
        options = {"gradient_as_bucket_view": True, "static_graph": True}
        return DistributedDataParallel(self.model, bucket_cap_mb=self.bucket_mb, **options)


class HalfDdp(BucketDdp):
    """The same, with buckets that are sent as bfloat16."""

    hook = staticmethod(bf16_compress_hook)


def sync(team: Team, setting: Setting, name: str, **options: Any) -> Evener:
    """Return evener in SYNC; a rank computes its share at once, as DDP does."""
    whole = replace(setting, micro_batch_size=setting.batch_size)
    is_equal = min(setting.speeds) == 1
    return Evener(team, whole, name=name, equal=is_equal, **options)


#: Options of evener by way.
SYNC_OPTIONS: dict[str, dict[str, str]] = {
    "sync.off": {"overlap": "off"},
    "sync.on": {"overlap": "on"},
    "sync.auto": {"overlap": "auto"},
    "sync.bf16": {"wire": "bfloat16"},
}
WAYS: dict[str, Callable[[Team, Setting, str], Way]] = {
    "ddp.1mb": lambda *which: BucketDdp(*which, 1),
    "ddp.4mb": lambda *which: BucketDdp(*which, 4),
    "ddp.25mb": lambda *which: BucketDdp(*which, 25),
    "ddp.bf16": lambda *which: HalfDdp(*which, 25),
    **{
        name: lambda *which, given=options: sync(*which, **given)
        for name, options in SYNC_OPTIONS.items()
    },
    "cadence": lambda team, setting, name: Evener(team, setting, "cadence", name=name),
    "async": lambda team, setting, name: Evener(team, setting, "async", name=name),
}


def main() -> None:
    """Start a team for each case; print and write what they measured."""
    arguments = parse_arguments()
    if is_rank():
        measure(Team(), arguments)
        return
    if os.geteuid() != 0:
        raise SystemExit("link.py makes network namespaces and shapes their links: run it as root")
    before, rows = load_before(), []
    for rate in arguments.rates:
        for name in arguments.teams:
            for size in arguments.sizes:
                of_case = run_case(rate, {"rate": rate, "team": name, "size": size})
                print(text_of(of_case), flush=True)
                rows += of_case
                write_report(arguments, before, rows)  # a run that is cut off keeps these cases


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = make_parser(__doc__)
    parser.add_argument(
        "--rates", type=numbers, default=[100, 200, 1000, 10_000], metavar="MBIT/S,..."
    )
    parser.add_argument("--sizes", type=some_of(SIZES), default=list(SIZES), metavar="NAME,...")
    parser.add_argument("--teams", type=some_of(TEAMS), default=list(TEAMS), metavar="NAME,...")
    parser.add_argument("--ways", type=some_of(WAYS), default=list(WAYS), metavar="NAME,...")
    parser.add_argument(
        "--samples", type=int, default=4, help=f"of {SEQ_LEN} tokens, per rank and step"
    )
    parser.add_argument(
        "--sleep-ms",
        type=float,
        default=0.0,
        help="of each layer in forward, twice in backward: computing that other load does not slow",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--turn-s", type=float, default=2.0, help="length of a turn, about")
    parser.add_argument("--quick", action="store_true", help="2M over 200 Mbit/s; 3 rounds")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rates, arguments.sizes, arguments.rounds = [200], ["2M"], 3
    return arguments


def run_case(rate: int, case: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of a team whose machines have cables of this rate."""
    count = len(TEAMS[case["team"]])

    def start(command: Sequence[str]) -> int:
        with ExitStack() as stack:
            machines = stack.enter_context(Machines(f"{rate}mbit"))
            ranks = []
            for rank in range(count):
                machine, local_rank = divmod(rank, count // NUM_MACHINES)
                place = {
                    **{"RANK": rank, "WORLD_SIZE": count, "LOCAL_RANK": local_rank},
                    **{"LOCAL_WORLD_SIZE": count // NUM_MACHINES, ADDRESS: ADDRESSES[0]},
                    "GLOO_SOCKET_IFNAME": _CABLE,
                }
                environ = os.environ | {name: str(value) for name, value in place.items()}
                process = subprocess.Popen(machines.command(machine, *command), env=environ)
                ranks.append(stack.enter_context(process))
                stack.callback(process.kill)
            return max((process.wait() for process in ranks), key=abs)

    return run_ranks(count, case=case, start=start)


# ── a rank ───────────────────────────────────────────────────────────────────────────────────────


def measure(team: Team, arguments: argparse.Namespace) -> None:
    """Measure a case: one rank's part."""
    rate, size, speeds = team.case["rate"], team.case["size"], TEAMS[team.case["team"]]
    pin(team.rank, speeds)
    width, layers = SIZES[size]
    setting = Setting(
        speeds=speeds,
        batch_size=arguments.samples * len(speeds),
        micro_batch_size=arguments.samples,
        width=width,
        layers=layers,
        seq_len=SEQ_LEN,
        local_windows=2,
        sleep_s=arguments.sleep_ms / 1e3,
    )
    equal = [arguments.samples] * len(speeds)
    whole = replace(setting, micro_batch_size=setting.batch_size)
    plain = [
        Compute(team, whole, "compute", setting.shares),
        Compute(team, whole, "compute.equal", equal),
        Exchange(team, setting),
    ]
    # On all ranks alike, so that a turn has as many global batches of each way.
    step_s = sum(setting.batch_size / way.run(1) for way in plain)
    steps = team.first(max(1, round(arguments.turn_s / step_s)))
    setting = replace(setting, windows=steps)
    ways = plain + [WAYS[name](team, setting, name) for name in arguments.ways]
    by_name = {way.name: way for way in ways}
    seconds, sent = Figures({name: [] for name in by_name}), Figures({name: [] for name in by_name})
    for number, names in enumerate(shuffled(list(by_name), 1 + arguments.rounds)):
        for name in names:
            way, before = by_name[name], sent_bytes()
            took_s = setting.batch_size / way.run(steps)
            own = (sent_bytes() - before) / num_batches(way, steps)
            rows = team.gather([own * (os.environ["LOCAL_RANK"] == "0")])
            if number:  # after the round that warms up
                seconds[name].append(took_s)
                sent[name].append(sum(own for [own] in rows) / NUM_MACHINES)
        team.tell(f"{rate} Mbit/s, {team.case['team']}, {size}: round {number} is done")
    facts = {
        "mbit_per_s": rate,
        "team": team.case["team"],
        "params": sum(p.numel() for p in plain[0].model.parameters()),
    }
    team.finish([facts | row for row in make_rows(ways, seconds, sent)])
    for way in ways:
        way.close()


def make_rows(ways: Sequence[Way], taken: Figures, sent: Figures) -> list[dict[str, Any]]:
    """Return a row for each way, by its seconds and its bytes of each round."""
    ddp = [way.name for way in ways if is_ddp(way) and not isinstance(way, HalfDdp)]
    best = min(ddp, key=lambda name: median(taken[name]), default=None)
    rows = []
    for way in ways:
        own = taken[way.name]
        computes = taken["compute.equal" if is_ddp(way) else "compute"]
        per_round = zip(own, computes, taken["exchange"], strict=True)
        row = {"name": way.name, **spread("seconds", own)}
        if not isinstance(way, Compute | Exchange):
            row |= spread("hidden", [1 - (s - c) / exchange for s, c, exchange in per_round])
            row |= spread("ratio", ratios(own, taken[best])) if best else {}
        row |= {"bytes": round(spread("bytes", sent[way.name])["bytes"])}
        if isinstance(way, Evener) and (windows := [w for turn in way.turns[1:] for w in turn]):
            row |= {"parked": round(sum(bool(w["parked"]) for w in windows) / len(windows), 3)}
        rows.append(row)
    return rows


def is_ddp(way: Way) -> bool:
    """Return whether a way is torch's DDP."""
    return isinstance(way, BucketDdp)


def num_batches(way: Way, steps: int) -> float:
    """Return the global batches of a turn, those that are not timed included."""
    if isinstance(way, Evener):
        return way.num_samples / way.setting.batch_size
    return steps + 1


def sent_bytes() -> int:
    """Return the bytes that this rank's machine has sent over its cable."""
    (line,) = (line for line in Path("/proc/net/dev").read_text().splitlines() if _CABLE in line)
    return int(line.split()[9])


if __name__ == "__main__":
    main()
