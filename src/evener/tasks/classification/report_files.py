"""The report of a classification run: figures and the confusion matrix, as files to look at."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from evener.errors import EvenerError
from evener.tasks.classification.metrics import Evaluation
from evener.tasks.language_model import printable

_CELL = 46
_MOST_CLASSES = 60
"""Beyond that cells would be too small to read; the figures are in summary.json."""


def confusion_svg(evaluation: Evaluation, labels: Sequence[str]) -> str:
    """Return the confusion matrix as an SVG picture; a row holds the samples of a true class."""
    labels = [escape(printable(name)) for name in labels]  # XML has no control characters
    margin = 40 + 8 * max(map(len, labels))
    size = margin + _CELL * len(labels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{size + 16}" height="{size + 40}" '
        'font-family="sans-serif" font-size="13" role="img">'
        "<title>Confusion matrix</title>"
        f'<text x="8" y="{size + 26}">rows: true class · columns: predicted class</text>'
    ]
    for i, (name, row) in enumerate(zip(labels, evaluation.confusion, strict=True)):
        y = margin + _CELL * i
        parts.append(
            f'<text text-anchor="end" x="{margin - 8}" y="{y + 27}">{name}</text>'
            f'<text transform="translate({y + 27} {margin - 8}) rotate(-90)">{name}</text>'
        )
        for j, count in enumerate(row):
            part = count / (sum(row) or 1)
            x = margin + _CELL * j
            parts.append(
                f'<rect x="{x}" y="{y}" width="{_CELL}" height="{_CELL}" stroke="#ffffff" '
                f'fill="rgb(20 72 140 / {part:.2f})">'
                f"<title>{name} taken for {labels[j]}: {count} of {sum(row)}</title></rect>"
                f'<text text-anchor="middle" x="{x + _CELL // 2}" y="{y + 27}" '
                f'fill="{"#ffffff" if part > 0.55 else "#1a1a1a"}">{count}</text>'
            )
    return "\n".join([*parts, "</svg>\n"])


def write_report(
    folder: Path, figures: Mapping[str, Any], evaluation: Evaluation, labels: Sequence[str]
) -> None:
    """Write ``report.html`` and ``confusion.svg`` into a run's folder.

    Args:
        folder: The run folder.
        figures: Name in words and value of what is reported, in order.
        evaluation: Of the held-out samples.
        labels: Names of the classes.

    Raises:
        EvenerError: They cannot be written.
    """
    small = len(labels) <= _MOST_CLASSES
    picture = confusion_svg(evaluation, labels) if small else ""
    classes = [
        (printable(label), sum(row), f"{row[i] / (sum(row) or 1):.1%}", f"{f1:.3f}")
        for i, (label, row, f1) in enumerate(
            zip(labels, evaluation.confusion, evaluation.f1, strict=True)
        )
    ]
    page = _PAGE.format(
        title=escape(folder.name),
        figures=_table(figures.items()),
        classes=_table([("class", "samples", "found", "F1"), *classes]),
        picture=picture,
    )
    try:
        (folder / "report.html").write_text(page, encoding="utf-8")
        if small:
            (folder / "confusion.svg").write_text(picture, encoding="utf-8")
    except OSError as error:
        raise EvenerError(f"the report in {folder} cannot be written: {error}") from error


def _table(rows: Iterable[Sequence[Any]]) -> str:
    cells = ("".join(f"<td>{escape(str(value))}</td>" for value in row) for row in rows)
    return "\n".join(["<table>", *(f"<tr>{row}</tr>" for row in cells), "</table>"])


_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font: 15px/1.5 sans-serif; margin: 2rem auto; max-width: 60rem; color: #1a1a1a }}
table {{ border-collapse: collapse; margin: 1rem 0 }}
td {{ padding: .2rem 1.2rem .2rem 0; border-bottom: 1px solid #ddd }}
</style>
<h1>{title}</h1>
{figures}
<h2>Held-out samples by class</h2>
{classes}
{picture}
</html>
"""
