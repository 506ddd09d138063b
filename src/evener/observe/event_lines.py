"""Events as lines of JSON, and back: a line is the event, and is checked when it is read."""

import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, Final, Required

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from evener.observe.events import Amount, Event, Number, RankRow, Whole, check_complete

_ENCODER: Final = json.JSONEncoder(allow_nan=False, separators=(",", ":"), default=str)


def to_line(event: Event) -> bytes:
    """Return an event as a line of strict JSON; other types become their text."""
    try:
        text = _ENCODER.encode(event)
    except ValueError:
        text = _ENCODER.encode(strict_json(event))
    return text.encode() + b"\n"


def from_line(line: bytes) -> dict[str, Any]:
    """Return the event of a line; unknown types and fields are accepted.

    Raises:
        ValueError: It is not an event: a field is missing, or has an impossible value.
    """
    try:
        event = dict(_EVENT.validate_json(line))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"{where}: {first['msg']}" if where else first["msg"]) from None
    check_complete(event)
    return event


def strict_json(value: Any) -> Any:
    """Convert dataclasses, mappings and tuples to JSON; non-finite numbers become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if is_dataclass(value):
        return {part.name: strict_json(getattr(value, part.name)) for part in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): strict_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict_json(item) for item in value]
    return value


_UnixTime = Annotated[float, Field(ge=0, le=1e11)]  # up to the year 5138


@with_config(ConfigDict(strict=True, extra="allow", allow_inf_nan=False))
class _EventFields(TypedDict, total=False):
    """Fields by name: each has the same kind in every type of event that has it."""

    t: Required[_UnixTime]
    type: Required[str]
    window: Whole
    windows: Annotated[int, Field(ge=1, le=2**53)]
    generation: Whole
    epoch: Whole
    committed: list[Annotated[list[Whole], Field(min_length=2, max_length=2)]]
    ranks: list[RankRow]
    optimizer_steps: Whole
    anchor: Number | None
    update_parts: Whole
    parked: list[Whole]
    shares: list[Whole]
    members: list[str]
    run: str
    policy: str
    backend: str
    backend_reason: str | None
    unit: str
    num_samples: Whole
    total_windows: Whole | None
    emulated: Number
    rank: Whole | None
    member: str
    source: str
    host: str
    device: str
    name: str
    loss: Number | None
    path: str | None
    reason: str | None
    message: str | None
    cause: str | None
    since: Whole
    num_bytes: Whole
    num_events: Whole
    begin_t: _UnixTime | None
    elapsed_s: Amount
    write_s: Amount
    copy_s: Amount
    compute_s: Amount
    expected_s: Amount
    delay_s: Amount
    reform_s: Amount


_EVENT: Final = TypeAdapter(_EventFields)
