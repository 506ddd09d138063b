"""The page of a report in a real browser: it answers, asks for nothing, and obeys the keyboard."""

import itertools
import re
from pathlib import Path
from typing import Any

import pytest

from evener import cli
from evener.observe.events import make_event
from evener.run_report.page import page
from evener.run_report.writing import report as report_of
from helpers.browsers import browsing, contrasts, luminance_ratio
from helpers.event_cases import committed_window, started, to_line

pytestmark = pytest.mark.browser

SCHEMES = ["light", "dark"]
TIMELINE, TOLD = ".timeline canvas", ".timeline output"


def write_run(folder: Path, count: int, **options: Any) -> Path:
    """A run in which rank 1 is slow for a while, is lost and comes back."""
    folder.mkdir()
    with (folder / "events.jsonl").open("wb") as stream:
        stream.write(to_line(started(**options)))
        worker = {"rank": 1, "member": "b", "pid": 7, "host": "box", "device": "cpu"}
        stream.write(to_line(make_event("worker_started", t=0.0, **worker, emulated=2.5)))
        for k in range(count):
            slow = count // 3 < k < count // 2
            times = (
                ((0.5, 0.4, 0.1), (0.9, 0.0, 0.1)) if slow else ((0.7, 0.2, 0.1), (0.8, 0.1, 0.1))
            )
            stream.write(to_line(committed_window(k, t=k + 1.0, times_s=times)))
            if k == count // 2:
                lost = {"rank": 1, "member": "b", "window": k, "reason": "<b>killed</b>"}
                stream.write(to_line(make_event("worker_lost", t=k + 1.0, **lost)))
    return folder


def report(folder: Path, *more: Path) -> str:
    path = folder.parent / "page.html"
    assert cli.main(["report", str(folder), *map(str, more), "-o", str(path)]) == 0
    return path.as_uri()


def changes(tab: Any, selector: str, before: str) -> None:
    """Waits until the text of an element is another one."""
    tab.wait_for_function(
        "([selector, before]) => document.querySelector(selector).textContent !== before",
        arg=[selector, before],
    )


def picture(tab: Any, selector: str) -> str:
    return str(tab.locator(selector).evaluate("canvas => canvas.toDataURL()"))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_everything_is_drawn_at_the_width_of_a_phone_too(tmp_path, scheme):
    address = report(write_run(tmp_path / "run", 60), write_run(tmp_path / "other", 30))
    for width in (1920, 1280, 390):
        options = {"color_scheme": scheme, "viewport": {"width": width, "height": 800}}
        with browsing(address, **options) as tab:
            tab.wait_for_selector("html[data-drawn]")
            # Two of losses and one of throughput for both, then throughput, shares, waits of each.
            assert tab.locator(".chart canvas").count() == 9
            assert tab.evaluate("document.documentElement.scrollWidth") <= width
            drawn = """canvas => {
                const pixels = canvas.getContext('2d')
                    .getImageData(0, 0, canvas.width, canvas.height).data;
                return new Set(new Uint32Array(pixels.buffer)).size;
            }"""
            for canvas in tab.locator("canvas").all():
                assert canvas.evaluate(drawn) > 3
            assert tab.locator("b").count() == 0
            assert "<b>killed</b>" in tab.inner_text("#run-0")


def test_the_first_screen_answers_three_questions(tmp_path):
    address = report(write_run(tmp_path / "run", 60))
    with browsing(address, viewport={"width": 1280, "height": 800}) as tab:
        tab.wait_for_selector("html[data-drawn]")
        parts = tab.locator(".verdict > div").all()
        assert [part.locator("h2").inner_text() for part in parts] == [
            "Is the slow device worth it?",
            "Who waits for whom?",
            "What should I change?",
        ]
        for part in [*parts, tab.locator("[aria-label=Ranks] tbody")]:
            box = part.bounding_box()
            assert box["y"] + box["height"] <= 800
        assert "×" in parts[0].locator(".big").inner_text()
        assert "rank 1 is emulated 2.5× slower" in parts[0].inner_text()
        waits = tab.locator("[aria-label=Waits] tbody tr").all_inner_texts()
        assert [row.split("\t")[0] for row in waits] == ["rank 0", "rank 1 (emulated 2.5×)"]


def test_a_phone_shows_share_and_wait_first(tmp_path):
    address = report(write_run(tmp_path / "run", 60))
    with browsing(address, viewport={"width": 390, "height": 844}) as tab:
        tab.wait_for_selector("html[data-drawn]")
        for name in ("share", "wait"):
            box = tab.locator("[aria-label=Ranks] th", has_text=name).first.bounding_box()
            assert box["x"] + box["width"] <= 390


