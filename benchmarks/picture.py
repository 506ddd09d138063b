"""Draw the picture of the README from a report of hetero.py.

    python benchmarks/hetero.py --speeds 1,0.3333 --ways torch.ddp,evener.sync --json unequal.json
    python benchmarks/picture.py unequal.json docs/images/unequal.svg
"""

import json
import sys
from pathlib import Path

#: Rows of the report, from the top down, and what each is called.
BARS = {
    "torch.ddp": "torch DDP",
    "evener.sync": "evener, policy sync",
}
LEFT, WIDTH, HEIGHT, STEP = 170, 420, 26, 44
STYLE = """
  text { font: 14px sans-serif; fill: #57606a }
  .ideal { fill: none; stroke: #8b949e; stroke-dasharray: 4 3 }
  .torch-ddp { fill: #8b949e } .evener-sync { fill: #2f81f7 }
  @media (prefers-color-scheme: dark) { text { fill: #c9d1d9 } }
"""


def draw(rows: list[dict[str, float]]) -> str:
    """Return an SVG with a bar for each way, as a part of both ranks' speeds alone."""
    by_name = {row["name"]: row for row in rows}
    lines = ["<title>Samples per second of two ranks, one of them three times slower</title>"]
    lines.append(f"<style>{STYLE}</style>")
    for number, (name, shown) in enumerate(BARS.items()):
        row, y = by_name[name], 14 + number * STEP
        part = min(1.0, row["of_ideal"])
        lines += [
            f'<text x="{LEFT - 10}" y="{y + 18}" text-anchor="end">{shown}</text>',
            f'<rect class="ideal" x="{LEFT}" y="{y}" width="{WIDTH}" height="{HEIGHT}"/>',
            f'<rect class="{name.replace(".", "-")}" x="{LEFT}" y="{y}" '
            f'width="{WIDTH * part:.0f}" height="{HEIGHT}"/>',
            f'<text x="{LEFT + WIDTH + 10}" y="{y + 18}">{100 * row["of_ideal"]:.0f} %</text>',
        ]
    y = 14 + len(BARS) * STEP + 4
    lines.append(f'<text x="{LEFT}" y="{y}">of the sum of both ranks alone (dashed)</text>')
    box = f'viewBox="0 0 {LEFT + WIDTH + 70} {y + 14}" width="{LEFT + WIDTH + 70}" role="img"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {box}>\n' + "\n".join(lines) + "\n</svg>\n"


if __name__ == "__main__":
    report = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    Path(sys.argv[2]).write_text(draw(report["rows"]), encoding="utf-8")
