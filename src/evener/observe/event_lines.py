"""Events as lines of JSON, and back.

In memory, a ``window`` has a row for each rank (``RankRow``). In a line, its ``ranks`` are columns,
so that each name is written once: a list with a value for each rank, or one value where all ranks
have the same. Seconds (``compute_s``) are whole microseconds there (``compute_us``).
"""

import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from evener.observe.events import Event, check_complete

#: Fields of a window that are left out of its line where they have this value.
_USUAL: Final[dict[str, Any]] = {
    "generation": 0,
    "skipped": False,
    "update_parts": 1,
    "parked": [],
}
_MOST_S: Final = 1e9

_ENCODER: Final = json.JSONEncoder(allow_nan=False, separators=(",", ":"), default=str)


def to_line(event: Event) -> bytes:
    """Return an event as a line of strict JSON; what JSON does not know becomes its text."""
    if event["type"] == "window":
        event = {name: event[name] for name in event if event[name] != _USUAL.get(name, ...)}
        event["ranks"] = _columns(event["ranks"])
    try:
        text = _ENCODER.encode(event)
    except ValueError:
        text = _ENCODER.encode(strict_json(event))
    return text.encode() + b"\n"


def from_line(line: bytes) -> dict[str, Any]:
    """Return the event of a line; types and fields that are new pass.

    Raises:
        ValueError: It is not an event: a field is missing, or has an impossible value.
    """
    event: dict[str, Any] = from_json(line, allow_inf_nan=False)
    try:
        kind = _Event.model_validate(event).type
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    if kind == "window":
        event = {**_USUAL, **event}
    check_complete(event)
    return {**event, "ranks": _rows(event["ranks"])} if kind == "window" else event


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


def _columns(rows: list[Mapping[str, Any]]) -> dict[str, Any]:
    columns: dict[str, Any] = {name: [row[name] for row in rows] for name in ("rank", "member")}
    for name in rows[0] if rows else ():
        if name in columns:
            continue
        values: list[Any] = [row[name] for row in rows]
        if name.endswith("_s"):
            name = f"{name[:-2]}_us"
            values = [int(1e6 * s + 0.5) if 0 < s < _MOST_S else 0 for s in values]
        elif name == "weight":  # often a whole number
            values = [int(value) if float(value).is_integer() else value for value in values]
        columns[name] = values[0] if values.count(values[0]) == len(values) else values
    return columns


def _rows(columns: dict[str, Any]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [{} for _ in columns["member"]]
    for name, values in columns.items():
        each = values if isinstance(values, list) else [values] * len(rows)
        if len(each) != len(rows):
            raise ValueError(f"ranks.{name} has {len(each)} values for {len(rows)} ranks")
        for row, value in zip(rows, each, strict=True):
            if name.endswith("_us"):
                row[f"{name[:-3]}_s"] = value / 1e6
            else:
                row[name] = value
    return rows


# ── what readers rely on ─────────────────────────────────────────────────────────────────────────

_Whole = Annotated[int, Field(ge=0, le=2**53)]
_Number = Annotated[float, Field(ge=-1e150, le=1e150)]  # products of two are finite
_Amount = Annotated[float, Field(ge=0, le=1e150)]
_UnixTime = Annotated[float, Field(ge=0, le=1e11)]  # up to the year 5138


_ABSENT: Any = None


class _Checked(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")


class _Columns(_Checked):
    __pydantic_extra__: dict[str, _Number | list[_Number | None] | None]
    rank: list[_Whole]
    member: list[str]
    samples: _Whole | list[_Whole]
    weight: _Amount | list[_Amount]
    loss: _Number | list[_Number | None] | None
    compute_us: _Amount | list[_Amount]
    wait_us: _Amount | list[_Amount]
    sync_us: _Amount | list[_Amount]
    data_us: _Amount | list[_Amount] = 0
    update_us: _Amount | list[_Amount] = 0
    sent_bytes: _Whole | list[_Whole] = 0


class _Event(_Checked):
    """Fields by name: each has the same kind in every type of event that has it."""

    t: _UnixTime
    type: str
    window: _Whole = 0
    windows: Annotated[int, Field(ge=1, le=2**53)] = 1
    epoch: _Whole = 0
    committed: list[Annotated[list[_Whole], Field(min_length=2, max_length=2)]] = []
    ranks: _Columns = _ABSENT
    turns: _Whole = 0
    anchor: _Number | None = None
    update_parts: _Whole = 1
    parked: list[_Whole] = []
    shares: list[_Whole] = []
    members: list[str] = []
    run: str = ""
    policy: str = ""
    backend: str = ""
    backend_reason: str | None = None
    unit: str = ""
    num_samples: _Whole = 0
    total_windows: _Whole | None = None
    emulated: dict[str, _Number] = {}
    rank: _Whole | None = None
    member: str = ""
    donor: str = ""
    host: str = ""
    device: str = ""
    name: str = ""
    loss: _Number | None = None
    path: str | None = None
    reason: str | None = None
    message: str | None = None
    cause: str | None = None
    since: _Whole = 0
    num_bytes: _Amount = 0
    num_events: _Whole = 0
    begin_t: _UnixTime | None = None
    elapsed_s: _Amount = 0
    write_s: _Amount = 0
    copy_s: _Amount = 0
    compute_s: _Amount = 0
    expected_s: _Amount = 0
    delay_s: _Amount = 0
    reform_s: _Amount = 0
