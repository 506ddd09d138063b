"""The report as one HTML page that needs no server and no network. Pure but for assets.

Tables and sentences are in the page as HTML. Its script draws charts from the same numbers, which
the page holds as JSON. A content security policy allows the page's own script only, whatever names
and messages of a run contain. uPlot 1.6.32 draws the curves; the files of its ``dist`` folder and
its license are in ``assets/``.
"""

import base64
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any, Final

from evener.observe.numbers import human_bytes, human_count, human_duration

GENERATOR: Final = '<meta name="generator" content="evener report">'
"""A file with this line is a report of ours, so that ``evener report`` may replace it."""

_MOST_CLASSES: Final = 60
"""The most classes whose matrix the page shows: cells of a larger one are too small to read."""

Document = Mapping[str, Any]


def page(document: Document) -> str:
    """Return the page of a report.

    Args:
        document: ``runs``, each as ``figures`` returns it, and ``version``.
    """
    runs = document["runs"]
    script = _asset("uPlot.iife.min.js") + _asset("charts.js") + _asset("page.js")
    style = _asset("uPlot.min.css") + _asset("page.css")
    policy = "; ".join(
        [
            "default-src 'none'",
            f"script-src '{_digest(script)}'",
            f"style-src '{_digest(style)}'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )
    title = " · ".join(text(run["name"]) for run in runs)
    # A "<" could end the script element, whatever the text around it.
    data = json.dumps(document, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            GENERATOR,
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            '<link rel="icon" href="data:,">',
            f"<title>{title}: evener report</title>",
            f"<style>{style}</style>\n</head>\n<body{' class=several' if len(runs) > 1 else ''}>",
            f"<header><h1>{title}</h1></header>\n<main>",
            _overview(runs),
            _losses(runs),
            '<div class="runs">',
            *(_run(number, run, alone=len(runs) == 1) for number, run in enumerate(runs)),
            "</div>\n</main>",
            f"<footer>Made by evener {text(document['version'])}. Charts: drag to zoom, double "
            "click to reset; with the keyboard: arrows, plus, minus, and 0 to reset.</footer>",
            f'<script type="application/json" id="numbers">{data}</script>',
            f"<script>{script}</script>\n</body>\n</html>\n",
        ]
    )


def text(value: Any) -> str:
    """Return a value as HTML that shows it, whatever it holds."""
    shown = "".join(
        c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in str(value)
    )
    return escape(shown)


@cache
def _asset(name: str) -> str:
    return files("evener.run_report").joinpath("assets", name).read_text(encoding="utf-8")


def _digest(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()


# ── values for people ────────────────────────────────────────────────────────────────────────────


def _shown(value: Any, form: Callable[[Any], str]) -> str:
    return "–" if value is None else form(value)


def _percent(value: float) -> str:
    return f"{value:.1%}"


def _times(value: float) -> str:
    return f"{value:.2f}×"


def _loss(value: float) -> str:
    return f"{value:.4g}"


def _whole(value: float) -> str:
    return f"{value:,.0f}"


# ── parts of the page ────────────────────────────────────────────────────────────────────────────


def _table(
    head: Sequence[str], rows: Iterable[Sequence[str]], label: str, *, caption: str = ""
) -> str:
    """Return a table; cells are HTML already, and the first of each row is its head."""
    columns = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    body = "\n".join(
        f'<tr><th scope="row">{row[0]}</th>' + "".join(f"<td>{c}</td>" for c in row[1:]) + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll" role="region" aria-label="{label}" tabindex="0"><table>'
        f"{f'<caption>{caption}</caption>' if caption else ''}<thead><tr>{columns}</tr></thead>\n"
        f"<tbody>{body}</tbody></table></div>"
    )


#: Rows of the overview: label, part of the document, key, form of the value.
_OVERVIEW: Final = (
    ("state", "run", "state", text),
    ("policy", "run", "policy", text),
    ("backend", "run", "backend", text),
    ("windows", "run", "windows", _whole),
    ("windows redone", "run", "void_windows", _whole),
    ("optimizer steps", "run", "steps", _whole),
    ("sessions", "run", "sessions", _whole),
    ("training time", "run", "elapsed_s", human_duration),
    ("samples", "team", "samples", _whole),
    ("last training loss", "team", "last_loss", _loss),
    ("held-out loss", "team", "heldout_loss", _loss),
    ("unit of speeds", "run", "unit", lambda unit: f"{text(unit)} per second"),
    ("speed of the team", "team", "speed", human_count),
    ("fastest rank alone", "team", "best_alone", human_count),
    ("all ranks alone, summed (ideal)", "team", "ideal", human_count),
    ("equal split", "team", "equal_split", human_count),
    ("team / fastest rank", "team", "of_best_alone", _times),
    ("team / ideal", "team", "of_ideal", _percent),
    ("no multiple is shown, as", "team", "no_multiple", text),
    ("time computing", "team", "compute_fraction", _percent),
    ("time waiting for others", "team", "wait_fraction", _percent),
    ("time exchanging", "team", "sync_fraction", _percent),
    ("time waiting for data", "team", "data_fraction", _percent),
    ("bytes sent", "team", "sent_bytes", human_bytes),
)

_SOURCES: Final = {
    "measured": "was measured by each rank alone",
    "compute time": "is what it did per second of its own compute time",
}


def _overview(runs: Sequence[Document]) -> str:
    rows = [
        [label, *(_shown(run[part][key], form) for run in runs)]
        for label, part, key, form in _OVERVIEW
        if any(run[part][key] is not None for run in runs)
    ]
    sources = dict.fromkeys(str(run["team"]["solo_source"]) for run in runs)
    told = "; ".join(f"what a rank does alone {_SOURCES.get(s, text(s))}" for s in sources)
    table = _table(["", *(text(run["name"]) for run in runs)], rows, "Overview")
    return (
        f'<section id="overview"><h2>Overview</h2>{table}'
        f"<p>{told[:1].upper()}{told[1:]}.</p></section>"
    )


def _losses(runs: Sequence[Document]) -> str:
    return (
        '<section id="loss"><h2>Loss</h2>'
        + _chart("loss-by-samples", "Loss by samples", 0)
        + _chart("loss-by-time", "Loss by training time", 0)
        + _resolution(runs)
        + "</section>"
    )


def _resolution(runs: Sequence[Document]) -> str:
    merged = max(run["series"]["windows_per_point"] for run in runs)
    if merged <= 1:
        return ""
    return (
        f"<p>A point of a curve stands for up to {merged:,.1f} windows: the line is their mean, "
        "the band reaches from the least to the largest value of a single window.</p>"
    )


def _chart(kind: str, title: str, run: int) -> str:
    return (
        f'<figure><figcaption>{title}</figcaption><div class="chart" data-chart="{kind}" '
        f'data-run="{run}" tabindex="0" role="group" aria-label="Chart: {title}"></div></figure>'
    )


def _run(number: int, run: Document, *, alone: bool) -> str:
    name = "" if alone else f"{text(run['name'])}: "
    series = run["series"]
    notes = "".join(f"<li>{text(note)}</li>" for note in run["notes"])
    ending = run["run"]["message"]
    charts = [
        ("speed", "Throughput of the team, of each rank alone, and of all of them (ideal)", True),
        ("shares", "Share of each rank", True),
        ("waits", "Part of its time that each rank waits for others", True),
        ("anchor", "Anchor: local steps of the slowest rank in a window", series["anchor"]),
        ("sent", "Bytes sent in a window, by all ranks together", series["sent_bytes"]),
    ]
    return "\n".join(
        [
            f'<section class="run" id="run-{number}"><h2>{name}What ran on what</h2>',
            f'<p class="ending">Ended with: {text(ending)}</p>' if ending else "",
            f'<ul class="notes">{notes}</ul>' if notes else "",
            _ranks(run),
            f'<p class="straggler">{text(run["straggler"]["text"])}</p>',
            f"<h2>{name}Throughput, shares and waits</h2>",
            *(_chart(kind, title, number) for kind, title, present in charts if present),
            f"<h2>{name}Timeline</h2>",
            _timeline(number, run),
            f"<h2>{name}Events</h2>",
            _events(run),
            _plans(run),
            _checkpoints(run),
            _confusion(run),
            f"<p>{_versions(run)}</p></section>",
        ]
    )


def _ranks(run: Document) -> str:
    unit = text(run["run"]["unit"])
    head = ["rank", "member", "host", "device", "share", f"{unit}/s alone", "samples", "wait"]
    head += ["was last in", "waited for"]
    rows = []
    for rank in run["ranks"]:
        device = text(rank["device"] or "–")
        if rank["emulated"] is not None:
            device += f", emulated {rank['emulated']:g}× slower"
        if rank["parked"]:
            device += ", parked"
        rows.append(
            [
                str(rank["rank"]),
                text(rank["member"]),
                text(rank["host"] or "–"),
                device,
                _shown(rank["share"], _percent),
                _shown(rank["alone"], human_count),
                _shown(rank["samples"], _whole),
                _shown(rank["wait_fraction"], _percent),
                f"{rank['windows_last']:,}",
                _shown(rank["waited_for_s"], human_duration),
            ]
        )
    return _table(head, rows, "Ranks")


def _timeline(number: int, run: Document) -> str:
    merged = run["timeline"]["merged"]
    told = f" Up to {merged:,} neighbouring windows are one cell." if merged > 1 else ""
    buttons = "".join(
        f'<button type="button" data-do="{do}" aria-label="{label}">{sign}</button>'
        for do, label, sign in (
            ("left", "earlier", "◀"),
            ("right", "later", "▶"),
            ("in", "zoom in", "+"),
            ("out", "zoom out", "−"),
            ("all", "show the whole run", "all"),
        )
    )
    return (
        f'<figure class="timeline" data-run="{number}"><div class="bar"><span class="key data">'
        'data</span><span class="key compute">'
        'compute</span><span class="key wait">wait</span><span class="key sync">exchange</span>'
        '<span class="key checkpoint">checkpoint</span>'
        f'<span class="key event">event</span><span class="buttons">{buttons}</span></div>'
        '<canvas tabindex="0" role="img" aria-label="Timeline of the ranks; arrows pan, plus and '
        'minus zoom, 0 shows the whole run"></canvas><div class="tip" hidden></div>'
        '<output aria-live="polite"></output>'
        "<figcaption>Drag to pan; zoom with the buttons, the keys plus and minus, two fingers, or "
        "Ctrl and the wheel. Where a column of pixels holds several windows, its heights are their "
        "sums, and the line is the largest wait of a single one. Windows end when they were "
        "applied; waiting for data, compute, wait and exchange are drawn one after another up to "
        "there. The rest is planning, evaluating and saving. The line below a rank is a checkpoint "
        f"that it writes while it trains.{told}</figcaption></figure>"
    )


def _events(run: Document) -> str:
    if not run["events"]:
        return "<p>No rank joined, left or fell behind.</p>"
    rows = [
        [human_duration(e["t_s"] or 0.0), f"{e['window']:,}", text(e["type"]), text(e["text"])]
        for e in run["events"]
    ]
    caption = _counted("Membership, stragglers and the end", run["events"], run["num_events"])
    return _table(["at", "window", "event", "what"], rows, "Events", caption=caption)


def _plans(run: Document) -> str:
    if not run["reasons"]:
        return ""
    rows = [
        [human_duration(e["t_s"] or 0.0), f"{e['window']:,}", text(e["text"])]
        for e in run["reasons"]
    ]
    caption = _counted("Changed plans: samples of each rank", run["reasons"], run["run"]["plans"])
    return _table(["at", "window", "samples by rank, and why"], rows, "Plans", caption=caption)


def _checkpoints(run: Document) -> str:
    if not run["checkpoints"]:
        return "<p>No checkpoint was written.</p>"
    rows = [
        [
            human_duration(c["t_s"] or 0.0),
            f"{c['window']:,}",
            text(c["path"]),
            _shown(c["num_bytes"], human_bytes),
            _shown(c["write_s"], human_duration),
            _shown(c["copy_s"], human_duration),
        ]
        for c in run["checkpoints"]
    ]
    caption = _counted("Checkpoints", run["checkpoints"], run["num_checkpoints"])
    head = ["at", "after windows", "path", "size", "written in", "training stood still for"]
    return _table(head, rows, "Checkpoints", caption=caption)


def _counted(what: str, shown: Sequence[Any], count: int) -> str:
    if len(shown) == count:
        return what
    return f"{what}: the first and the last {len(shown) // 2:,} of {count:,}"


def _confusion(run: Document) -> str:
    found = run["confusion"]
    if found is None:
        return ""
    if len(found["labels"]) > _MOST_CLASSES:
        return f"<p>The matrix of {len(found['labels']):,} classes is in summary.json.</p>"
    rows = []
    for label, counts in zip(found["labels"], found["counts"], strict=True):
        total = sum(counts) or 1
        # Classes instead of inline styles, which the security policy forbids.
        cells = [f'<span class="heat heat-{10 * n // total}">{n:,}</span>' for n in counts]
        rows.append([text(label), *cells])
    head = ["true class", *(text(label) for label in found["labels"])]
    caption = "Confusion matrix: held-out samples by true class (rows) and predicted class"
    return _table(head, rows, "Confusion matrix", caption=caption)


def _versions(run: Document) -> str:
    facts = [f"{name} {value}" for name, value in run["versions"].items()]
    facts += [f"{name}: {value}" for name, value in run["machine"].items()]
    if reason := run["run"]["backend_reason"]:
        facts.append(f"backend {run['run']['backend']}: {reason}")
    return text("; ".join(facts))
