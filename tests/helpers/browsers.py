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
