"""Draw what convergence.py has measured: tables on the terminal, pictures for the manual.

    python benchmarks/convergence_report.py

Pictures of other results than the recorded ones are written beside these.

Time is emulated: it follows from windows, steps and bytes, for links and speeds that are given.
"""

import argparse
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from convergence import RATES, RESULTS, SEEDS, STUDIES, SYNC, THIRD, Arm, Result, read
from local_training import Local

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
#: Seconds that the fastest rank takes for the batch of a step of SYNC.
STEP_S = 0.005
LINKS = {"20 Mbit/s": 20e6, "100 Mbit/s": 100e6, "1 Gbit/s": 1e9}

Results = Mapping[Arm, Result]


# ── emulated time and bytes ───────────────────────────────────────────────────────────────────────


def sent_bytes(arm: Arm, result: Result, ranks: int) -> float:
    """Return what a rank of the team sends; SYNC, which is simulated as one rank, in float32."""
    if arm.how == SYNC:
        return result.windows * 2 * (ranks - 1) / ranks * 4 * result.params
    return result.sent_bytes


def emulated_s(
    arm: Arm, result: Result, speeds: Sequence[float], bits_per_s: float, step_s: float = STEP_S
) -> float:
    """Return how long a training takes.

    A rank computes for as long as its part of the batch and its speed say. In SYNC and CADENCE it
    then sends at the rate of the link. In ASYNC it sends meanwhile, and windows are so long that
    averages land when the arm says.

    Args:
        arm: The training.
        result: Its windows, steps and bytes.
        speeds: Of the ranks, relative to the fastest one: those of the arm, unless it is SYNC.
        bits_per_s: Of each rank's link, in each direction.
        step_s: Time of the fastest rank for the batch of a step of SYNC.
    """
    exchange_s = 8 * sent_bytes(arm, result, len(speeds)) / bits_per_s
    if arm.how == SYNC:
        return result.windows * step_s / sum(speeds) + exchange_s
    compute_s = result.fast_steps * step_s / (1 if arm.whole else arm.how.ranks)
    if arm.how.late:
        return max(compute_s, exchange_s / arm.how.late)
    return compute_s + exchange_s


# ── tables ────────────────────────────────────────────────────────────────────────────────────────


def best(arm: Arm, results: Results) -> Arm | None:
    """Return the arm with the learning rate that is best for its seed, of those tried."""
    tried = {one.lr for one in results}
    arms = [one for one in (replace(arm, lr=lr) for lr in tried) if one in results]
    return min(arms, key=lambda one: results[one].loss, default=None)


def excess(arm: Arm, results: Results) -> float | None:
    """Return by which part an arm's loss is above that of SYNC, both at their best rates.

    They are the rates that are best with the first seed.
    """
    losses = []
    for how in (arm.how, SYNC):
        first = best(replace(arm, how=how, seed=0, whole=arm.whole and how != SYNC), results)
        if first is None or (found := results.get(replace(first, seed=arm.seed))) is None:
            return None
        losses.append(found.loss)
    return losses[0] / losses[1] - 1


def cell(arm: Arm, results: Results) -> str:
    """Return the excess of each seed, in per cent."""
    found = [excess(replace(arm, seed=seed), results) for seed in SEEDS]
    parts = [f"{100 * one:+.1f}" for one in found if one is not None]
    return f"{', '.join(parts)} %" if parts else ""


def name(arm: Arm) -> str:
    """Return what differs from the defaults, except learning rate and seed."""
    plain = replace(arm, lr=Arm().lr, seed=0)
    return ", ".join(f"{key} {value}" for key, value in plain.facts.items()) or "default"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def study_table(arms: Iterable[Arm], results: Results) -> str:
    """Return a line for each way of training, with all seeds and the best learning rate."""
    rows = []
    for arm in dict.fromkeys(replace(arm, lr=Arm().lr, seed=0) for arm in arms):
        first = best(arm, results)
        if first is not None:
            found = results[first]
            sent = f"{sent_bytes(first, found, 2) / 1e6:.2f}"
            facts = [f"{first.lr:g}", str(found.windows), sent, f"{found.divergence:.3f}"]
            rows.append([name(arm), f"{found.loss:.4f}", cell(arm, results), *facts])
    return table(["way", "loss", "against SYNC", "lr", "averages", "MB sent", "divergence"], rows)


def gain(arm: Arm, results: Results) -> str:
    """Return the loss against plain averages at the same learning rate, for each seed."""
    parts = []
    for one in (replace(arm, seed=seed) for seed in SEEDS):
        average = replace(one, how=replace(one.how, outer_lr=1.0, outer_momentum=0.0))
        if one in results and average in results:
            parts.append(f"{100 * (results[one].loss / results[average].loss - 1):+.1f}")
    return f"{', '.join(parts)} %" if parts else ""


