"""What a rank whose speed drops in mid-run costs the others, in windows of local steps.

    python benchmarks/drop.py --speeds 1,0.3333 --json drop.json

Ranks train with policy ``cadence`` (or ``async``). In the middle of a window one rank becomes four
times slower, by emulation. ``cost`` is the part of the other ranks' time that they then spend on
waiting and averaging, over the windows after the drop, less the same before it. Both are given, and
the longest wait of one window, which is that of the drop.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from machine import load_before, write_report
from models import GPT, Tokens, mean_loss
from options import make_parser
from rounds import TIMEOUT_S, Team, is_rank, run_ranks
from tables import text_of
from unequal import read_speeds

from evener import Ddp, DdpConfig, WindowResult

SEQ_LEN = 128
SETTLING = 3
"""First windows, which pay for caches and calibration."""


def main() -> int:
    """Starts the ranks; prints and writes what they measured."""
    arguments = parse_arguments()
    if is_rank():
        run_rank(Team(), arguments)
        return 0
    before, rows = load_before(), run_ranks(len(arguments.speeds), threads=1)
    print(text_of(rows))
    write_report(arguments, before, rows, emulated=True)
    return 0


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = make_parser(__doc__)
    parser.add_argument(
        "--speeds", type=read_speeds, default="1,0.3333", help="relative to the fastest"
    )
    parser.add_argument("--policy", choices=["cadence", "async"], default="cadence")
    parser.add_argument("--rank", type=int, default=1, help="the one that becomes slower")
    parser.add_argument("--factor", type=float, default=4.0, help="how much slower")
    parser.add_argument("--before", type=int, default=15, help="windows")
    parser.add_argument("--after", type=int, default=50, help="windows")
    parser.add_argument("--anchor", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=4, help="samples of a local step")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    return parser.parse_args()


def run_rank(team: Team, arguments: argparse.Namespace) -> None:
    """One rank."""
    torch.manual_seed(0)
    model = GPT(width=arguments.width, layers=arguments.layers, seq_len=SEQ_LEN)
    slow = {r: 1 / s for r, s in enumerate(arguments.speeds)}
    # A rank at full speed is emulated too, by a hair: what does not sleep can be slowed no more.
    slow = {r: max(factor, 1.0001) for r, factor in slow.items()}
    windows: list[WindowResult] = []
    with Ddp.setup(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True),
        policy=arguments.policy,
        devices="cpu",
        precision="fp32",
        config=DdpConfig(
            emulate_slow=slow,
            anchor=arguments.anchor,
            timeout_s=TIMEOUT_S,
        ),
        quiet=True,
        environment=team.environment(),
    ) as ddp:
        slowdown = ddp.assembly.engine.options.slowdown

        @ddp.on_commit
        def count(result: WindowResult) -> None:
            windows.append(result)
            if len(windows) == arguments.before + arguments.after:
                ddp.stop()

        loader = ddp.loader(Tokens(10**7, SEQ_LEN), batch_size=arguments.batch_size)
        steps_of_window, has_dropped = 0, ddp.rank != arguments.rank
        for ids in loader.epoch(0):
            ddp.backward(mean_loss(model, ids))
            steps_of_window = 0 if ddp.step() else steps_of_window + 1
            in_mid_window = len(windows) == arguments.before - 1 and steps_of_window >= 3
            if in_mid_window and not has_dropped:
                slowdown.factor, has_dropped = slowdown.factor * arguments.factor, True
        others = [r for r in range(ddp.world_size) if r != arguments.rank]
    team.finish([describe(windows, others, arguments)])


def describe(
    windows: Sequence[WindowResult], others: Sequence[int], arguments: argparse.Namespace
) -> dict[str, Any]:
    """The row: parts of the other ranks' time that were not compute, before and after the drop."""
    idle_before = idle(windows[SETTLING : arguments.before - 1], others)
    idle_after = idle(windows[arguments.before - 1 :], others)
    longest = max(w.ranks[r].wait_s for w in windows[arguments.before - 1 :] for r in others)
    return {
        "name": f"evener.{arguments.policy}",
        "cost": round(idle_after - idle_before, 4),
        "idle_before": round(idle_before, 4),
        "idle_after": round(idle_after, 4),
        "longest_wait_s": round(longest, 3),
        "windows": len(windows),
    }


def idle(windows: Sequence[WindowResult], ranks: Sequence[int]) -> float:
    """Part of the ranks' time spent on waiting and averaging."""
    records = [w.ranks[r] for w in windows for r in ranks]
    lost_s = sum(r.wait_s + r.sync_s for r in records)
    return lost_s / (lost_s + sum(r.compute_s for r in records))


if __name__ == "__main__":
    raise SystemExit(main())
