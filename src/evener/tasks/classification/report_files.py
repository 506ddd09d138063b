"""The report of a classification run: figures and the confusion matrix, as files to look at."""

from collections.abc import Mapping, Sequence
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
    labels = [printable(name) for name in labels]  # XML has no control characters
    shown = [name if len(name) <= 24 else name[:23] + "…" for name in labels]
    margin = 24 + 8 * max(map(len, shown))
    size = _CELL * len(labels)
    width, height = margin + size + 16, margin + size + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif" font-size="13" role="img">',
        "<title>Confusion matrix: rows are true classes, columns predicted ones</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for i, name in enumerate(shown):
        middle = margin + _CELL * i + _CELL / 2
        parts.append(
            f'<text x="{margin - 8}" y="{middle + 4}" text-anchor="end">{escape(name)}</text>'
        )
        parts.append(
            f'<text x="0" y="0" transform="translate({middle + 4} {margin - 8}) rotate(-90)">'
            f"{escape(name)}</text>"
        )
    for i, row in enumerate(evaluation.confusion):
        total = sum(row) or 1
        for j, count in enumerate(row):
            part = count / total
            ink = "#ffffff" if part > 0.55 else "#1a1a1a"
            x, y = margin + _CELL * j, margin + _CELL * i
            parts.append(
                f'<rect x="{x}" y="{y}" width="{_CELL}" height="{_CELL}" fill="{_colour(part)}" '
                f'stroke="#ffffff"><title>{escape(labels[i])} taken for {escape(labels[j])}: '
                f"{count} of {sum(row)}</title></rect>"
                f'<text x="{x + _CELL / 2}" y="{y + _CELL / 2 + 4}" text-anchor="middle" '
                f'fill="{ink}">{count}</text>'
            )
    parts.append(
        f'<text x="{margin + size / 2}" y="{margin + size + 24}" text-anchor="middle" '
        'fill="#555555">rows: true class · columns: predicted class</text></svg>'
    )
    return "\n".join(parts) + "\n"


def write_report(
    folder: Path, figures: Mapping[str, Any], evaluation: Evaluation, labels: Sequence[str]
) -> None:
    """Write ``report.html`` and ``confusion.svg`` into a run's folder.

    Args:
        folder: The run folder.
        figures: Name in words and value of what is told, in order.
        evaluation: Of the held-out samples.
        labels: Names of the classes.

    Raises:
        EvenerError: They cannot be written.
    """
    labels = [printable(name) for name in labels]
    small = len(labels) <= _MOST_CLASSES
    picture = confusion_svg(evaluation, labels) if small else ""
    rows = "\n".join(
        f"<tr><th>{escape(name)}</th><td>{escape(str(value))}</td></tr>"
        for name, value in figures.items()
    )
    classes = "\n".join(
        f"<tr><th>{escape(label)}</th><td>{sum(row)}</td><td>{row[i] / (sum(row) or 1):.1%}</td>"
        f"<td>{f1:.3f}</td></tr>"
        for i, (label, row, f1) in enumerate(
            zip(labels, evaluation.confusion, evaluation.f1, strict=True)
        )
    )
    page = _PAGE.format(title=escape(folder.name), rows=rows, classes=classes, picture=picture)
    try:
        (folder / "report.html").write_text(page, encoding="utf-8")
        if small:
            (folder / "confusion.svg").write_text(picture, encoding="utf-8")
    except OSError as error:
        raise EvenerError(f"the report in {folder} cannot be written: {error}") from error


def _colour(part: float) -> str:
    """From nearly white to dark blue."""
    mixed = [round(a + (b - a) * part) for a, b in ((244, 20), (247, 72), (252, 140))]
    return "#" + "".join(f"{channel:02x}" for channel in mixed)


_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font: 15px/1.5 sans-serif; margin: 2rem auto; max-width: 60rem; color: #1a1a1a }}
table {{ border-collapse: collapse; margin: 1rem 0 }}
th, td {{ text-align: left; padding: .2rem 1.2rem .2rem 0; border-bottom: 1px solid #ddd }}
th {{ font-weight: normal }} td {{ font-variant-numeric: tabular-nums }}
</style>
<h1>{title}</h1>
<table>
{rows}
</table>
<h2>Held-out samples by class</h2>
<table>
<tr><th>class</th><th>samples</th><th>found</th><th>F1</th></tr>
{classes}
</table>
{picture}
</html>
"""