@pytest.mark.parametrize("scheme", SCHEMES)
def test_colours_hold_in_greyscale_and_texts_can_be_read(tmp_path, scheme):
    address = report(write_run(tmp_path / "run", 60))
    with browsing(address, color_scheme=scheme) as tab:
        tab.wait_for_selector("html[data-drawn]")
        colour = "name => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`)"
        names = ("data", "compute", "wait", "sync")
        for one, other in itertools.combinations([tab.evaluate(colour, n) for n in names], 2):
            assert luminance_ratio(one, other) >= 1.5, (one, other)
        found = contrasts(tab)
        assert len(found) > 100
        assert {text: ratio for text, ratio in found if ratio < 4.5} == {}


def test_the_timeline_zooms_and_pans_by_keyboard_mouse_and_buttons(tmp_path):
    with browsing(report(write_run(tmp_path / "run", 1000))) as tab:
        said = tab.locator(TOLD)
        whole = said.inner_text()
        assert "windows 0 to 999" in whole
        tab.locator(TIMELINE).focus()
        for _ in range(12):
            tab.keyboard.press("+")
        tab.wait_for_function("!document.querySelector('output').textContent.includes('0 to 999')")
        near = said.inner_text()
        tab.keyboard.press("ArrowRight")
        changes(tab, TOLD, near)
        tab.locator(TIMELINE).hover(position={"x": 400, "y": 20})
        assert "rank 0, a, window" in tab.locator(".timeline .tip").inner_text()
        tab.get_by_label("show the whole run").click()
        tab.wait_for_function(
            "text => document.querySelector('output').textContent === text", arg=whole
        )
        box = tab.locator(TIMELINE).bounding_box()
        tab.get_by_label("zoom in").click()
        changes(tab, TOLD, whole)
        near = said.inner_text()
        tab.mouse.move(box["x"] + 300, box["y"] + 20)
        tab.mouse.down()
        tab.mouse.move(box["x"] + 200, box["y"] + 20, steps=4)
        tab.mouse.up()
        changes(tab, TOLD, near)


def test_charts_share_zoom_cursor_and_flags_with_the_timeline(tmp_path):
    with browsing(report(write_run(tmp_path / "run", 100))) as tab:
        shares, speed = "[data-chart=shares]", "[data-chart=speed]"
        whole, before = tab.locator(TOLD).inner_text(), picture(tab, f"{speed} canvas")
        tab.locator(shares).focus()
        tab.keyboard.press("+")
        changes(tab, TOLD, whole)
        tab.wait_for_function(
            "before => document.querySelector('[data-chart=speed] canvas').toDataURL() !== before",
            arg=before,
        )
        tab.keyboard.press("0")
        over = tab.locator(f"{shares} .u-over")
        over.scroll_into_view_if_needed()
        box = over.bounding_box()
        over.hover(position={"x": box["width"] / 4, "y": 50})
        told = tab.locator(f"{speed} .u-legend").inner_text()
        # Constants can be read at every x, and a time is also named by its window.
        assert "window" in told
        assert "ideal" in told
        assert "–" not in told
        assert tab.locator(".timeline .cursor").is_visible()
        # The loss at half of the time has a flag, which each chart names.
        for chart in (shares, speed):
            over = tab.locator(f"{chart} .u-over")
            over.hover(position={"x": over.bounding_box()["width"] * 51 / 100, "y": 50})
            assert "<b>killed</b>" in tab.locator(f"figure:has({chart}) .tip").inner_text()
        # A drag zooms all, a double click resets.
        tab.mouse.down()
        tab.mouse.move(box["x"] + 10, box["y"] + 60, steps=4)
        tab.mouse.up()
        changes(tab, TOLD, whole)
        tab.locator(f"{speed} .u-over").dblclick()
        tab.wait_for_function(
            "text => document.querySelector('output').textContent === text", arg=whole
        )


def test_curves_can_be_hidden_by_keyboard(tmp_path):
    with browsing(report(write_run(tmp_path / "run", 5000))) as tab:
        legend = tab.locator("[data-chart=shares] .u-legend th[role=button]:visible")
        assert legend.count() == 2
        legend.first.focus()
        tab.keyboard.press("Enter")
        # The curve and its two extremes.
        tab.wait_for_function(
            "document.querySelectorAll('[data-chart=shares] .u-series.u-off').length === 3"
        )


