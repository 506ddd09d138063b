"""How long one waits: for help, for the first window of the second demo, for the whole demo.

    python benchmarks/startup.py --json startup.json

A first, short run prepares the corpus and the caches of Python and of the operating system; what
it takes is reported apart. ``first_window`` is from the start of the command to the moment at which
the first window has been applied. The parts below are single steps of the same, each measured in
as many processes at once as the demo has ranks: a bare Python, importing torch, importing the task,
building the model (which imports transformers).
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from machine import load_before, write_report
from options import make_parser, some_of
from runs import clean_environment, command_line, pretrain, settings
from tables import spread, text_of

RANKS = 2
#: A demo that ends soon after its first window.
SHORT = settings(("max_steps=2", "measure=false", "sample.num_tokens=0", "eval.every=0"))

_BUILD = """
from evener.config.runs import ModelConfig
from evener.tasks.language_model import build_model
build_model(ModelConfig(), vocab_size=257, seq_len=128, eos_id=256)
"""
PARTS = {
    "python": "pass",
    "torch": "import torch",
    "task": "import evener.tasks.causal_lm",
    "model": f"import evener.tasks.causal_lm\n{_BUILD}",
}


def main() -> None:
    """Measures what was asked for."""
    arguments = parse_arguments()
    before = load_before()
    rows: list[dict[str, Any]] = []
    for group in arguments.only:
        for name, seconds in GROUPS[group](arguments.rounds).items():
            rows.append({"name": name, **spread("seconds", seconds), "times": len(seconds)})
        print(f"{group}: measured", flush=True)
    print(text_of(rows))
    write_report(arguments, before, rows, ranks=RANKS)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", type=some_of(GROUPS), default=list(GROUPS), help=",".join(GROUPS))
    return parser.parse_args()


def time_help(rounds: int) -> dict[str, list[float]]:
    """``evener --help``."""
    show_help()
    return {"help": [measure(show_help) for _ in range(2 * rounds)]}


def time_demo(rounds: int) -> dict[str, list[float]]:
    """A first demo, short ones, and a whole one."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cold = pretrain(folder, "--demo", *SHORT, name="cold")
        short = [pretrain(folder, "--demo", *SHORT, name=f"short-{k}") for k in range(rounds)]
        whole = pretrain(folder, "--demo", name="whole")
    return {
        "first_window.no_cache": [cold.until("window")],
        "first_window": [run.until("window") for run in short],
        "first_window.team_ready": [run.until("run_started") for run in short],
        "short_run.total": [run.elapsed_s for run in short],
        "demo.first_window": [whole.until("window")],
        "demo.last_window": [whole.until("window", last=True)],
        "demo.total": [whole.elapsed_s],
    }


def time_parts(rounds: int) -> dict[str, list[float]]:
    """Steps of the start, each as a program of its own."""
    return {
        f"part.{part}": [measure(lambda p=program: side_by_side(p)) for _ in range(rounds)]
        for part, program in PARTS.items()
    }


GROUPS: dict[str, Callable[[int], dict[str, list[float]]]] = {
    "help": time_help,
    "demo": time_demo,
    "parts": time_parts,
}


def measure(action: Callable[[], None]) -> float:
    """Seconds that something takes."""
    started_s = time.perf_counter()
    action()
    return time.perf_counter() - started_s


def show_help() -> None:
    """``evener --help``."""
    subprocess.run([*command_line(), "--help"], stdout=subprocess.DEVNULL, check=True)


def side_by_side(program: str) -> None:
    """Runs a program in as many processes as the demo has ranks, and waits for the last."""
    command = [sys.executable, "-P", "-c", program]
    ranks = [subprocess.Popen(command, env=clean_environment()) for _ in range(RANKS)]
    codes = [rank.wait() for rank in ranks]
    if any(codes):
        raise RuntimeError(f"failed: {program}")


if __name__ == "__main__":
    main()
