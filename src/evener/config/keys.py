"""Types of what a run is given, and what may differ when it resumes. Imports no library."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

Allowed = Literal["data", "precision"]
"""What may differ from the checkpoint if the user allows it (``--allow``)."""

ALLOWED: tuple[Allowed, ...] = get_args(Allowed)

Keys = Mapping[str, Any] | str | Path | None
"""What ``pretrain`` and ``classify`` accept: the keys of a run, or a YAML file with them."""
