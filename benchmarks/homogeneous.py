"""Throughput of equal ranks: evener beside torch's DDP and other libraries.

    python benchmarks/homogeneous.py --json homogeneous.json --svg homogeneous.svg
    python benchmarks/homogeneous.py --quick
    python benchmarks/homogeneous.py --with accelerate,fabric,torchft

All ways train the same model on the same number of tokens, in turns, in processes that stay for a
whole case; a case is a size of the model and a number of tokens per rank and step. Ranks are pinned
to no core and compute on (cores / ranks) threads each. ``--with`` adds other libraries, and
installs them into an environment of their own where they are missing.

- ``ceiling``: each rank trains its local batch with a full optimizer step, all side by side,
  without any exchange. ``of_ceiling`` is a way's throughput over this, in the same round: what is
  missing is what the exchange and waiting take.
- ``solo``: one rank alone over whole global batches; ``of_ideal`` is over the sum of the ranks'
  solo speeds in the same round. What ``of_ceiling`` does not explain of it, the machine's shared
  cores, caches and memory take.
- ``torch.ddp``: DDP and AdamW as they come. ``torch.ddp.tuned``: fused AdamW, gradients as bucket
  views, static graph, one bucket. All others have the fused AdamW, too. ``of_tuned_ddp`` is over
  its throughput in the same round.
- ``evener.cadence``, ``evener.async``, ``torchft.local_sgd`` and ``torchft.diloco`` make ``anchor``
  local steps between two averagings.
- ``one process with all cores' threads`` trains whole global batches.

``parked`` is the part of evener's windows in which a rank did not work, since by what was measured
it did not pay; between equal ranks that happens where other programs take cores.

Figures are medians over rounds, ``_90`` their 5th and 95th percentile. What is not needed for the
main ratios runs in every third round.
"""

import argparse
import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import torch
from competitors import add_libraries, enter, missing, ways_of
from machine import load_before, write_report
from models import mean_loss
from options import make_parser, some_of
from picture import write_bars
from rounds import Team, is_rank, run_ranks, shuffled
from tables import spread, text_of
from ways import Ceiling, Evener, Setting, Solo, TorchDdp, TunedDdp, Way

SEQ_LEN = 128
ONE_PROCESS = "one process with all cores' threads"
TUNED = TunedDdp.name
MAIN = ("solo", "ceiling", "evener.sync", TorchDdp.name, TUNED)
#: Rounds between two in which the other ways take part.
OTHERS_EVERY = 3
LEAST_ANCHOR, MOST_ANCHOR = 4, 8
#: Windows of a turn of a local policy that count. The first one does not: in ASYNC it lasts until
#: its average has been applied, which is one or more steps of the next window.
LEAST_LOCAL_WINDOWS = 3


@dataclass(frozen=True)
class Model:
    """A size of the model."""

    width: int
    layers: int


MODELS = {"0.8M": Model(128, 4), "3M": Model(256, 4), "10M": Model(384, 6)}


class OneProcess(Way):
    """The first rank alone, on all cores, over whole global batches at once."""

    name = ONE_PROCESS

    def run(self, steps: int) -> float:
        """See ``Way``."""
        threads = torch.get_num_threads()
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        speed = super().run(steps)
        torch.set_num_threads(threads)
        return speed

    def step(self, number: int) -> None:
        """See ``Way``."""
        if self.rank == 0:
            mean_loss(self.model, self.batch(number, self.setting.batch_size)).backward()
            self.update()


def main() -> int:
    """Starts the ranks; prints and writes what they measured."""
    arguments = parse_arguments()
    if is_rank():
        measure(Team(), arguments)
        return 0
    enter(arguments.libraries)
    before = load_before()
    rows = run_ranks(arguments.ranks, threads=threads_per_rank(arguments.ranks))
    print(text_of(rows))
    if arguments.svg:
        draw(rows, arguments.svg)
    write_report(arguments, before, rows)
    return 0


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--models", type=some_of(MODELS), default=list(MODELS), metavar="NAME,...")
    parser.add_argument("--tokens", type=tokens, default=[128, 1024], help="per rank and step")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--turn-s", type=float, default=0.5, help="length of a turn, about")
    parser.add_argument("--quick", action="store_true", help="5 short rounds, 2 models, 128 tokens")
    add_libraries(parser)
    parser.add_argument("--svg", metavar="FILE")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.models, arguments.tokens = ["0.8M", "3M"], [128]
        arguments.rounds, arguments.turn_s = 5, 0.4
    return arguments


