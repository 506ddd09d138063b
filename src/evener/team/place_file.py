"""Reads a rank's place from a YAML file; see ``DistributedTrainConfig.from_yaml``."""

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evener.errors import ConfigError
from evener.parsing import short
from evener.yaml_files import read_yaml

_NUMBERS = ("world_size", "rank", "local_rank", "local_world_size", "coordinator_port")
_KEYS = (*_NUMBERS, "role", "coordinator_addr", "backend", "comm_backend")
#: Where else in a file the keys may stand.
_SECTIONS = (("training", "distributed"), ("distributed",))


def read_place(path: Path, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a file, with ``changes`` put over them, as arguments of the config.

    Raises:
        ConfigError: Names the file, the key, its value and what is allowed.
    """
    document, where = _section(read_yaml(path)), str(path)
    for key, value in document.items():
        if key not in _KEYS:
            close = difflib.get_close_matches(str(key), _KEYS, n=1)
            hint = f", did you mean {close[0]!r}?" if close else ""
            raise ConfigError(
                f"{where}: unknown key {key!r} (value {short(value)}){hint}; allowed: "
                f"{', '.join(_KEYS)}"
            )
    place = {**document, **changes}
    for key in _NUMBERS:
        if key in place and type(place[key]) is not int:
            raise ConfigError(f"{where}: {key} is {short(place[key])}; give a whole number")
    if "world_size" not in place:
        raise ConfigError(f"{where}: world_size is missing; give the number of ranks")
    if place["world_size"] > 1:
        for key in ("rank", "coordinator_addr"):
            if key not in place:
                raise ConfigError(
                    f"{where}: {key} is missing for a team of {place['world_size']}; give it in "
                    f"the file, or as from_yaml(path, {key}=...) where ranks share the file"
                )
    return {"rank": 0, **place}


def _section(document: dict[str, Any]) -> dict[str, Any]:
    for names in _SECTIONS:
        inner: Any = document
        for name in names:
            inner = inner.get(name) if isinstance(inner, dict) else None
        if isinstance(inner, dict):
            return inner
    return document
