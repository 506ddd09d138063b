"""Draw the picture of the README from the results of hetero.py in docs/benchmarks.md.

    python benchmarks/picture.py

The pair of ranks is that whose second one is three times slower. A test compares the picture with
the table.
"""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "docs" / "benchmarks.md"
PICTURE = ROOT / "docs" / "images" / "unequal.svg"

#: Rows of the table, from the top down, what each is called, and its colour.
BARS = {
    "torch.ddp.tuned": ("torch DDP, tuned", "#8b949e"),
    "evener.sync": ("evener, policy sync", "#2f81f7"),
}
LEFT, WIDTH, HEIGHT, STEP = 160, 380, 26, 44
STYLE = """
  text { font: 14px sans-serif; fill: #57606a }
  .ideal { fill: none; stroke: #8b949e; stroke-dasharray: 4 3 }
  @media (prefers-color-scheme: dark) { text { fill: #c9d1d9 } }
"""


def draw(table: str) -> str:
    """Return an SVG with a bar for each row: throughput over the sum of the ranks' speeds alone."""
    lines = [
        "<title>Throughput of two ranks, of which one is three times slower</title>",
        f"<style>{STYLE}</style>",
    ]
    for number, (name, (shown, colour)) in enumerate(BARS.items()):
        found = re.search(rf"^\| 1, 1/3 \| sleep \| `{name}` \| ([\d.]+) ", table, re.MULTILINE)
        assert found is not None, f"{TABLE} has no row of {name}"
        part, y = float(found[1]), 14 + number * STEP
        lines += [
            f'<text x="{LEFT - 10}" y="{y + 18}" text-anchor="end">{shown}</text>',
            f'<rect x="{LEFT}" y="{y}" width="{WIDTH * part:.0f}" height="{HEIGHT}" '
            f'fill="{colour}"/>',
            f'<rect class="ideal" x="{LEFT}" y="{y}" width="{WIDTH}" height="{HEIGHT}"/>',
            f'<text x="{LEFT + WIDTH + 10}" y="{y + 18}">{100 * part:.0f} %</text>',
        ]
    y = 14 + len(BARS) * STEP + 4
    lines.append(f'<text x="{LEFT}" y="{y}">of what both ranks do alone, added up (dashed)</text>')
    width, height = LEFT + WIDTH + 60, y + 14
    box = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {box}>\n' + "\n".join(lines) + "\n</svg>\n"


if __name__ == "__main__":
    PICTURE.write_text(draw(TABLE.read_text(encoding="utf-8")), encoding="utf-8")