def matrix(
    arms: Iterable[Arm],
    row_of: Callable[[Local], Any],
    column_of: Callable[[Local], Any],
    cell_of: Callable[[Arm], str],
) -> str:
    """Return a cell for each arm, by two properties of its way of training."""
    cells = {(row_of(arm.how), column_of(arm.how)): cell_of(arm) for arm in arms}
    rows, columns = (sorted({key[axis] for key in cells}) for axis in (0, 1))
    lines = [[str(row), *(cells.get((row, column), "") for column in columns)] for row in rows]
    return table(["", *map(str, columns)], lines)


def times(results: Results) -> str:
    """Return emulated seconds and losses of trainings of several lengths, for each link."""
    rows = []
    for speeds in ((1.0, 1.0), THIRD):
        for label, arms in ways(speeds).items():
            for arm in arms:
                if (found := results.get(arm)) is not None:
                    spent = [f"{emulated_s(arm, found, speeds, r):.1f}" for r in LINKS.values()]
                    mb = f"{sent_bytes(arm, found, 2) / 1e6:.2f}"
                    speed = ", ".join(f"{one:.2g}" for one in speeds)
                    rows.append([speed, label, f"{arm.length:g}", mb, *spent, f"{found.loss:.3f}"])
    return table(["speeds", "way", "length", "MB sent", *(f"s, {x}" for x in LINKS), "loss"], rows)


# ── pictures ──────────────────────────────────────────────────────────────────────────────────────

STYLE = """
  text { font: 12px sans-serif; fill: #57606a } .axis { stroke: #8b949e; fill: none }
  polyline { fill: none; stroke-width: 2 } @media (prefers-color-scheme: dark) {
  text { fill: #c9d1d9 } }
"""
COLOURS = {
    "SYNC": "#8b949e",
    "CADENCE, 16 steps": "#2f81f7",
    "CADENCE, 64 steps": "#a371f7",
    "ASYNC, 16 steps": "#d29922",
    "float32": "#2f81f7",
    "int8": "#a371f7",
    "int4": "#d29922",
}
Lines = Mapping[str, Sequence[tuple[float, float]]]


@dataclass(frozen=True)
class Panel:
    """Lines over a logarithmic axis.

    Attributes:
        title: What differs from other panels.
        unit: Of the horizontal axis.
        lines: Points of each line.
    """

    title: str
    unit: str
    lines: Lines

    def draw(self, left: int, top: int, low: float, high: float) -> list[str]:
        """Return the elements of a panel whose axis is from the lowest to the highest loss."""
        points = [point for line in self.lines.values() for point in line]
        first, last = (math.log10(end(x for x, _ in points)) for end in (min, max))

        def place(x: float, y: float) -> tuple[float, float]:
            part = (math.log10(x) - first) / max(1e-9, last - first)
            return left + 20 + 220 * part, top + 160 - 140 * (y - low) / max(1e-9, high - low)

        found = [
            f'<text x="{left + 10}" y="{top + 12}">{self.title}</text>',
            f'<path class="axis" d="M{left + 10} {top + 20}V{top + 165}H{left + 250}"/>',
            f'<text x="{left + 250}" y="{top + 195}" text-anchor="end">{self.unit}</text>',
        ]
        for power in range(math.floor(first), math.ceil(last) + 1):
            for digit in (1, 2, 5):
                tick = digit * 10.0**power
                x, _ = place(tick, low)
                if left + 15 <= x <= left + 245:
                    found.append(
                        f'<text x="{x:.0f}" y="{top + 180}" text-anchor="middle">{tick:g}</text>'
                    )
        for label, line in self.lines.items():
            places = [place(x, y) for x, y in sorted(line)]
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            colour = COLOURS[label]
            found.append(f'<polyline points="{path}" stroke="{colour}"/>')
            found += [
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places
            ]
        return found


