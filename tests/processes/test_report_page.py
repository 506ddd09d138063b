"""The page of a report in a real browser: it draws, asks for nothing, and obeys the keyboard."""

from pathlib import Path

import pytest

from evener import cli
from evener.observe.events import make_event
from helpers.browsers import browsing
from helpers.event_cases import committed_window, started, to_line

pytestmark = pytest.mark.browser


def write_run(folder: Path, count: int) -> Path:
    """A run in which rank 1 is slow for a while, is lost and comes back."""
    folder.mkdir()
    with (folder / "events.jsonl").open("wb") as stream:
        stream.write(to_line(started()))
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
    page = folder.parent / "page.html"
    assert cli.main(["report", str(folder), *map(str, more), "-o", str(page)]) == 0
    return page.as_uri()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everything_is_drawn_at_the_width_of_a_phone_too(tmp_path, scheme):
    page = report(write_run(tmp_path / "run", 60), write_run(tmp_path / "other", 30))
    for width in (1200, 360):
        with browsing(page, color_scheme=scheme, viewport={"width": width, "height": 800}) as tab:
            tab.wait_for_selector("html[data-drawn]")
            # Two of losses for both, then throughput, shares and waits of each.
            assert tab.locator(".chart canvas").count() == 8
            assert tab.evaluate("document.documentElement.scrollWidth") <= width
            drawn = """canvas => {
                const pixels = canvas.getContext('2d')
                    .getImageData(0, 0, canvas.width, canvas.height).data;
                return new Set(new Uint32Array(pixels.buffer)).size;
            }"""
            for canvas in tab.locator("canvas").all():
                assert canvas.evaluate(drawn) > 3
            assert tab.locator("b").count() == 0
            assert "lost rank 1 (b): <b>killed</b>" in tab.inner_text("#run-0")


def test_the_timeline_zooms_and_pans_by_keyboard_mouse_and_buttons(tmp_path):
    with browsing(report(write_run(tmp_path / "run", 1000))) as tab:
        said = tab.locator(".timeline output")
        whole = said.inner_text()
        assert "windows 0 to 999" in whole
        tab.locator(".timeline canvas").focus()
        for _ in range(12):
            tab.keyboard.press("+")
        tab.wait_for_function("!document.querySelector('output').textContent.includes('0 to 999')")
        near = said.inner_text()
        tab.keyboard.press("ArrowRight")
        tab.wait_for_function(
            "text => document.querySelector('output').textContent !== text", arg=near
        )
        tab.locator(".timeline canvas").hover(position={"x": 400, "y": 10})
        assert "rank 0 (a), window" in tab.locator(".tip").inner_text()
        tab.get_by_label("show the whole run").click()
        tab.wait_for_function(
            "text => document.querySelector('output').textContent === text", arg=whole
        )
        box = tab.locator(".timeline canvas").bounding_box()
        tab.get_by_label("zoom in").click()
        tab.wait_for_function(
            "text => document.querySelector('output').textContent !== text", arg=whole
        )
        near = said.inner_text()
        tab.mouse.move(box["x"] + 300, box["y"] + 20)
        tab.mouse.down()
        tab.mouse.move(box["x"] + 200, box["y"] + 20, steps=4)
        tab.mouse.up()
        tab.wait_for_function(
            "text => document.querySelector('output').textContent !== text", arg=near
        )


def test_charts_zoom_by_keyboard_and_curves_can_be_hidden(tmp_path):
    with browsing(report(write_run(tmp_path / "run", 5000))) as tab:
        chart = tab.locator('[data-chart="shares"]')
        before = chart.locator("canvas").evaluate("canvas => canvas.toDataURL()")
        chart.focus()
        tab.keyboard.press("+")
        changed = (
            "([chart, before]) => document.querySelector(chart + ' canvas').toDataURL() !== before"
        )
        tab.wait_for_function(changed, arg=['[data-chart="shares"]', before])
        legend = chart.locator(".u-legend th[role=button]:visible")
        assert legend.count() == 2
        legend.first.focus()
        tab.keyboard.press("Enter")
        # The curve and its two extremes.
        tab.wait_for_function(
            "document.querySelectorAll('[data-chart=shares] .u-series.u-off').length === 3"
        )


def test_a_run_without_windows_is_a_page_without_errors(tmp_path):
    with browsing(report(write_run(tmp_path / "run", 0))) as tab:
        assert "no window" in tab.locator(".timeline output").inner_text()
