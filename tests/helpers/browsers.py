"""The browser in which pages are tried."""

from collections.abc import Iterator
from contextlib import contextmanager
from shutil import which
from typing import Any
from urllib.parse import urlsplit

import pytest

from helpers.limits import PATIENCE_S

_PROGRAMS = ("chromium", "chromium-browser", "google-chrome")


def find_browser() -> str | None:
    """Path of the first of these programs that is here."""
    return next(filter(None, map(which, _PROGRAMS)), None)


@contextmanager
def browsing(url: str, allowed: str = "", **options: Any) -> Iterator[Any]:
    """A page in a browser; fails at its end for what the console said, and for foreign requests.

    Args:
        url: Of the page; a file may ask for nothing else, a server for what lies on it.
        allowed: A text in what the console may say.
        **options: Of the page, such as ``color_scheme``.
    """
    playwright = pytest.importorskip("playwright.sync_api")
    said: list[str] = []
    asked: list[str] = []
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=find_browser(), args=["--no-sandbox"])
        try:
            tab = browser.new_page(**options)
            tab.set_default_timeout(1000 * PATIENCE_S)
            tab.on("console", lambda message: said.append(message.text))
            tab.on("pageerror", lambda error: said.append(str(error)))
            tab.on("request", lambda request: asked.append(request.url))
            tab.on("dialog", lambda dialog: dialog.accept())
            tab.goto(url)
            yield tab
        finally:
            browser.close()
    assert [text for text in said if not (allowed and allowed in text)] == []
    place = urlsplit(url)
    origin = f"http://{place.netloc}/" if place.netloc else url
    assert all(one.startswith((origin, "data:")) for one in asked), asked


def luminance_ratio(one: str, other: str) -> float:
    """The contrast of two colours such as ``#ffffff``, as WCAG defines it: from 1 to 21."""
    low, high = sorted(map(_luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: str) -> float:
    digits = colour.strip().removeprefix("#")
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


_TEXTS = """() => {
    const parse = (text) => {
        const [r, g, b, a = 1] = text.match(/[\\d.]+/g).map(Number);
        return [r, g, b, a];
    };
    const hex = (rgb) => '#' + rgb.map((c) => Math.round(c).toString(16).padStart(2, '0')).join('');
    const ground = (element) => {
        if (!element) return [255, 255, 255];
        const [r, g, b, a] = parse(getComputedStyle(element).backgroundColor);
        if (a === 1) return [r, g, b];
        return ground(element.parentElement).map((c, i) => a * [r, g, b][i] + (1 - a) * c);
    };
    const found = [];
    const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) {
        const { textContent: text, parentElement: holder } = texts.currentNode;
        if (!text.trim() || !holder.checkVisibility()) continue;
        const ink = parse(getComputedStyle(holder).color).slice(0, 3);
        found.push([text.trim().slice(0, 40), hex(ink), hex(ground(holder))]);
    }
    return found;
}"""


def contrasts(tab: Any) -> list[tuple[str, float]]:
    """Every text that a page shows, and its contrast with what is behind it."""
    return [(text, luminance_ratio(ink, ground)) for text, ink, ground in tab.evaluate(_TEXTS)]