def svg(title: str, panels: Sequence[Panel], columns: int) -> str:
    """Return a picture of panels that share the vertical axis, which is the held-out loss."""
    lines = [line for panel in panels for line in panel.lines.values()]
    losses = [y for line in lines for _, y in line]
    low, high = min(losses), max(losses)
    found = [f"<title>{title}</title>", f"<style>{STYLE}</style>"]
    for number, panel in enumerate(panels):
        left, top = 50 + 270 * (number % columns), 30 + 210 * (number // columns)
        found += panel.draw(left, top, low, high)
        if number % columns == 0:
            for loss in (low, high):
                y = top + 164 - 140 * (loss - low) / max(1e-9, high - low)
                found.append(f'<text x="{left}" y="{y:.0f}" text-anchor="end">{loss:.2f}</text>')
    x = 60
    for label in dict.fromkeys(label for panel in panels for label in panel.lines):
        found.append(f'<circle cx="{x}" cy="14" r="4" fill="{COLOURS[label]}"/>')
        found.append(f'<text x="{x + 8}" y="18">{label}</text>')
        x += 24 + 7 * len(label)
    width, height = 60 + 270 * columns, 40 + 210 * math.ceil(len(panels) / columns)
    box = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {box}>\n' + "\n".join(found) + "\n</svg>\n"


def ways(speeds: tuple[float, ...]) -> dict[str, list[Arm]]:
    """Return trainings of several lengths with two ranks of these speeds, by way."""
    own = () if speeds == (1.0, 1.0) else speeds
    lengths = (0.125, 0.25, 0.5, 0.75, 1.0)
    hows = {
        "SYNC": [SYNC],
        "CADENCE, 16 steps": [Local(speeds=own)],
        "CADENCE, 64 steps": [Local(steps=64, speeds=own)],
        "ASYNC, 16 steps": [Local(late=late, speeds=own) for late in (0.25, 1.0)],
    }
    return {
        label: [Arm(how=how, length=length) for how in choices for length in lengths]
        for label, choices in hows.items()
    }


def time_panels(results: Results) -> list[Panel]:
    """Return the loss over emulated time, for each link and for equal and unequal ranks.

    Each point is a training with a schedule of its own. A point is left out if another one of its
    line is earlier and has no greater loss.
    """
    panels = []
    for speeds, ranks in (((1.0, 1.0), "equal ranks"), (THIRD, "speeds 1, 1/3")):
        for link, bits_per_s in LINKS.items():
            lines = {}
            for label, arms in ways(speeds).items():
                points = [
                    (emulated_s(arm, results[arm], speeds, bits_per_s), results[arm].loss)
                    for arm in arms
                    if arm in results
                ]
                lines[label] = [
                    (x, y) for x, y in points if not any(a < x and b <= y for a, b in points)
                ]
            panels.append(Panel(f"{link}, {ranks}", "seconds", lines))
    return panels


def byte_panel(results: Results) -> Panel:
    """Return the loss over bytes sent by a rank, at equal samples, in three wire formats."""
    lines = {}
    for label, bits in (("float32", 32), ("int8", 8), ("int4", 4)):
        arms = [Arm(how=Local(steps=steps, bits=bits)) for steps in (2, 4, 8, 16, 32, 64, 256)]
        arms += [Arm(how=SYNC)] if bits == 32 else []
        lines[label] = [
            (sent_bytes(arm, results[arm], 2) / 1e6, results[arm].loss)
            for arm in arms
            if arm in results
        ]
    return Panel("CADENCE, 256 to 2 steps; then SYNC", "MB sent", lines)


def pictures(results: Results) -> dict[str, str]:
    """Return the pictures of the manual by the name of their file; none with an empty panel."""
    found = {
        "loss-by-time.svg": ("Held-out loss over emulated time", time_panels(results), 3),
        "loss-by-bytes.svg": ("Held-out loss over bytes", [byte_panel(results)], 1),
    }
    return {
        file: svg(title, panels, columns)
        for file, (title, panels, columns) in found.items()
        if all(any(panel.lines.values()) for panel in panels)
    }


def main() -> None:
    """Print tables and write the pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FILE")
    arguments = parser.parse_args()
    results = read(arguments.results)
    for study, arms in STUDIES.items():
        print(f"**{study}**\n\n{study_table(arms, results)}")
    by_ranks = matrix(
        [arm for arm in STUDIES["frontier"] if not arm.whole],
        lambda how: how.ranks,
        lambda how: how.steps,
        lambda arm: cell(arm, results),
    )
    print(f"**Loss against SYNC by ranks and steps**\n\n{by_ranks}")
    for lr in RATES:
        by_outer = matrix(
            [arm for arm in STUDIES["outer"] if arm.lr == lr],
            lambda how: (how.outer_lr, how.outer_momentum),
            lambda how: (how.ranks, how.steps),
            lambda arm: gain(arm, results),
        )
        print(f"**Loss against averages, learning rate {lr:g}**\n\n{by_outer}")
    print(f"**Emulated time**\n\n{times(results)}")
    folder = IMAGES if arguments.results == RESULTS else arguments.results.parent
    for file, picture in pictures(results).items():
        (folder / file).write_text(picture, encoding="utf-8")
        print(folder / file)


if __name__ == "__main__":
    main()
