"""A bar chart as SVG, without any library."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

WIDTH, LABEL_WIDTH, BAR_HEIGHT, GAP = 760, 250, 15, 34
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#777777")

#: Median, and the ends of its interval.
Bar = tuple[float, float, float]


def write_bars(path: str, title: str, groups: Mapping[str, Mapping[str, Bar]]) -> None:
    """Writes groups of horizontal bars with their intervals; bars of one name have one color."""
    names = list(dict.fromkeys(name for bars in groups.values() for name in bars))
    largest = max(high for bars in groups.values() for _, _, high in bars.values())
    scale = (WIDTH - LABEL_WIDTH - 70) / largest
    y, parts = 24.0, [text(8, 18, title, size=14)]
    if largest >= 1:
        x = LABEL_WIDTH + scale
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="26" y2="100%" stroke="#bbbbbb"/>')
    for group, bars in groups.items():
        y += GAP
        parts.append(text(8, y - 6, group, size=12))
        for name, bar in bars.items():
            color = COLORS[names.index(name) % len(COLORS)]
            parts += draw_bar(y, name, bar, scale, color)
            y += BAR_HEIGHT + 3
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 12:.0f}" '
        f'font-family="sans-serif"><rect width="100%" height="100%" fill="white"/>'
    )
    Path(path).write_text("\n".join([svg, *parts, "</svg>\n"]), encoding="utf-8")
    print(f"wrote {path}")


def draw_bar(y: float, name: str, bar: Bar, scale: float, color: str) -> Sequence[str]:
    """A name, its bar, the interval as a line, and the figure."""
    middle, low, high = bar
    left, centre = LABEL_WIDTH, y + BAR_HEIGHT / 2
    return [
        text(left - 8, y + 12, name, size=11, anchor="end"),
        f'<rect x="{left}" y="{y:.1f}" width="{middle * scale:.1f}" height="{BAR_HEIGHT}" '
        f'fill="{color}"/>',
        f'<line x1="{left + low * scale:.1f}" x2="{left + high * scale:.1f}" y1="{centre:.1f}" '
        f'y2="{centre:.1f}" stroke="black"/>',
        text(left + max(middle, high) * scale + 6, y + 12, f"{middle:.3g}", size=11),
    ]


def text(x: float, y: float, content: str, *, size: int, anchor: str = "start") -> str:
    """One line of text."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">'
        f"{escape(content)}</text>"
    )
