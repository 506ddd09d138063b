"""The picture of ``evener plan``: throughput and lost time of each policy."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from evener.errors import ConfigError
from evener.simulation.advice import Advice
from evener.simulation.prediction import TeamPrediction

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS: Final = (".png", ".svg")
_LOSSES: Final = {"wait": "#d55e00", "exchange": "#e69f00", "bookkeeping": "#999999"}
_COMPUTE: Final = "#0072b2"


def check_picture(path: Path) -> None:
    """Refuse a picture that cannot be drawn, before anything is simulated.

    Raises:
        ConfigError: matplotlib is not installed, or the file is neither PNG nor SVG.
    """
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(f"--picture is {path}; give a file that ends in {' or '.join(FORMATS)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError(
            f"--picture {path} needs matplotlib, which is not installed; run "
            "pip install 'evener[plot]'"
        ) from None


def draw(advice: Advice, path: Path) -> None:
    """Draw throughput by policy and where time goes, and what each rank adds.

    Args:
        advice: What to show.
        path: The file; PNG or SVG by its ending.

    Raises:
        ConfigError: See ``check_picture``; or the file cannot be written.
    """
    check_picture(path)
    from matplotlib.figure import Figure  # without pyplot: no window system, no state

    num_panels = 3 if advice.worth else 2
    figure = Figure(figsize=(4.2 * num_panels, 3.4), layout="constrained")
    panels = figure.subplots(1, num_panels)
    predictions = list(advice.predictions.values())
    names = [str(one.policy) for one in predictions]
    speeds = [one.samples_per_s for one in predictions]
    colors = [_COMPUTE if one.policy is advice.best else "#9ec9e2" for one in predictions]
    bars = panels[0].bar(names, speeds, color=colors)
    panels[0].bar_label(bars, fmt="{:,.3g}", fontsize=8)
    panels[0].set_title("samples per second")
    _stack(panels[1], names, predictions)
    if advice.worth:
        ranks = [f"rank {one.rank}" for one in advice.worth]
        gains = [100.0 * one.gain for one in advice.worth]
        bars = panels[2].bar(
            ranks, gains, color=[_COMPUTE if gain > 0 else "#d55e00" for gain in gains]
        )
        panels[2].bar_label(bars, fmt="{:+.1f} %", fontsize=8)
        panels[2].axhline(0.0, color="black", linewidth=0.8)
        panels[2].set_title("what each rank adds, %")
        panels[2].margins(y=0.15)
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
    figure.suptitle(advice.team.source, fontsize=9)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise ConfigError(
            f"the picture {path} cannot be written: {error.strerror}; choose another file"
        ) from None


def _stack(panel: "Axes", names: Sequence[str], predictions: Sequence[TeamPrediction]) -> None:
    bottoms = [0.0] * len(predictions)
    for part, color in _LOSSES.items():
        heights = [100.0 * getattr(one, part) for one in predictions]
        panel.bar(names, heights, bottom=bottoms, color=color, label=part)
        bottoms = [low + height for low, height in zip(bottoms, heights, strict=True)]
    panel.set_ylim(0.0, max(10.0, 1.1 * max(bottoms)))
    panel.set_title("time lost, %")
    panel.legend(fontsize=8, frameon=False)
