"""The report of a benchmark: options, statistics, the JSON file and its tables, in Markdown.

Every report has the machine, the commit, the versions, the load average before and after, the
command line, and a list of rows. A row is one way of doing something; a figure of it is the median
over rounds, and ``FIGURE_90`` the 5th and 95th percentile.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent

Row = Mapping[str, Any]

#: What tells rows of one table from those of another; printed once, above it.
FACTS = (
    "mbit_per_s",
    "team",
    "speeds",
    "condition",
    "ranks",
    "params",
    "tokens_per_rank",
    "batch_size",
)


# ── options ──────────────────────────────────────────────────────────────────────────────────────


def make_parser(description: str) -> argparse.ArgumentParser:
    """Return a command line with ``--json``; its help is the description's first line."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="write the report there")
    return parser


def some_of(known: Collection[str]) -> Callable[[str], list[str]]:
    """Return a reader of some of these names, with commas between them."""

    def read(text: str) -> list[str]:
        names = text.split(",")
        if unknown := [n for n in names if n not in known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(known)}")
        return names

    return read


def numbers(text: str) -> list[int]:
    """Read ``2,4`` as numbers."""
    values = [int(t) if t.isdecimal() else 0 for t in text.split(",")]
    if not all(values):
        raise argparse.ArgumentTypeError(f"{text!r}: give numbers above 0, such as 2,4")
    return values


# ── statistics ───────────────────────────────────────────────────────────────────────────────────


def spread(key: str, values: Sequence[float]) -> dict[str, Any]:
    """Return the median over rounds, and their 5th and 95th percentile: ``{key, key_90}``."""
    low, middle, high = (float(f"{v:.4g}") for v in np.quantile(values, [0.05, 0.5, 0.95]))
    return {key: middle, f"{key}_90": [low, high]}


def ratios(values: Sequence[float], others: Sequence[float]) -> list[float]:
    """Return, round by round, values over others."""
    return [v / o for v, o in zip(values, others, strict=True)]


# ── the file ─────────────────────────────────────────────────────────────────────────────────────


def load_average() -> float:
    """Return how many programs wanted a core in the last minute, this benchmark's included."""
    return round(os.getloadavg()[0], 2)


def load_before() -> float:
    """Return the load average before a measurement; print it if other programs take cores."""
    load, cores = load_average(), len(os.sched_getaffinity(0))
    if load > cores / 2:
        print(f"load average {load} on {cores} cores before the start: figures will be disturbed")
    return load


def write_report(
    arguments: argparse.Namespace, before: float, rows: Sequence[Row], **content: Any
) -> None:
    """Write the report, if ``--json`` is given.

    Args:
        arguments: The command line.
        before: The load average before the measurement.
        rows: What was measured.
        **content: Further facts.
    """
    if arguments.json is None:
        return
    options = {k: v for k, v in vars(arguments).items() if not isinstance(v, Path) and k != "json"}
    versions = {name: version(name) for name in ("torch", "transformers", "numpy", "evener")}
    document = {
        "benchmark": Path(sys.argv[0]).stem,
        "machine": _machine(),
        "commit": _commit(),
        "versions": {"python": platform.python_version(), **versions},
        "load_average": [before, load_average()],
        "arguments": options,
        **content,
        "rows": rows,
    }
    Path(arguments.json).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print(f"wrote {arguments.json}")


def _machine() -> dict[str, Any]:
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        model = names[0] if names else model
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {"cpu": model, "cores": os.cpu_count(), "memory_gib": round(memory_gib, 1)}


def _commit() -> str:
    """Return the commit of the tree, with ``+changes`` if it has uncommitted ones."""

    def git(*args: str) -> str:
        done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    changed = "+changes" if git("status", "--porcelain") else ""
    return (git("rev-parse", "--short=12", "HEAD") or "unknown") + changed


# ── tables ───────────────────────────────────────────────────────────────────────────────────────


def text_of(rows: Sequence[Row]) -> str:
    """Return the tables of rows, one for each set of facts that they share."""
    facts = [name for name in FACTS if any(name in row for row in rows)]
    groups: dict[str, list[Row]] = {}
    for row in rows:
        title = ", ".join(f"{name} {brief(row[name])}" for name in facts if name in row)
        groups.setdefault(title.replace("_", " "), []).append(row)
    parts = [f"{title}\n\n{_table(group)}\n" for title, group in groups.items()]
    return "\n".join(parts)


def _table(rows: Sequence[Row]) -> str:
    """Return a line for each row, with a column for each of its figures."""
    columns = dict.fromkeys(
        name
        for row in rows
        for name, value in row.items()
        if name not in FACTS
        and not name.endswith(("_90", "_aim"))
        and isinstance(value, str | int | float | None)
    )
    lines = [[column.replace("_", " ") for column in columns]]
    lines += [[_cell(row, column) for column in columns] for row in rows]
    lines.insert(1, ["---"] * len(columns))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(row: Row, column: str) -> str:
    """Return a figure, its 5th and 95th percentile in ``()``, and what is aimed at in ``[]``."""
    if column not in row:
        return ""
    text = brief(row[column])
    if f"{column}_90" in row:
        low, high = row[f"{column}_90"]
        text += f" ({brief(low)}..{brief(high)})"
    if (aim := row.get(f"{column}_aim")) is not None:
        text += f" [{brief(aim)}]"
    return text


def brief(value: Any) -> str:
    """Return a value in few characters."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list | tuple):
        return ":".join(map(brief, value))
    return "none" if value is None else str(value)
