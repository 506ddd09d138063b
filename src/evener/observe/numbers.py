"""Format numbers as text."""

from collections.abc import Sequence
from textwrap import fill
from typing import Final

WIDTH: Final = 80
"""Width of output in columns."""


def human_duration(seconds: float) -> str:
    """Return a duration as text, such as ``12 s``, ``2 min 41 s``, ``1 h 20 min``.

    Args:
        seconds: Zero or more.
    """
    if seconds < 0.995:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if round(seconds) < 120:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(round(seconds / 60), 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    days, hours = divmod(round(seconds / 3600), 24)
    return f"{days} d {hours} h"


def human_count(number: float) -> str:
    """Return a count or a speed as text: ``3.14``, ``5,120``, ``123k``, ``1.2M``."""
    for size, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if number >= 0.9995 * size:
            scaled = number / size
            return f"{scaled:.3g}{suffix}" if scaled < 100 else f"{scaled:,.0f}{suffix}"
    if number >= 99_950:
        return f"{number / 1e3:.0f}k"
    if number >= 99.95:
        return f"{number:,.0f}"
    return f"{number:.3g}"


def human_bytes(num_bytes: float) -> str:
    """Return a size in decimal units: ``512 B``, ``1.2 GB``."""
    for size, suffix in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {suffix}"
    return f"{num_bytes:.0f} B"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table: the first column to the left, the others to the right."""
    first, *others = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, *cells in rows:
        right = [cell.rjust(width) for cell, width in zip(cells, others, strict=True)]
        lines.append("  ".join([name.ljust(first), *right]))
    return lines


def wrapped(line: str) -> str:
    """Wrap a line at ``WIDTH`` columns, with the continuation lines indented."""
    if len(line) <= WIDTH:
        return line
    return fill(line, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
