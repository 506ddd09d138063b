"""The browser in which pages are tried."""

from shutil import which

_PROGRAMS = ("chromium", "chromium-browser", "google-chrome")


def find_browser() -> str | None:
    """Path of the first of these programs that is here."""
    return next(filter(None, map(which, _PROGRAMS)), None)
