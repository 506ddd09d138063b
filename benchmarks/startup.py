"""How long one waits: for help, for the first window of the second demo, for the whole demo.

    python benchmarks/startup.py --json startup.json

A first, short run prepares the corpus and the caches of Python and of the operating system.
``first_window`` is from the start of the command to the moment at which the first window has been
applied, ``team_ready`` to the event that the run has started.
"""

import argparse
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from report import load_before, make_parser, some_of, spread, text_of, write_report
from runs import command_line, pretrain

#: A demo that ends soon after its first window.
SHORT = ("--set", "max_steps=2", "--set", "sample.num_tokens=0", "--set", "eval.every=0")

Seconds = dict[str, list[float]]


def main() -> None:
    """Measure what was asked for."""
    arguments = parse_arguments()
    before = load_before()
    rows: list[dict[str, Any]] = []
    for group in arguments.only:
        for name, seconds in GROUPS[group](arguments).items():
            rows.append({"name": name, **spread("seconds", seconds), "times": len(seconds)})
        print(f"{group}: measured", flush=True)
    print(text_of(rows))
    write_report(arguments, before, rows)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", type=some_of(GROUPS), default=list(GROUPS), help=",".join(GROUPS))
    parser.add_argument("--quick", action="store_true", help="one round, without a whole demo")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds = 1
    return arguments


def time_help(arguments: argparse.Namespace) -> Seconds:
    """Time ``evener --help``."""

    def show() -> None:
        subprocess.run([*command_line(), "--help"], stdout=subprocess.DEVNULL, check=True)

    show()
    return {"help": [measure(show) for _ in range(2 * arguments.rounds)]}


def time_demo(arguments: argparse.Namespace) -> Seconds:
    """Time short demos after a first one, and a whole one."""
    found: Seconds = {}

    def note(name: str, *options: str, run: str) -> None:
        began_t = time.time()
        events = pretrain(Path(folder), "--demo", *options, name=run)
        ended_t = time.time()
        for key, kind in (("team_ready", "run_started"), ("first_window", "window")):
            t = next(t for each, t in events if each == kind)
            found.setdefault(f"{name}.{key}", []).append(t - began_t)
        found.setdefault(f"{name}.total", []).append(ended_t - began_t)

    with tempfile.TemporaryDirectory() as folder:
        note("no_cache", *SHORT, run="cold")
        for number in range(arguments.rounds):
            note("short", *SHORT, run=f"short-{number}")
        if not arguments.quick:
            note("demo", run="whole")
    return found


GROUPS: dict[str, Callable[[argparse.Namespace], Seconds]] = {
    "help": time_help,
    "demo": time_demo,
}


def measure(action: Callable[[], None]) -> float:
    """Return the seconds that something takes."""
    started_s = time.perf_counter()
    action()
    return time.perf_counter() - started_s


if __name__ == "__main__":
    main()
