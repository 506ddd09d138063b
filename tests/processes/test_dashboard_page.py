"""The dashboard in a real browser, over runs that go on, and over one that it stops."""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evener.observe.events import make_event
from evener.observe.following import read_events
from helpers.browsers import browsing
from helpers.dashboards import serve
from helpers.event_cases import committed_window, started, to_line
from helpers.launched import Sandbox
from helpers.pretraining import RUN_TIMEOUT_S, Lab

pytestmark = pytest.mark.browser

MARKUP = "<img src=x onerror=alert(1)>"
RANKS, EVENTS, NOW = "[aria-label=Ranks]", "[aria-label=Events]", "#now"
#: What a browser says of a request that fails, which a page cannot keep it from saying.
FAILED = "Failed to load resource"


def append(folder: Path, *events: dict[str, Any]) -> None:
    folder.mkdir(exist_ok=True)
    with (folder / "events.jsonl").open("ab") as stream:
        stream.write(b"".join(map(to_line, events)))


def has(tab: Any, text: str, within: str = "main") -> None:
    """Waits until an element shows a text."""
    tab.wait_for_function(
        "([within, text]) => document.querySelector(within).innerText.includes(text)",
        arg=[within, text],
    )


def test_live_updates_and_who_is_gone(sandbox: Sandbox) -> None:
    root = sandbox.folder / "runs"
    root.mkdir()
    append(root / "run", started(total_windows=100), *(committed_window(k) for k in range(20)))
    served = serve(sandbox, root)
    for scheme, width in (("light", 1200), ("dark", 360)):
        options = {"color_scheme": scheme, "viewport": {"width": width, "height": 900}}
        with browsing(served.url, **options) as tab:
            tab.wait_for_selector("html[data-drawn]")
            has(tab, "connected", NOW)
            assert tab.evaluate("document.documentElement.scrollWidth") <= width
            assert tab.locator(".chart canvas").count() == 4
            # What it does now stays in sight.
            tab.evaluate("scrollTo(0, document.body.scrollHeight)")
            tab.wait_for_function("() => scrollY > 500")
            assert 0 <= tab.locator("#line").bounding_box()["y"] < 100
            tab.evaluate("scrollTo(0, 0)")
            before = tab.locator("#line").inner_text()
            count = int(re.search(r"step (\d+)", before)[1])  # type: ignore[index]
            append(root / "run", committed_window(count), committed_window(count + 1))
            has(tab, f"step {count + 2}/100", NOW)
            lost = {"rank": 1, "member": "b", "window": count + 2, "reason": MARKUP}
            append(root / "run", make_event("worker_lost", t=count + 2.0, **lost))
            has(tab, "gone", RANKS)
            has(tab, f"lost rank 1 (b): {MARKUP}", EVENTS)
            assert tab.locator("main img").count() == 0
            append(root / "run", committed_window(count + 2, t=count + 3.0))
            tab.wait_for_function(
                f"() => !document.querySelector('{RANKS}').innerText.includes('gone')"
            )
    served.end()


def test_it_connects_again_to_a_server_that_was_started_again(sandbox: Sandbox) -> None:
    root = sandbox.folder / "runs"
    root.mkdir()
    append(root / "run", started(), committed_window(0))
    served = serve(sandbox, root)
    address = f"127.0.0.1:{served.port}"
    with browsing(served.url, allowed=FAILED) as tab:
        has(tab, "step 1", NOW)
        served.end()
        has(tab, "trying again", NOW)
        append(root / "run", committed_window(1))
        again = serve(sandbox, root, "--bind", address)
        has(tab, "step 2", NOW)
        has(tab, "connected", NOW)
        # The new server has another token, which only a stop needs: the page does not ask for it.
        assert not tab.locator("#ask").is_visible()
    again.end()


