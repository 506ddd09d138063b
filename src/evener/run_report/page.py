"""The page of reports and of the dashboard, as one HTML file. Pure but for assets.

A report's page holds the document as JSON and needs no server and no network; the dashboard's page
requests it from its server. The script draws everything from the document. A content security
policy allows only that script, whatever names and messages of a run contain. uPlot 1.6.32 draws
the curves; the files of its ``dist`` folder and its license are in ``assets/``.
"""

import base64
import hashlib
import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any, Final

GENERATOR: Final = '<meta name="generator" content="evener report {}">'
"""Identifies the runs of a page, so that ``evener report`` may replace a page of the same runs."""

_SCRIPTS: Final = ("uPlot.iife.min.js", "charts.js", "timeline.js", "page.js", "live.js")
_STYLES: Final = ("uPlot.min.css", "page.css")


def page(document: Mapping[str, Any] | None = None, runs: str = "") -> str:
    """Return the page.

    Args:
        document: ``runs``, each as ``figures`` returns it, and ``version``. Without it, return the
            dashboard's page.
        runs: A hexadecimal digest that identifies the runs.
    """
    script, style = ("".join(map(_asset, names)) for names in (_SCRIPTS, _STYLES))
    # A "<" could end the script element.
    data = json.dumps(document, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    found = _asset("page.html")
    for name, value in (
        ("policy", policy(is_live=document is None)),
        ("generator", GENERATOR.format(runs)),
        ("style", style),
        ("script", script),
        ("numbers", data),  # last, because names of runs may contain anything
    ):
        found = found.replace(f"{{{{{name}}}}}", value)
    return found


@cache
def policy(*, is_live: bool) -> str:
    """Return the content security policy: this page's own script, and only its own server."""
    script, style = ("".join(map(_asset, names)) for names in (_SCRIPTS, _STYLES))
    return "; ".join(
        [
            "default-src 'none'",
            f"script-src '{_digest(script)}'",
            f"style-src '{_digest(style)}'",
            *(["connect-src 'self'"] if is_live else []),
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )


@cache
def _asset(name: str) -> str:
    return files("evener.run_report").joinpath("assets", name).read_text(encoding="utf-8")


def _digest(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
