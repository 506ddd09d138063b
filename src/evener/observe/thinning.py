"""Merge the events of neighbouring windows, so that the file of a long run stays small. Pure."""

from typing import Any, Final

from evener.observe.events import Event, mean_loss

FULL_WINDOWS: Final = 50_000
"""The first windows of a run, which have an event each."""

_USUAL_RANKS: Final = 4
"""In a larger team, fewer windows have one: the size of an event grows with its ranks."""


def stride(window: int, num_ranks: int, full_windows: int = FULL_WINDOWS) -> int:
    """Return how many windows share an event; it doubles when the number of windows doubles.

    Args:
        window: Number of the window.
        num_ranks: Ranks in it.
        full_windows: See ``FULL_WINDOWS``.
    """
    full = max(1, full_windows * _USUAL_RANKS // max(_USUAL_RANKS, num_ranks))
    return int(1 << (window // full).bit_length())


def can_merge(first: Event, second: Event) -> bool:
    """Return whether ``second`` is the next window of the same team in the same epoch."""
    return (
        second["window"] == first["window"] + 1
        and all(first[name] == second[name] for name in ("generation", "epoch"))
        and _members(first) == _members(second)
    )


def merge(first: Event, second: Event) -> dict[str, Any]:
    """Return one event of two that can be merged.

    Work and seconds of ranks are summed, losses are averaged by weight, and adjacent ranges of
    samples are joined. All other fields are those of ``second``.
    """
    rows = [_merge_rows(*pair) for pair in zip(first["ranks"], second["ranks"], strict=True)]
    merged = {
        **first,
        **second,
        "windows": first.get("windows", 1) + second.get("windows", 1),
        "committed": _joined([*first["committed"], *second["committed"]]),
        "skipped": first.get("skipped", False) or second.get("skipped", False),
        "ranks": rows,
    }
    return {**merged, "loss": mean_loss(merged)}


_KEPT: Final = ("rank", "member", "loss")


def _members(event: Event) -> list[tuple[int, str]]:
    return [(row["rank"], row["member"]) for row in event["ranks"]]


def _merge_rows(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    merged = {
        # The spans of several windows have no common beginning.
        name: other[name] if name in _KEPT else round(one[name] + other[name], 6)
        for name in one
        if name in other and not name.endswith("_ago_s")
    }
    return {**merged, "loss": mean_loss({"ranks": [one, other]})}


def _joined(parts: list[list[int]]) -> list[list[int]]:
    joined: list[list[int]] = []
    for start, stop in sorted(parts):
        if joined and joined[-1][1] == start:
            joined[-1][1] = stop
        else:
            joined.append([start, stop])
    return joined
