"""What is given to a run, and what a resume may change in it. Needs no library."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

Allowed = Literal["data", "precision"]
"""What a resume may change when the user says so."""

ALLOWED: tuple[Allowed, ...] = get_args(Allowed)

Keys = Mapping[str, Any] | str | Path | None
"""What ``pretrain`` and ``classify`` take: keys of a run, or a YAML file that holds them."""
