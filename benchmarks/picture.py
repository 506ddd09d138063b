"""A picture of medians and their intervals, as bars."""

from collections.abc import Mapping

from matplotlib import rc_context
from matplotlib.figure import Figure  # without pyplot: no window system, no state

#: Median, and the ends of its interval.
Bar = tuple[float, float, float]


def write_bars(path: str, title: str, groups: Mapping[str, Mapping[str, Bar]]) -> None:
    """Writes groups of horizontal bars with their intervals; bars of one name have one color."""
    names = list(dict.fromkeys(name for bars in groups.values() for name in bars))
    heights = [len(bars) for bars in groups.values()]
    figure = Figure(figsize=(8, 1 + len(groups) / 2 + sum(heights) / 4), layout="constrained")
    figure.suptitle(title)
    panels = figure.subplots(
        len(groups), sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights}
    )
    for panel, (group, bars) in zip(panels[:, 0], groups.items(), strict=True):
        middles, lows, highs = zip(*bars.values(), strict=True)
        below = [middle - low for middle, low in zip(middles, lows, strict=True)]
        above = [high - middle for middle, high in zip(middles, highs, strict=True)]
        colors = [f"C{names.index(name) % 10}" for name in bars]
        drawn = panel.barh(list(bars), middles, xerr=(below, above), color=colors)
        panel.bar_label(drawn, fmt="{:.3g}", padding=4)
        panel.axvline(1, color="0.7")
        panel.invert_yaxis()
        panel.set_title(group, loc="left", fontsize="medium")
        panel.spines[["top", "right"]].set_visible(False)
    with rc_context({"svg.fonttype": "none"}):  # text stays text
        figure.savefig(path)
    print(f"wrote {path}")
