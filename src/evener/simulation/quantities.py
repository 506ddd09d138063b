"""Quantities as people write them: ``350M``, ``1Gbit``, ``0.1ms``, ``1,0.4``. Pure."""

import math
import re
from collections.abc import Mapping
from typing import Final

from evener.errors import ConfigError

_COUNTS: Final = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}
_BYTES_PER_S: Final = {
    f"{prefix}{unit}{per_second}": size * part
    for prefix, size in {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}.items()
    for unit, part in {"bit": 1 / 8, "B": 1.0}.items()
    for per_second in ("", "/s", "ps")
    if f"{prefix}{unit}" != "B"
}
_SECONDS: Final = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6}

_LEAST, _MOST = 1e-9, 1e15
"""What is smaller or larger cannot be meant, and what is computed of it would not be finite."""

_QUANTITY: Final = re.compile(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([A-Za-zµ/]*)\s*")


def read_count(option: str, text: str) -> int:
    """Read a number such as ``350M`` or ``1.3B``.

    Raises:
        ConfigError: It is something else; ``option`` names it.
    """
    remedy = "give a number above 0, such as 350M or 1.3B"
    return max(1, round(_read(option, text, _COUNTS, remedy)))


def read_bandwidth(option: str, text: str) -> float:
    """Read bytes per second, such as ``1Gbit`` or ``12GB/s``.

    Raises:
        ConfigError: It is something else.
    """
    remedy = "give bits or bytes per second, such as 1Gbit, 100Mbit or 12GB"
    return _read(option, text, _BYTES_PER_S, remedy)


def read_duration(option: str, text: str) -> float:
    """Read seconds, such as ``0.1ms``.

    Raises:
        ConfigError: It is something else.
    """
    return _read(option, text, _SECONDS, "give a length of time, such as 0.1ms or 50us")


def read_speeds(option: str, text: str) -> tuple[float, ...]:
    """Read samples per second of several ranks, such as ``120,48``.

    Raises:
        ConfigError: One is not such a number.
    """
    speeds = []
    for part in text.split(","):
        try:
            speed = float(part)
        except ValueError:
            speed = math.nan
        if not _LEAST <= speed <= _MOST:
            raise ConfigError(
                f"{option} is {text!r}, and {part.strip()!r} is not a speed; give samples per "
                "second of each rank alone, above 0 and with commas between them, such as 120,48"
            )
        speeds.append(speed)
    return tuple(speeds)


def _read(option: str, text: str, units: Mapping[str, float], remedy: str) -> float:
    match = _QUANTITY.fullmatch(text)
    try:
        number = float(match[1]) if match else math.nan
    except ValueError:
        number = math.nan
    if match is None or not number > 0.0:
        raise ConfigError(f"{option} is {text!r}, which is not a number above 0; {remedy}")
    if match[2] not in units:
        unit = f"the unit {match[2]!r} is unknown" if match[2] else "its unit is missing"
        raise ConfigError(f"{option} is {text!r}: {unit}; {remedy}")
    value = number * units[match[2]]
    if not _LEAST <= value <= _MOST:
        raise ConfigError(f"{option} is {text!r}, which is too large or too small; {remedy}")
    return value
