"""Events as lines of JSON, and back.

In memory, a ``window`` has a row for each rank (``RankRow``). In a line, its ``ranks`` are columns,
so that each name is written once: a list with a value for each rank, or one value where all ranks
have the same. Seconds (``compute_s``) are whole microseconds there (``compute_us``). The columns
``rank`` and ``member`` are left out where they are those of an earlier line of the file with the
same ``team``, which is a checksum of the two. They are in every ``NAMED_EVERY``-th line at least.
"""

import json
import math
from binascii import crc32
from collections.abc import Container, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Final

from evener.observe.events import Event, check_fields
from evener.parsing import Fields, parse_json, short, whole

#: Fields of a window that are left out of its line where they have this value.
_USUAL: Final[dict[str, Any]] = {
    "generation": 0,
    "skipped": False,
    "update_parts": 1,
    "parked": [],
}
#: Columns that must be there, and columns of whole numbers beside those of microseconds.
_NEEDED: Final = ("samples", "weight", "loss", "compute_us", "wait_us", "sync_us")
SUMMED: Final = (*_NEEDED, "data_us", "sent_bytes")
"""Columns from which the sums of a run are made; reading only these is twice as fast."""

_WHOLE: Final = ("samples", "sent_bytes", "micro_batches", "steps", "stale_steps")
_MOST_S: Final = 1e9
_MOST_NUMBER: Final = 1e150  # the product of two such numbers is a finite float
NAMED_EVERY: Final = 1000
"""If the line that names a team is damaged, no more windows than these are lost with it."""

#: Teams that a reader remembers; a run has a new team whenever its members change.
_MOST_TEAMS: Final = 1024

_ENCODER: Final = json.JSONEncoder(allow_nan=False, separators=(",", ":"), default=str)


class LineWriter:
    """Turns the events of one file into lines."""

    def __init__(self) -> None:
        self._who: dict[str, list[Any]] = {}
        self._team = 0
        self._unnamed = 0  # windows since the team was named

    def line(self, event: Event) -> bytes:
        """Return an event as a line of strict JSON; what JSON does not know becomes its text."""
        if event["type"] == "window" and event["ranks"]:
            event = {name: event[name] for name in event if event[name] != _USUAL.get(name, ...)}
            event["ranks"] = self._columns(event["ranks"])
        try:
            text = _ENCODER.encode(event)
        except ValueError:
            text = _ENCODER.encode(strict_json(event))
        return text.encode() + b"\n"

    def _columns(self, rows: list[Mapping[str, Any]]) -> dict[str, Any]:
        who = {name: [row[name] for row in rows] for name in ("rank", "member")}
        columns: dict[str, Any] = {"team": self._team}
        self._unnamed += 1
        if who != self._who or self._unnamed == NAMED_EVERY:
            self._who, self._team, self._unnamed = who, _checksum(who), 0
            columns = {"team": self._team, **who}
        for name in rows[0]:
            if name in who:
                continue
            values: list[Any] = [row[name] for row in rows]
            if name.endswith("_s"):
                name = f"{name[:-2]}_us"
                values = [int(1e6 * s + 0.5) if 0 < s < _MOST_S else 0 for s in values]
            elif name == "weight":  # often a whole number
                values = [int(value) if float(value).is_integer() else value for value in values]
            is_one = values.count(values[0]) == len(values) and not isinstance(values[0], list)
            columns[name] = values[0] if is_one else values
        return columns


class LineReader:
    """Turns the lines of a run into events, in the order in which they were written.

    Args:
        columns: Those of a window that are wanted, such as ``SUMMED``; by default all.
    """

    def __init__(self, columns: Container[str] | None = None) -> None:
        self._columns = columns
        self._teams: dict[int, dict[str, list[Any]]] = {}

    def event(self, line: bytes) -> dict[str, Any]:
        """Return the event of a line; types and fields that are new pass.

        Raises:
            ValueError: It is not an event: a field is missing, or has a value that cannot be.
        """
        event: dict[str, Any] = Fields(parse_json(line)).values
        if event.get("type") == "window":
            event = {**_USUAL, **event, "ranks": self._rows(Fields(event).fields("ranks"))}
        check_fields(event)
        return event

    def _rows(self, ranks: Fields) -> list[dict[str, Any]]:
        who = self._who(ranks)
        count = len(who["rank"])
        for name in _NEEDED:
            _ = ranks[name]
        given = {
            name: values if isinstance(values, list) else [values] * count
            for name, values in ranks.values.items()
            if name not in ("team", "rank", "member")
            and (self._columns is None or name in self._columns)
        }
        if not _are_good(given, count):
            for name, values in given.items():
                if not _are_good({name: values}, count):
                    raise ValueError(f"ranks.{name} is {short(values)}, not {count} such numbers")
        columns = dict(who)
        for name, values in given.items():
            if name.endswith("_us"):
                columns[f"{name[:-3]}_s"] = [value / 1e6 for value in values]
            else:
                columns[name] = values
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def _who(self, ranks: Fields) -> dict[str, list[Any]]:
        team = ranks.whole("team")
        if "member" in ranks:
            who = {"rank": ranks.items("rank"), "member": ranks.texts("member")}
            for rank in who["rank"]:
                whole(rank, "a rank of ranks")
            if not len(who["rank"]) == len(who["member"]) == len(set(who["member"])):
                raise ValueError(f"the ranks {short(who)} are not one member each")
            if len(self._teams) >= _MOST_TEAMS:
                self._teams.clear()
            self._teams[team] = who
        if team not in self._teams:
            raise ValueError(f"ranks are of the team {team}, which no earlier line has named")
        return self._teams[team]


def strict_json(value: Any) -> Any:
    """Turn dataclasses, mappings and tuples into JSON; numbers that are not finite become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if is_dataclass(value):
        return {part.name: strict_json(getattr(value, part.name)) for part in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): strict_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict_json(item) for item in value]
    return value


def _checksum(who: Mapping[str, list[Any]]) -> int:
    return crc32(repr(who).encode()) & 0xFFFF


def _are_good(columns: Mapping[str, list[Any]], count: int) -> bool:
    """Return whether columns have so many values each, and numbers that can be where they must."""
    whole_ones, others, losses = list[Any](), list[Any](), list[Any]()
    for name, values in columns.items():
        if len(values) != count:
            return False
        if name in _WHOLE:
            whole_ones += values
        elif name == "loss":
            losses += [value for value in values if value is not None]
        elif name == "weight" or name.endswith("_us"):
            others += values
    numbers = [*whole_ones, *others, *losses]
    # A sum with a number that is not finite is not finite.
    return (
        {int}.issuperset(map(type, whole_ones))
        and {int, float}.issuperset(map(type, numbers))
        and min(whole_ones + others, default=0) >= 0
        and min(losses, default=0) > -_MOST_NUMBER
        and max(numbers, default=0) < _MOST_NUMBER
        and abs(sum(numbers)) < math.inf
    )
