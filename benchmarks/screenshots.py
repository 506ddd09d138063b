"""Takes the pictures of report and dashboard in ``docs/images``, in light and in dark.

    python benchmarks/screenshots.py --windows 150

An elastic team of two ranks trains, the second 1.5 times slower. In the middle the second worker is
killed, and another takes its place. It needs chromium, playwright and the extra ``dashboard``.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from playwright.sync_api import Browser, sync_playwright
from report_page import BROWSERS
from runs import command_line
from torch import nn

from evener import Ddp, DdpConfig
from evener.observe.following import read_events
from evener.observe.jsonl import JsonlSink

IMAGES = Path(__file__).parent.parent / "docs" / "images"
RUN = Path("runs") / "demo"
PATIENCE_S = 600.0
SCHEMES = ("light", "dark")


def main() -> None:
    """Trains, or watches how others train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=150, help="before and after the kill")
    parser.add_argument("--folder", type=Path, default=IMAGES, help="where the pictures go")
    parser.add_argument("--train", action="store_true", help="be one of the workers")
    arguments = parser.parse_args()
    if arguments.train:
        train()
    else:
        with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
            program = next(filter(None, map(shutil.which, BROWSERS)))
            browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
            watch(browser, Path(folder), arguments.windows, arguments.folder)


def train() -> None:
    """One worker: a small network learns a sum."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 512), nn.ReLU(), nn.Linear(512, 512), nn.Linear(512, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    config = DdpConfig(emulate_slow={1: 1.5}, quiet=True)
    sinks = [lambda: JsonlSink(RUN / "events.jsonl")]
    ddp = Ddp.setup(model, optimizer, devices="cpu", config=config, sinks=sinks)
    rows = torch.randn(4096, 16)
    data = [(row, row.sum(0, keepdim=True)) for row in rows]
    loader = ddp.loader(data, batch_size=1024, micro_batch_size=256)
    for epoch in ddp.epochs(100_000):
        for inputs, targets in loader.epoch(epoch):
            for _ in range(3):
                loss = ((model(inputs) - targets) ** 2).mean()
            ddp.backward(loss)
            ddp.step()


def watch(browser: Browser, folder: Path, windows: int, images: Path) -> None:
    """Runs a team, kills a worker, and takes the pictures."""
    team = ["--elastic", "1:2", "--nproc", "2", "--dashboard"]
    script = [str(Path(__file__).absolute()), "--train"]
    command = [*command_line(), "launch", *team, *script]
    running = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True)
    try:
        assert running.stderr is not None
        said = (re.search(r"dashboard at (\S+)", line) for line in running.stderr)
        url = next(found[1] for found in said if found)
        events = wait_for(folder, "window", windows)
        (pid,) = (e["pid"] for e in events if e["type"] == "worker_started" and e["rank"] == 1)
        os.kill(pid, signal.SIGKILL)
        wait_for(folder, "worker_joined", 1)
        wait_for(folder, "window", windows + count(folder, "window"))
        for scheme in SCHEMES:
            picture(browser, url, scheme, 1100, images / f"dashboard-{scheme}.png")
    finally:
        running.terminate()
        running.communicate()
    page = folder / "report.html"
    subprocess.run([*command_line(), "report", str(folder / RUN), "-o", str(page)], check=True)
    for scheme in SCHEMES:
        picture(browser, page.as_uri(), scheme, 1000, images / f"report-{scheme}.png")


def count(folder: Path, kind: str) -> int:
    """How many events of a type there are."""
    return sum(event["type"] == kind for event in read_events(folder / RUN / "events.jsonl"))


def wait_for(folder: Path, kind: str, number: int) -> list[dict[str, Any]]:
    """Waits until there are so many events of a type, and returns all."""
    deadline = time.monotonic() + PATIENCE_S
    path = folder / RUN / "events.jsonl"
    while not path.exists() or count(folder, kind) < number:
        assert time.monotonic() < deadline, f"no {number} events {kind} within {PATIENCE_S:g} s"
        time.sleep(0.5)
    return read_events(path)


def picture(browser: Browser, url: str, scheme: Any, width: int, path: Path) -> None:
    """Opens a page and takes a picture of all of it."""
    tab = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": 900})
    tab.goto(url)
    tab.wait_for_selector("html[data-drawn]")
    tab.screenshot(path=path, full_page=True)
    tab.close()
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
