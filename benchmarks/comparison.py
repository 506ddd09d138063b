"""Lets ways of training take turns, and makes rows of what they did."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from lost import TOLERANCE, Lost, lost_time, over_ranks, unnamed
from rounds import Team, shuffled
from tables import ratios, spread
from ways import Ceiling, Evener, Setting, Solo, Way, Window

#: What a way may lose of its ranks' time.
AIMS = {"evener.sync": 0.06, "evener.cadence": 0.03, "evener.async": 0.02}


class Comparison:
    """All ways of one team, interleaved; one rank's part.

    Args:
        team: This rank among the others.
        ways: What takes turns: each rank alone (of equal ranks, one of them), ceilings, the rest.
        windows: Global batches of a turn of evener's.
    """

    def __init__(self, team: Team, ways: Sequence[Way], windows: int) -> None:
        self._team, self._windows = team, windows
        self._ways = {way.name: way for way in ways}
        self._figures: dict[str, list[float]] = {name: [] for name in self._ways}
        self._lost: dict[str, list[Mapping[int, Lost]]] = {name: [] for name in self._ways}
        self._unnamed: dict[str, list[float]] = {name: [] for name in self._ways}

    def run(self, rounds: int) -> None:
        """Takes a warm-up and so many rounds, in an order that changes."""
        for number, names in enumerate(shuffled(list(self._ways), rounds + 1)):
            for name in names:
                self._take_turn(self._ways[name], short=number == 0)
            shown = ", ".join(f"{n} {v[-1]:.1f}" for n, v in self._figures.items())
            self._team.tell(f"{f'round {number}' if number else 'warm-up'}: samples/s {shown}")

    def _take_turn(self, way: Way, *, short: bool) -> None:
        self._figures[way.name].append(way.run(self._steps_of(way, short=short)))
        if isinstance(way, Evener):
            walls_s = [s for [s] in self._team.gather([way.walls_s[-1]])]
            if way.turns[-1]:  # only one rank has the events
                self._lost[way.name].append(lost_time(way.inner(way.turns[-1])))
                self._unnamed[way.name].append(unnamed(way.turns[-1], walls_s))

    def _steps_of(self, way: Way, *, short: bool) -> int:
        """Global batches of a turn; slow ways get fewer, a warm-up the least."""
        if short and not isinstance(way, Evener):
            return 1
        if isinstance(way, Solo):
            return max(1, round(self._windows * way.setting.speeds[way.alone] / 2))
        return max(1, self._windows // (2 if isinstance(way, Ceiling) else 4))

    def rows(self, facts: Mapping[str, Any]) -> list[dict[str, Any]]:
        """A row for each way, which begins with its name and the facts."""
        rows = []
        ideal = self._ideal()
        for name, way in self._ways.items():
            values, ceiling = self._figures[name][1:], self._figures[way.ceiling][1:]
            rows.append(
                {
                    "name": name,
                    **facts,
                    **spread("samples_per_s", values),
                    **spread("of_ideal", ratios(values, ideal)),
                    **spread("of_ceiling", ratios(values, ceiling)),
                }
            )
            if self._lost[name] and isinstance(way, Evener):
                rows[-1] |= describe_lost(name, self._lost[name][1:], self._unnamed[name][1:])
                rows[-1] |= describe_windows(way.turns[-1])
        return rows

    def _ideal(self) -> list[float]:
        """By round, the sum of what ranks do alone."""
        solo = [way for way in self._ways.values() if isinstance(way, Solo)]
        times = self._team.world_size if len(solo) == 1 else 1
        figures = [self._figures[way.name][1:] for way in solo]
        return [times * sum(speeds) for speeds in zip(*figures, strict=True)]

    def close(self) -> None:
        """Gives back what ways hold."""
        for way in self._ways.values():
            way.close()


def describe_lost(
    name: str, turns: Sequence[Mapping[int, Lost]], unnamed_parts: Sequence[float]
) -> dict[str, Any]:
    """What a way of evener's lost, and whether its windows' times add up."""
    of_team = [asdict(over_ranks(turn)) for turn in turns]
    by_rank = {
        rank: round(statistics.median(turn[rank].total for turn in turns if rank in turn), 4)
        for rank in turns[0]
    }
    rest = statistics.median(unnamed_parts)
    return {
        **spread("lost", [over_ranks(turn).total for turn in turns]),
        "lost_aim": AIMS.get(name),
        **{
            f"lost_{part}": round(statistics.median(turn[part] for turn in of_team), 4)
            for part in of_team[0]
        },
        "lost_by_rank": by_rank,
        "unnamed": round(rest, 4),
        "adds_up": abs(rest) <= TOLERANCE,
    }


def describe_windows(windows: Sequence[Window]) -> dict[str, Any]:
    """The last turn of evener's."""
    shares = [row["samples"] for row in max(windows, key=lambda w: w["window"])["ranks"]]
    anchors = [window["anchor"] for window in windows if "anchor" in window]
    told = {"windows": len(windows), "shares": shares}
    return told | ({"anchor": max(anchors)} if anchors else {})


def make_cadence(team: Team, setting: Setting) -> Way:
    """evener, whose ranks make local steps and then average."""
    return Evener(team, setting, "cadence")


def make_async(team: Team, setting: Setting) -> Way:
    """evener, whose ranks average in the background."""
    return Evener(team, setting, "async")


#: evener's policies, by the names of their rows.
EVENER: dict[str, Callable[[Team, Setting], Way]] = {
    "evener.sync": Evener,
    "evener.cadence": make_cadence,
    "evener.async": make_async,
}
