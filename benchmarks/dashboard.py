"""What the dashboard costs while many look at a run that goes on, and how it takes a long one.

    python benchmarks/dashboard.py --windows 1000,100000 --readers 20 --json dashboard.json

The events are made up, as those of ``report_page.py``. The run goes on, with five windows a second,
from the start of the server until all have seen it, and for some seconds after that. Measured are
the seconds until a reader sees the run, and a new window; and the processor time of the server in
each period of so many seconds, its start included: the first, and the last one.
"""

import gzip
import http.client
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
from machine import load_before, write_report
from options import make_parser, numbers
from report_page import write_events
from runs import command_line

from evener.observe.event_lines import to_line
from evener.observe.following import newest_event

WINDOWS_PER_S = 5
PATIENCE_S = 1800.0
PAUSE_S = 1.0  # as the page makes


class Reader(threading.Thread):
    """Looks at the run, as a page does."""

    def __init__(self, port: int, count: int) -> None:
        super().__init__(daemon=True)
        self._port = port
        self._count = count  # of windows when the server was started
        self._began_s = time.monotonic()
        self.first_s = self.newest_s = 0.0
        self.updates = 0
        self.update_kb = 0.0

    def run(self) -> None:
        server = http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE_S)
        headers = {"Accept-Encoding": "gzip", "If-None-Match": ""}
        try:
            while True:
                server.request("GET", "/runs/run", headers=headers)
                answer = server.getresponse()
                body = answer.read()
                if answer.status == 200:
                    headers["If-None-Match"] = str(answer.headers["ETag"])
                    self._take(body)
                time.sleep(PAUSE_S)
        except (OSError, http.client.HTTPException):  # the server has ended
            pass

    def _take(self, body: bytes) -> None:
        self.updates += 1
        self.update_kb = len(body) / 1e3
        now_s = time.monotonic() - self._began_s
        self.first_s = self.first_s or now_s
        step = re.search(rb'"line":"step ([0-9,]+)', gzip.decompress(body))
        if step and int(step[1].replace(b",", b"")) > self._count:
            self.newest_s = self.newest_s or now_s


def main() -> None:
    """Measures what was asked for."""
    parser = make_parser(__doc__)
    parser.add_argument("--windows", type=numbers, default=[1000])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--readers", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=40.0)
    arguments = parser.parse_args()
    before = load_before()
    rows = [
        measure(windows, arguments.ranks, arguments.readers, arguments.seconds)
        for windows in arguments.windows
    ]
    write_report(arguments, before, rows)


def measure(windows: int, ranks: int, readers: int, seconds: float) -> dict[str, Any]:
    """One run: its events are read, then it goes on."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "run" / "events.jsonl"
        path.parent.mkdir()
        write_events(path, windows, ranks)
        events_mb = path.stat().st_size / 1e6
        growing = threading.Thread(target=go_on, args=(path, ended := threading.Event()))
        growing.start()
        began_s = time.monotonic()
        server = subprocess.Popen(
            [*command_line(), "dashboard", name], stderr=subprocess.PIPE, text=True
        )
        try:
            assert server.stderr is not None
            found = re.search(r":(\d+)/", server.stderr.readline())
            assert found, "the dashboard did not start"
            looking = [Reader(int(found[1]), windows) for _ in range(readers)]
            for reader in looking:
                reader.start()
            process = psutil.Process(server.pid)
            time.sleep(max(0.0, began_s + seconds - time.monotonic()))
            first_cpu_s = cpu_s(process)
            wait_for(looking)
            reading_cpu_s, since_s = cpu_s(process), time.monotonic()
            updates = sum(reader.updates for reader in looking)
            time.sleep(seconds)
            seconds_then = time.monotonic() - since_s
            row = {
                "windows": windows,
                "ranks": ranks,
                "readers": readers,
                "events_mb": events_mb,
                "first_s": max(reader.first_s for reader in looking),
                "newest_s": max(reader.newest_s for reader in looking),
                "first_cpu_part": first_cpu_s / seconds,
                "reading_cpu_s": reading_cpu_s,
                "memory_mb": process.memory_info().rss / 1e6,
                "cpu_part": (cpu_s(process) - reading_cpu_s) / seconds_then,
                "updates_per_s": (sum(r.updates for r in looking) - updates)
                / (readers * seconds_then),
                "update_kb": looking[0].update_kb,
            }
        finally:
            ended.set()
            growing.join()
            server.terminate()
            server.communicate()
    print("  ".join(f"{key} {value:.4g}" for key, value in row.items()), file=sys.stderr)
    return row


def wait_for(looking: list[Reader]) -> None:
    """Waits until all have seen everything."""
    deadline = time.monotonic() + PATIENCE_S
    while not all(reader.first_s for reader in looking):
        assert time.monotonic() < deadline, "the file was not read in time"
        time.sleep(0.05)


def go_on(path: Path, ended: threading.Event) -> None:
    """Appends further windows."""
    window = newest_event(path)
    assert window is not None
    while not ended.wait(1 / WINDOWS_PER_S):
        window["window"] += 1
        window["t"] += 1 / WINDOWS_PER_S
        with path.open("ab") as stream:
            stream.write(to_line(window))


def cpu_s(process: psutil.Process) -> float:
    """Processor time so far."""
    times = process.cpu_times()
    return times.user + times.system


if __name__ == "__main__":
    main()