def test_numbers_and_ticks_are_round(tmp_path):
    with browsing(report(write_run(tmp_path / "run", 2))) as tab:
        seconds = [0, 0.0004, 0.5, 59.96, 96.23, 161, 3599.7, 3660, 90_000]
        told = ["0 s", "400 µs", "500 ms", "1 min", "1 min 36 s", "2 min 41 s", "1 h"]
        assert tab.evaluate("seconds => seconds.map((s) => charts.duration(s))", seconds) == [
            *told,
            "1 h 1 min",
            "1 d 1 h",
        ]
        ticks = "([from, to]) => charts.timeTicks(from, to, 8).ticks"
        assert tab.evaluate(ticks, [0, 100]) == [0, 15, 30, 45, 60, 75, 90]
        near = [61.4, 61.6, 61.8, 62, 62.2, 62.4, 62.6]
        assert tab.evaluate(ticks, [61.3, 62.7]) == pytest.approx(near)
        assert tab.evaluate("charts.duration(61.4, 0.2)") == "1 min 1.4 s"


def test_a_single_window_is_drawn_as_a_point(tmp_path):
    is_drawn = """() => {
        const canvas = document.querySelector("[data-chart=shares] canvas");
        const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        const isBlue = (i) => data[i] < 40 && data[i + 1] > 80 && data[i + 2] > 140;
        return data.some((_, i) => i % 4 === 0 && data[i + 3] > 200 && isBlue(i));
    }"""
    with browsing(report(write_run(tmp_path / "run", 1))) as tab:
        tab.wait_for_function(is_drawn)


def test_a_run_without_windows_says_so(tmp_path):
    with browsing(report(write_run(tmp_path / "run", 0))) as tab:
        assert "no window" in tab.locator(TOLD).inner_text()
        assert "no window has been committed" in tab.inner_text("#run-0")
        assert not tab.locator(".chart").first.is_visible()


def test_several_runs_show_what_differs(tmp_path):
    first = write_run(tmp_path / "first", 100)
    with browsing(report(first, write_run(tmp_path / "other", 50, backend="shared"))) as tab:
        rows = tab.locator("[aria-label=Overview] tbody tr").all_inner_texts()
        table = dict(row.split("\t", 1) for row in rows)
        assert table["windows"] == "100\t50 (−50.0%)"
        assert table["backend"] == "gloo\tshared"
        assert "policy" not in table
        assert "policy sync" in tab.inner_text("#overview")
        colours = """() => charts_of('loss-by-samples').concat(charts_of('speeds'));
            function charts_of(kind) {
                return [...document.querySelectorAll(`[data-chart=${kind}] .u-marker`)]
                    .map((one) => one.style.borderColor).filter(Boolean);
            }"""
        *losses, one, other = tab.evaluate(colours)
        assert losses == [one, other]
        assert one != other


def test_many_ranks_fit_a_phone(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    times = [(0.5 + k / 100, 0.4 - k / 100, 0.1) for k in range(10)]
    ten = {"samples": (2,) * 10, "losses": (2.0,) * 10, "times_s": times}
    events = [started(members=list("abcdefghij")), *(committed_window(k, **ten) for k in range(9))]
    (folder / "events.jsonl").write_bytes(b"".join(map(to_line, events)))
    with browsing(report(folder), viewport={"width": 390, "height": 844}) as tab:
        tab.wait_for_selector("html[data-drawn]")
        assert tab.locator("[aria-label=Waits] .heat").count() == 100
        assert tab.evaluate("document.documentElement.scrollWidth") <= 390
        waited = tab.locator("[aria-label=Waits] .heat[title^='rank 0 waited']").last
        assert re.search(r"waited [\d.]+ m?s for rank 9", waited.get_attribute("title"))


def test_the_page_of_a_bench_begins_with_what_to_choose(tmp_path):
    runs = [write_run(tmp_path / name, 30) for name in ("sync-gloo-1", "cadence-gloo-1")]
    common = {"spread": 0.02, "loss_by_units": 2.3, "heldout_loss": None, "rounds": 1}
    candidates = [
        {"name": "sync-gloo", "speed": 3488.4, "loss_by_time": 2.51, **common},
        {"name": "cadence-gloo", "speed": 4100.2, "loss_by_time": 2.41, **common},
    ]
    bench = {
        **{"unit": "tokens", "seconds": 161, "units": 400_000, "candidates": candidates},
        **{"recommended": "cadence-gloo", "reason": "It has the lowest loss."},
        "skipped": {"sync-nccl": "<b>no GPU</b>"},
    }
    path = tmp_path / "bench.html"
    path.write_text(page({**report_of(runs), "bench": bench}), encoding="utf-8")
    with browsing(path.as_uri(), viewport={"width": 1280, "height": 800}) as tab:
        tab.wait_for_selector("html[data-drawn]")
        rows = tab.locator("[aria-label=Candidates] tr").all_inner_texts()
        assert "loss after 2 min 41 s" in rows[0]
        assert rows[2].startswith("cadence-gloo (recommended)\t4,100")
        assert "sync-nccl was skipped: <b>no GPU</b>" in tab.inner_text("main")
        assert tab.locator("[aria-label=Candidates]").bounding_box()["y"] < 200
