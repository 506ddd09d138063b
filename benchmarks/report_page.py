"""How large the report of a long run is, how long it takes to make, and to open in a browser.

    python benchmarks/report_page.py --windows 100000 --ranks 2,8 --json report_page.json

The events are made up, in the form of those of a run, with one window that takes 30 times as long.
Opening is from the order to the browser to the moment at which every chart is drawn; without
chromium and playwright it is left out.
"""

import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import load_before, write_report
from options import make_parser, numbers
from runs import command_line

from evener.observe.event_lines import to_line
from evener.observe.events import Event, make_event
from evener.observe.thinning import merge, stride

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def main() -> None:
    """Measures what was asked for."""
    parser = make_parser(__doc__)
    parser.add_argument("--windows", type=int, default=100_000)
    parser.add_argument("--ranks", type=numbers, default=[2])
    parser.add_argument(
        "--rounds", type=int, default=3, help="how often the page is opened; 0: never"
    )
    arguments = parser.parse_args()
    before = load_before()
    rows = [measure(arguments.windows, ranks, arguments.rounds) for ranks in arguments.ranks]
    write_report(arguments, before, rows)


def measure(windows: int, ranks: int, rounds: int) -> dict[str, Any]:
    """One run: its events, its page, its page in a browser."""
    with tempfile.TemporaryDirectory() as name:
        folder, page = Path(name), Path(name) / "page.html"
        write_events(folder / "events.jsonl", windows, ranks)
        began_s = time.perf_counter()
        before_s = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        subprocess.run([*command_line(), "report", name, "-o", str(page)], check=True)
        row = {
            "windows": windows,
            "ranks": ranks,
            "events_mb": (folder / "events.jsonl").stat().st_size / 1e6,
            "page_mb": page.stat().st_size / 1e6,
            "made_s": time.perf_counter() - began_s,
            "made_cpu_s": resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before_s,
            "opened_s": open_page(page, rounds),
        }
    print("  ".join(f"{key} {value}" for key, value in row.items()), file=sys.stderr)
    return row


def write_events(path: Path, windows: int, ranks: int) -> None:
    """Events of a run whose windows take 0.1 s or so."""
    draw, t = random.Random(0), 1.7e9
    facts = {"run": "long", "policy": "sync", "backend": "shared", "unit": "tokens"}
    members = [f"host/cpu/{rank}" for rank in range(ranks)]
    sizes = {"num_samples": 8 * ranks * windows, "total_windows": windows}
    shared: Event | None = None  # of windows that share an event
    with path.open("wb") as stream:
        start = make_event("run_started", t=t, window=0, members=members, **facts, **sizes)
        stream.write(to_line(start))
        for window in range(windows):
            spent = [draw.uniform(0.08, 0.12) for _ in members]
            spent[-1] += 3.0 * (window == windows // 2)
            last, sync_s = max(spent), draw.uniform(0.004, 0.02)
            t += last + sync_s
            rows = [
                {
                    "rank": rank,
                    "member": member,
                    "samples": 8,
                    "weight": 1024.0,
                    "loss": 5 * (1 + window) ** -0.1 + draw.gauss(0, 0.1),
                    "compute_s": spent[rank],
                    "wait_s": last - spent[rank],
                    "sync_s": sync_s,
                    "elapsed_s": last + sync_s,
                    "data_s": 0.001,
                    "sent_bytes": 1_234_567,
                    "work_ago_s": last + sync_s - 0.001,
                    "wait_ago_s": last + sync_s - spent[rank],
                    "sync_ago_s": sync_s,
                    "micro_batches": 1,
                    "update_s": spent[rank] / 20,
                }
                for rank, member in enumerate(members)
            ]
            size = 8 * ranks
            place = {
                "generation": 0,
                "epoch": 0,
                "committed": [[size * window, size * window + size]],
            }
            event = make_event("window", t=t, window=window, ranks=rows, **place)
            shared = event if shared is None else merge(shared, event)
            if shared.get("windows", 1) >= stride(window, ranks):
                stream.write(to_line(shared))
                shared = None


def open_page(page: Path, rounds: int) -> list[float]:
    """Seconds until everything is drawn, in a new tab each time; none without a browser."""
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        program = None
    if program is None or not rounds:
        return []
    seconds = []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for _ in range(rounds):
            tab = browser.new_page()
            began_s = time.perf_counter()
            tab.goto(page.as_uri())
            tab.wait_for_selector("html[data-drawn]")
            seconds.append(time.perf_counter() - began_s)
            tab.close()
        browser.close()
    return seconds


if __name__ == "__main__":
    main()