def test_a_token_is_asked_for_where_it_is_needed(sandbox: Sandbox) -> None:
    root = sandbox.folder / "runs"
    root.mkdir()
    append(root / "run", started(), committed_window(0))
    options = ("--bind", "0.0.0.0", "--token-file", sandbox.token_file("a token of some length"))
    served = serve(sandbox, root, *options)
    url = f"http://127.0.0.1:{served.port}/"
    with browsing(url, allowed=FAILED) as tab:
        tab.fill("#token", "a token of some length")
        tab.keyboard.press("Enter")
        has(tab, "step 1", NOW)
    with browsing(f"{url}#a%20token%20of%20some%20length") as tab:
        has(tab, "step 1", NOW)
    served.end()


def url_of(text: Iterator[bytes]) -> str:
    for line in text:
        if found := re.search(rb"dashboard at (\S+)", line):
            return found[1].decode()
    raise AssertionError("the dashboard did not start")


def test_the_button_stops_a_run_with_a_checkpoint(lab: Lab) -> None:
    lab.configure(epochs=100_000, eval={"every": 0}, checkpoint={"every": 0})
    running = lab.command("run.yaml", "--nproc", 2, "--dashboard")
    url = url_of(running.process.stderr)
    with browsing(url, allowed=FAILED) as tab:
        has(tab, "running", NOW)
        has(tab, "step", NOW)
        tab.locator("#stop").focus()
        tab.keyboard.press("Enter")
        has(tab, "it saves a checkpoint first", "header")
        ended = running.end(RUN_TIMEOUT_S)
    assert ended.code == 128 + 15
    run = lab.path_of("run")
    last = run.of_type("run_finished")[-1]
    assert last["reason"] == "stopped"
    assert run.checkpoints[-1].name == f"step-{last['window']}"
    # The dashboard has ended with its launcher.
    assert "Traceback" not in ended.err


SCRIPT = """\
pass_gate()
import torch
from torch import nn
from evener import Ddp
from evener.observe.jsonl import JsonlSink
from pathlib import Path

torch.manual_seed(0)  # all workers have the same data
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
sinks = [lambda: JsonlSink(Path("runs/run/events.jsonl"))]
ddp = Ddp.setup(model, optimizer, devices="cpu", sinks=sinks, quiet=True)
loader = ddp.loader([(torch.randn(8), torch.randn(1)) for _ in range(64)], batch_size=8)
for epoch in ddp.epochs(100_000):
    for x, y in loader.epoch(epoch):
        ddp.backward(((model(x) - y) ** 2).mean())
        ddp.step()
        time.sleep(0.05)
"""


@pytest.mark.parametrize("rank", [1, 0])  # rank 0 records the run: then another one continues
def test_a_rank_that_is_killed_is_gone_until_another_takes_its_place(
    sandbox: Sandbox, rank: int
) -> None:
    script = sandbox.script(SCRIPT, "train.py")
    sandbox.open_gate(2)
    options = ("--elastic", "1:2", "--nproc", 2, "--dashboard")
    running = sandbox.evener("launch", *options, script)
    with browsing(url_of(running.process.stderr), allowed=FAILED) as tab:
        tab.wait_for_function(  # both have contributed
            "() => document.querySelectorAll('[aria-label=Ranks] tbody tr').length === 2"
        )
        *_, own = (
            event
            for event in read_events(sandbox.folder / "runs" / "run" / "events.jsonl")
            if event["type"] == "worker_started" and event["rank"] == rank
        )
        os.kill(own["pid"], signal.SIGKILL)
        has(tab, "gone", RANKS)
        has(tab, f"lost rank {rank} ({own['member']})", EVENTS)
        sandbox.open_gate(1)  # for the one that takes its place
        has(tab, f"rank {rank} ({own['member']}.2) joined", EVENTS)
        has(tab, "replaced", RANKS)
        told = tab.locator(f"{RANKS} tbody td:nth-child(5)").all_inner_texts()
        assert (len(told), told.count("replaced")) == (3, 1)
        assert {"replaced"} < set(told) <= {"replaced", "here", "parked"}
    running.process.kill()