def threads_per_rank(ranks: int) -> int:
    """Cores are shared out evenly."""
    return max(1, len(os.sched_getaffinity(0)) // ranks)


def tokens(text: str) -> list[int]:
    """Reads multiples of ``SEQ_LEN``."""
    values = [int(t) if t.isdecimal() else 0 for t in text.split(",")]
    if not all(v and v % SEQ_LEN == 0 for v in values):
        raise argparse.ArgumentTypeError(f"{text!r}: give multiples of {SEQ_LEN}, such as 128,1024")
    return values


def measure(team: Team, arguments: argparse.Namespace) -> None:
    """One rank: every case."""
    rows = []
    for name in arguments.models:
        for per_rank in arguments.tokens:
            setting = make_setting(team, MODELS[name], per_rank, arguments.turn_s)
            with closing(Case(team, setting, arguments)) as case:
                rows += case.run()
            team.tell(f"{name}, {per_rank} tokens per rank: done")
    team.finish(rows)


def make_setting(team: Team, model: Model, per_rank: int, turn_s: float) -> Setting:
    """What all ways train, and how many steps fit into a turn here."""
    share = per_rank // SEQ_LEN
    setting = Setting(
        speeds=(1.0,) * team.world_size,
        batch_size=share * team.world_size,
        micro_batch_size=share,
        width=model.width,
        layers=model.layers,
        seq_len=SEQ_LEN,
    )
    with closing(Ceiling(team, setting)) as trial:
        trial.run(2)
        step_s = setting.batch_size * 4 / trial.run(4)
    # On all ranks alike: a turn has this many steps of each policy, of a local policy in windows.
    steps = team.first(max(1, round(turn_s / step_s)))
    anchor = max(LEAST_ANCHOR, min(MOST_ANCHOR, steps // 2))
    local_windows = max(LEAST_LOCAL_WINDOWS, steps // anchor)
    return replace(setting, windows=steps, anchor=anchor, local_windows=local_windows)


class Case:
    """One rank's part in a case: all ways, in turns.

    Args:
        team: This rank among the others.
        setting: What they train.
        arguments: The command line.
    """

    def __init__(self, team: Team, setting: Setting, arguments: argparse.Namespace) -> None:
        self.team, self.setting, self.rounds = team, setting, arguments.rounds
        self.alone = [Solo(team, setting, rank) for rank in range(team.world_size)]
        # Of evener's turns, the first window does not count, nor the last of a local policy.
        longer = replace(
            setting,
            windows=setting.windows + 1,
            local_windows=setting.local_windows + 2,
            max_anchor=0,
        )
        ways: list[Way] = [Ceiling(team, setting)]
        ways += [Evener(team, longer, policy) for policy in ("sync", "cadence", "async")]
        kinds = [TorchDdp, TunedDdp]
        for library in arguments.libraries:
            kinds += [] if missing([library]) else ways_of(library)
        ways += [kind(team, setting) for kind in (*kinds, OneProcess)]
        self.ways = {way.name: way for way in ways}

    def run(self) -> list[dict[str, Any]]:
        """Takes all turns; a row for each way. The first round, a warm-up, is left out."""
        speeds: dict[str, dict[int, float]] = {name: {} for name in ("solo", *self.ways)}
        for number, order in enumerate(shuffled(list(speeds), self.rounds + 1)):
            # Those that main ratios are formed from stay next to one another.
            for name in sorted(order, key=lambda name: name not in MAIN):
                if name in MAIN or number == 0 or number % OTHERS_EVERY == 1:
                    speed = self.turn(name, number)
                    if number:
                        speeds[name][number] = speed
        ideal = {n: len(self.alone) * v for n, v in speeds["solo"].items()}
        beside = {
            "of_ideal": ideal,
            "of_ceiling": speeds["ceiling"],
            "of_tuned_ddp": speeds[TUNED],
        }
        rows = []
        for name, taken in speeds.items():
            row = {"name": name, **self.facts(), "rounds": len(taken)}
            row |= spread("tokens_per_s", [v * self.setting.seq_len for v in taken.values()])
            for key, others in beside.items():
                row |= spread(key, [v / others[n] for n, v in taken.items()])
            rows.append(row | self.parked(name))
        return rows

    def turn(self, name: str, number: int) -> float:
        """Samples per second of one turn."""
        if name == "solo":  # one rank makes the steps of all
            solo = self.alone[number % len(self.alone)]
            return solo.run(max(1, self.setting.windows // len(self.alone)))
        return self.ways[name].run(self.setting.windows)

    def facts(self) -> dict[str, Any]:
        """What is the same in all rows."""
        return {
            "params": sum(p.numel() for p in self.alone[0].model.parameters()),
            "tokens_per_rank": self.setting.micro_batch_size * self.setting.seq_len,
            "ranks": self.team.world_size,
            "anchor": self.setting.anchor,
        }

    def parked(self, name: str) -> dict[str, float]:
        """In which part of evener's windows a rank did not work, since it seemed not to pay."""
        way = self.ways.get(name)
        if not isinstance(way, Evener):
            return {}
        windows = [window for turn in way.turns for window in turn]
        counts = self.team.gather([len(windows), sum(bool(w["parked"]) for w in windows)])
        of_team, parked = (sum(numbers) for numbers in zip(*counts, strict=True))
        return {"parked": round(parked / of_team, 3)}

    def close(self) -> None:
        """Leaves all teams."""
        for way in self.ways.values():
            way.close()


def draw(rows: Sequence[Mapping[str, Any]], path: str) -> None:
    """Writes the picture: every way over the ceiling, by case."""
    groups: dict[str, dict[str, tuple[float, float, float]]] = {}
    for row in rows:
        if row["name"] not in ("ceiling", "solo"):
            bars = groups.setdefault(case_text(row), {})
            bars[row["name"]] = (row["of_ceiling"], *row["of_ceiling_90"])
    write_bars(path, "Throughput over that of the same ranks without any exchange", groups)


def case_text(row: Mapping[str, Any]) -> str:
    """``2 ranks, 0.8 M parameters, 128 tokens per rank``."""
    millions = f"{row['params'] / 1e6:.1f} M parameters"
    return f"{row['ranks']} ranks, {millions}, {row['tokens_per_rank']} tokens per rank and step"


if __name__ == "__main__":
    raise SystemExit(main())
