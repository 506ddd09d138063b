"""Prints tables from the reports that benchmarks write.

python benchmarks/tables.py runs/bench/*.json
python benchmarks/tables.py runs/bench/*.json --markdown
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Row = Mapping[str, Any]

#: What tells rows of one table from those of another; said once, above it.
FACTS = (*("speeds", "slowed_by", "condition", "ranks", "params", "tokens_per_rank", "batch_size"),)
#: Endings of columns whose values stand in brackets beside the figure, and what is said of them.
BRACKETS = {
    "_90": "(low..high): 5th to 95th percentile of the values of which the figure is the median.",
    "_aim": "[value]: what is aimed at.",
}


def main() -> None:
    """Prints the tables of all files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--markdown", action="store_true", help="for docs/benchmarks.md")
    arguments = parser.parse_args()
    for number, path in enumerate(arguments.files):
        document = json.loads(path.read_text(encoding="utf-8"))
        print("\n" * bool(number), end="")
        print(heading(document, markdown=arguments.markdown), end="\n\n")
        print(text_of(document["rows"], markdown=arguments.markdown))


def spread(key: str, values: Sequence[float]) -> dict[str, Any]:
    """The median over rounds, and their 5th and 95th percentile: ``{key, key_90}``."""
    low, middle, high = (_rounded(v) for v in np.quantile(values, [0.05, 0.5, 0.95]))
    return {key: middle, f"{key}_90": [low, high]}


def ratios(values: Sequence[float], others: Sequence[float]) -> list[float]:
    """Round by round, values over others."""
    return [v / o for v, o in zip(values, others, strict=True)]


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def heading(document: Mapping[str, Any], *, markdown: bool) -> str:
    """The benchmark, the machine, the commit and the versions."""
    machine, versions = document["machine"], document["versions"]
    place = f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB"
    told = ", ".join(f"{name} {version}" for name, version in versions.items())
    before, after = document.get("load_average", ("?", "?"))
    facts = f"{place}; commit {document['commit']}; {told}; load {before} before, {after} after."
    name = document.get("benchmark", "?")
    return f"### {name}\n\n{facts}" if markdown else f"{name}: {facts}"


def text_of(rows: Sequence[Row], *, markdown: bool = False) -> str:
    """The tables of rows, one for each set of facts that they share, and what brackets mean."""
    facts = [
        name
        for name in FACTS
        if len({repr(row.get(name)) for row in rows}) > 1 or (rows and name in rows[0])
    ]
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        key = tuple(f"{name} {brief(row[name])}" for name in facts if name in row)
        groups.setdefault(key, []).append(row)
    parts = []
    for key, group in groups.items():
        title = ", ".join(key).replace("_", " ")
        above = f"**{title}**\n\n" if markdown else f"{title}\n"
        parts.append(above * bool(key) + table(group, markdown=markdown))
    keys = {key for row in rows for key in row}
    parts += [text for ending, text in BRACKETS.items() if any(k.endswith(ending) for k in keys)]
    return "\n\n".join(parts)


def table(rows: Sequence[Row], *, markdown: bool) -> str:
    """One table: a line for each row, a column for each figure that a row has."""
    columns = list(
        dict.fromkeys(
            name
            for row in rows
            for name, value in row.items()
            if name not in FACTS and not name.endswith(tuple(BRACKETS)) and is_figure(value)
        )
    )
    lines = [[column.replace("_", " ") for column in columns]]
    lines += [[cell(row, column) for column in columns] for row in rows]
    if markdown:
        lines.insert(1, ["---"] * len(columns))
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)
    widths = [max(len(line[n]) for line in lines) for n in range(len(columns))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def is_figure(value: object) -> bool:
    """Whether a value belongs into a cell."""
    return isinstance(value, str | int | float) or value is None


def cell(row: Row, column: str) -> str:
    """A figure, its 5th and 95th percentile, and what was aimed at."""
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
    """A value in few characters."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list | tuple):
        return ":".join(brief(part) for part in value)
    return "none" if value is None else str(value)


if __name__ == "__main__":
    main()
